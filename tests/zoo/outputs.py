"""Models of transformers that speak or draw after their language model, with steps of two losses.

They are no `CASES`: those have one loss. Everything else is as there: pure functions of a seed, and batches whose
losses are the means of those of their equal splits.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import qwen
from .case import Batch, text_batch
from .qwen import AUDIO_END_ID, AUDIO_ID, AUDIO_START_ID, IMAGE_ID, ROPE, VIDEO_ID, VISION_START_ID
from .text import LLAMA

CODES = 24
WEIGHT = 0.5


class TwoLosses(L.LightningModule):
    def __init__(self, model: nn.Module, lr: float = 0.05) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class SpeakingOmni(TwoLosses):
    """Qwen2.5-Omni: the talker hears the thinker's hidden states and embeddings, and says the codes before each one."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "codes"}
        out = self.model.thinker(**inputs, output_hidden_states=True, use_cache=False)
        heard = out.hidden_states[-1] + self.model.thinker.get_input_embeddings()(inputs["input_ids"])
        said = self.model.talker.get_input_embeddings()(batch["codes"])
        spoken = self.model.talker(
            inputs_embeds=heard + said,
            attention_mask=inputs["attention_mask"],
            input_text_ids=inputs["input_ids"],
            image_grid_thw=inputs.get("image_grid_thw"),
            audio_feature_lengths=inputs["feature_attention_mask"].sum(-1),
            use_cache=False,
        )
        codes = F.cross_entropy(spoken.logits[:, :-1].flatten(0, 1), batch["codes"][:, 1:].flatten())
        self.log("text_loss", out.loss)
        return out.loss + WEIGHT * codes


class DrawingJanus(TwoLosses):
    """Janus: the head for image tokens reads the last hidden states, and its targets are a tokenizer's."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "drawn"}
        out = self.model(**inputs, output_hidden_states=True, use_cache=False)
        with torch.no_grad():
            codes = self.model.model.vqmodel.encode(batch["drawn"]).image_tokens.reshape(len(batch["drawn"]), -1)
        logits = self.model.model.generation_head(out.hidden_states[-1])
        drawn = F.cross_entropy(logits[:, -codes.shape[1] :].flatten(0, 1), codes.flatten())
        self.log("text_loss", out.loss)
        return out.loss + WEIGHT * drawn


def build_omni() -> L.LightningModule:
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    thinker = qwen.build_qwen2_5_omni_thinker().model.config.to_dict()
    talker = {name: value for name, value in LLAMA.items() if name not in ("bos_token_id", "eos_token_id")}
    config = Qwen2_5OmniConfig(
        thinker_config=thinker,
        talker_config=talker
        | {
            "vocab_size": CODES,
            "embedding_size": 32,
            "hidden_size": 16,
            "head_dim": 4,
            "rope_parameters": ROPE | {"mrope_section": [1, 1, 0]},
            "tts_codec_start_token_id": 1,
            "tts_codec_end_token_id": 2,
            "tts_codec_pad_token_id": 3,
            "tts_codec_mask_token_id": 4,
            "tts_text_start_token_id": 5,
            "tts_text_end_token_id": 6,
            "tts_text_pad_token_id": 7,
            "vision_end_token_id": 9,
            "image_token_index": IMAGE_ID,
            "video_token_index": VIDEO_ID,
            "audio_token_index": AUDIO_ID,
            "audio_start_token_id": AUDIO_START_ID,
            "audio_end_token_id": AUDIO_END_ID,
            "vision_start_token_id": VISION_START_ID,
        },
        token2wav_config={
            "dit_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "head_dim": 8,
                "emb_dim": 8,
                "num_embeds": CODES,
                "mel_dim": 8,
                "enc_emb_dim": 8,
                "enc_dim": 8,
                "enc_channels": [8, 8, 8, 8, 8],
                "enc_attention_channels": 4,
                "enc_se_channels": 4,
            },
            "bigvgan_config": {"mel_dim": 8, "upsample_initial_channel": 64},
        },
    )
    model = Qwen2_5OmniForConditionalGeneration(config)
    model.token2wav.requires_grad_(False)
    return SpeakingOmni(model)


def omni_batch(samples: int) -> Batch:
    batch = qwen.image_and_audio_batch([1] * samples)
    return batch | {"codes": torch.randint(5, CODES, batch["input_ids"].shape)}


def build_janus() -> L.LightningModule:
    from transformers import JanusConfig, JanusForConditionalGeneration

    config = JanusConfig(
        text_config={"model_type": "llama"} | LLAMA,
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 8,
            "patch_size": 4,
            "projection_dim": 32,
            "depth": 2,
            "num_image_tokens": 4,
        },
        vq_config={
            "embed_dim": 8,
            "num_embeddings": CODES,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_patches": 2,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
        },
        image_token_id=IMAGE_ID,
    )
    model = JanusForConditionalGeneration(config)
    model.model.vqmodel.requires_grad_(False)
    return DrawingJanus(model)


def janus_batch(samples: int) -> Batch:
    batch = text_batch([1] * samples, length=16, items=qwen.IMAGE)

    return batch | {"pixel_values": torch.randn(samples, 3, 8, 8), "drawn": torch.randn(samples, 3, 4, 4)}


BUILD = {"omni": (build_omni, omni_batch), "janus": (build_janus, janus_batch)}


def build(name: str, seed: int = 0) -> L.LightningModule:
    """The module in train mode, its parameters perturbed, as `Case.build` does."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = BUILD[name][0]()
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module.train()


def batch_of(name: str, samples: int, seed: int) -> Batch:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BUILD[name][1](samples)
