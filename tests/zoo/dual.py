"""Two independent towers under a contrastive loss, which couples all samples of a microbatch."""

from typing import Any

import lightning as L
import torch

from .case import FIRST_TEXT_ID, VOCABULARY, Batch, Case, TinyModule

EOS = 7
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "projection_dim": 16,
}


def build_clip() -> L.LightningModule:
    from transformers import CLIPConfig, CLIPModel

    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 4,
        "max_position_embeddings": 32,
        "eos_token_id": EOS,
    }
    vision: dict[str, Any] = {"num_hidden_layers": 3, "image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=TOWER | text, vision_config=TOWER | vision, projection_dim=16)
    return TinyModule(CLIPModel(config), return_loss=True)


def pair_batch(counts: list[int]) -> Batch:
    tokens = torch.randint(FIRST_TEXT_ID, VOCABULARY, (len(counts), 10))
    tokens[:, -1] = EOS  # the text feature is the state at the end token
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(len(counts), 3, 8, 8),
    }


CASES = [
    Case(
        name="clip",
        make_module=build_clip,
        make_batch=pair_batch,
        modalities=("vision", "language"),
        layers={
            "vision": ("model.vision_model.encoder.layers",),
            "language": ("model.text_model.encoder.layers",),
        },
        boundaries={"vision": "model.get_image_features", "language": "model.get_text_features"},
        frozen={
            "none": (),
            "encoder": ("model.vision_model",),
            "projector_only": ("model.vision_model", "model.text_model", "model.logit_scale"),
            "language": ("model.text_model", "model.text_projection"),
        },
        mean_of_samples=False,
    ),
]
