"""Models of about 100 MB, in which weights outweigh activations, and a batch of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from transformers import (
    CLIPVisionConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

Batch = dict[str, torch.Tensor]
WORDS, WIDTH, LENGTH = 8_000, 512, 48
TEXT = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 128,
}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
IMAGE, START = WORDS - 1, WORDS - 2


class Module(L.LightningModule):
    """A model, trained with AdamW."""

    def __init__(self, model: Any, *, frozen: str = "") -> None:
        super().__init__()
        self.model = model
        for name, parameter in self.named_parameters():
            if frozen and frozen in name:
                parameter.requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


def llava(layers: int = 4) -> Any:
    vision = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=layers, num_attention_heads=8, image_size=56
    )
    vision.patch_size = 14
    text = LlamaConfig(**TEXT | {"num_hidden_layers": layers}, **TOKENS)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=16)
    )


def llava_batch(samples: int) -> Batch:
    tokens = torch.randint(4, START, (samples, LENGTH))
    tokens[:, 1:17] = IMAGE
    return {"input_ids": tokens, "labels": tokens.clone(), "pixel_values": torch.randn(samples, 3, 56, 56)}


def whisper(layers: int = 4) -> Any:
    config = WhisperConfig(
        vocab_size=WORDS, d_model=WIDTH, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=4 * WIDTH, max_source_positions=32,
        max_target_positions=LENGTH, num_mel_bins=16, decoder_start_token_id=1, **TOKENS,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def whisper_batch(samples: int) -> Batch:
    labels = torch.randint(4, START, (samples, LENGTH))
    return {"input_features": torch.randn(samples, 16, 64), "labels": labels}


def qwen2_vl(layers: int = 4) -> Any:
    pairs = WIDTH // 16  # of rotated numbers in a head
    section = [pairs - 2 * (3 * pairs // 8), 3 * pairs // 8, 3 * pairs // 8]
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": section}
    vision = {
        "depth": layers, "num_heads": 8, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "embed_dim": WIDTH, "hidden_size": WIDTH, "mlp_ratio": 4,
    }  # fmt: skip
    config = Qwen2VLConfig(
        text_config=TEXT | TOKENS | {"num_hidden_layers": layers, "rope_parameters": rope},
        vision_config=vision, image_token_id=IMAGE, video_token_id=START, vision_start_token_id=START - 1,
        vision_end_token_id=START - 2,
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config)


def qwen2_vl_batch(samples: int) -> Batch:
    tokens = torch.randint(4, START - 2, (samples, LENGTH))
    tokens[:, 0], tokens[:, 1:17], tokens[:, 17] = START - 1, IMAGE, START - 2
    return {
        "input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE).int(), "pixel_values": torch.randn(samples * 64, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 8, 8]] * samples),
    }  # fmt: skip


def internvl(layers: int = 4) -> Any:
    vision = {
        "model_type": "internvl_vision", "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": layers, "num_attention_heads": 8, "image_size": [56, 56], "patch_size": [7, 7],
    }  # fmt: skip
    text = {"model_type": "qwen2"} | TEXT | TOKENS | {"num_hidden_layers": layers}
    config = InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=16)
    return InternVLForConditionalGeneration(config)


def llama(layers: int = 4) -> Any:
    return LlamaForCausalLM(LlamaConfig(**TEXT | {"num_hidden_layers": layers}, **TOKENS))


def mixtral(layers: int = 4) -> Any:
    """The experts of a layer are as large as the dense layer of the others."""
    sizes = TEXT | {"num_hidden_layers": layers, "intermediate_size": TEXT["intermediate_size"] // 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **TOKENS, num_local_experts=4, num_experts_per_tok=2))


def text_batch(samples: int) -> Batch:
    tokens = torch.randint(4, START, (samples, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


MODELS: dict[str, tuple[str | None, Callable[..., Any], Callable[[int], Batch]]] = {
    "llava": ("vision", llava, llava_batch),
    "whisper": ("audio", whisper, whisper_batch),
    "qwen2-vl": ("vision", qwen2_vl, qwen2_vl_batch),
    "internvl": ("vision", internvl, llava_batch),
    "llama": (None, llama, text_batch),
    "mixtral": (None, mixtral, text_batch),
}
"""by name: its encoder, where it has one, how to build it, a batch of so many samples"""
