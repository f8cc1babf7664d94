"""A small model that sees and hears, its processor, and conversations for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image

from lightning_mm5d import ModalityEncoder, MultimodalModel, MultimodalProcessor
from models.tiny_tokenizers import CHATML, tokenizer


def language_model(family: str = "llama") -> Any:
    common = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "opt":
        return hf.OPTForCausalLM(hf.OPTConfig(**common, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**common, intermediate_size=48, num_key_value_heads=2))


def composed(family: str = "llama", **projectors: Any) -> MultimodalModel:
    """Four features for each image of 8 x 8 pixels; one for each 20 ms of sound."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = hf.CLIPVisionModel(hf.CLIPVisionConfig(**sizes, image_size=8, patch_size=4))
    sound = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    audio = hf.WhisperModel(
        hf.WhisperConfig(
            **sound,
            decoder_layers=1,
            decoder_attention_heads=2,
            num_mel_bins=8,
            max_source_positions=50,
            vocab_size=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    ).encoder
    encoders = {
        "vision": ModalityEncoder(vision, projectors.get("vision", "mlp")),
        "audio": ModalityEncoder(audio, projectors.get("audio", "linear")),
    }
    return MultimodalModel(encoders=encoders, language_model=language_model(family))


def processors() -> dict[str, Any]:
    return {
        "vision": hf.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        "audio": hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1, n_fft=400),
    }


def processor(model: Any, template: str | None = CHATML) -> MultimodalProcessor:
    return MultimodalProcessor(tokenizer(template), processors(), model)


def image(seed: int) -> Any:
    pixels = np.random.default_rng(seed).integers(0, 255, (10, 12, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def sound(seed: int, seconds: float = 0.2) -> Any:
    return np.random.default_rng(seed).standard_normal(int(16000 * seconds)).astype(np.float32)


def talk(*parts: Any, answer: str = "a cat") -> dict[str, Any]:
    """One question and its answer: strings stay text, 3-d things are images, arrays sounds."""
    content = []
    for part in parts:
        kind = "text" if isinstance(part, str) else "audio" if isinstance(part, np.ndarray) else "image"
        content.append({"type": kind, kind: part})
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}
