"""Families whose images become features at placeholder tokens of a language model.

Every image has four features, so that counts of images are the only thing that varies between samples.
"""

from typing import Any

import lightning as L
import torch

from .case import VOCABULARY, Batch, Case, Items, TinyModule, text_batch
from .text import IDS, LLAMA

IMAGE_ID = 1
FEATURES = 4
LENGTH = 22  # room for two images and the labels
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
PIXELS = Items(placeholder=IMAGE_ID, length=FEATURES, rows={"pixel_values": 1})
# these families take the state before the tower's last layer
UNUSED_LAST_LAYER = ("model.model.vision_tower.encoder.layers.2", "model.model.vision_tower.post_layernorm")
TILED = Items(placeholder=IMAGE_ID, length=10, rows={"pixel_values": 1, "image_sizes": 1})


def build_llava() -> L.LightningModule:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4} | VISION,
        text_config={"model_type": "llama"} | LLAMA,
        image_token_index=IMAGE_ID,
        image_seq_length=FEATURES,
    )
    return TinyModule(LlavaForConditionalGeneration(config), use_cache=False)


def build_gemma3() -> L.LightningModule:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text: dict[str, Any] = {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    vision: dict[str, Any] = {"image_size": 16, "patch_size": 4, "vision_use_head": False}
    config = Gemma3Config(
        text_config={"model_type": "gemma3_text"} | LLAMA | text,
        vision_config={"model_type": "siglip_vision_model"} | VISION | vision,
        mm_tokens_per_image=FEATURES,
        image_token_index=IMAGE_ID,
    )
    return TinyModule(Gemma3ForConditionalGeneration(config), use_cache=False)


def build_blip_2() -> L.LightningModule:
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    qformer: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "encoder_hidden_size": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    text: dict[str, Any] = {
        "model_type": "opt",
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    }
    config = Blip2Config(
        vision_config=small | {"num_hidden_layers": 3, "image_size": 8, "patch_size": 4, "initializer_range": 0.02},
        qformer_config=small | qformer,
        text_config=IDS | text,
        num_query_tokens=FEATURES,
        image_token_index=IMAGE_ID,
    )
    return TinyModule(Blip2ForConditionalGeneration(config), use_cache=False)


def build_llava_next() -> L.LightningModule:
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    config = LlavaNextConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4} | VISION,
        text_config={"model_type": "llama"} | LLAMA,
        image_token_index=IMAGE_ID,
        image_grid_pinpoints=[[8, 8]],
    )
    return TinyModule(LlavaNextForConditionalGeneration(config), use_cache=False)


def build_internvl() -> L.LightningModule:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    config = InternVLConfig(
        vision_config={"model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [2, 2]} | VISION,
        text_config={"model_type": "qwen2"} | LLAMA,
        image_token_id=IMAGE_ID,
        image_seq_length=FEATURES,
    )
    return TinyModule(InternVLForConditionalGeneration(config), use_cache=False)


def build_smolvlm() -> L.LightningModule:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    config = SmolVLMConfig(
        vision_config=VISION | {"image_size": 8, "patch_size": 2},
        text_config={"model_type": "llama"} | LLAMA,
        image_token_id=IMAGE_ID,
        scale_factor=2,
    )
    return TinyModule(SmolVLMForConditionalGeneration(config), use_cache=False)


def image_batch(counts: list[int], *, size: int) -> Batch:
    batch = text_batch(counts, length=LENGTH, items=PIXELS)
    if sum(counts):
        batch["pixel_values"] = torch.randn(sum(counts), 3, size, size)
    return batch


def tiled_image_batch(counts: list[int]) -> Batch:
    """An image is a whole view and one tile: 4 features, and 2 x 2 with a newline after each row."""
    batch = text_batch(counts, length=2 * LENGTH, items=TILED)
    if sum(counts):
        batch["pixel_values"] = torch.randn(sum(counts), 2, 3, 8, 8)
        batch["image_sizes"] = torch.tensor([[8, 8]] * sum(counts))
    return batch


def nested_image_batch(counts: list[int]) -> Batch:
    """Pixels stand by sample: [B, images of a sample, channels, height, width]."""
    batch = image_batch(counts, size=8)
    return batch | {"pixel_values": batch["pixel_values"].unsqueeze(1)}


def gemma3_batch(counts: list[int]) -> Batch:
    batch = image_batch(counts, size=16)
    return batch | {"token_type_ids": (batch["input_ids"] == IMAGE_ID).long()}


def tower_and_projector(
    encoder_layers: str,
    *,
    tower: str = "model.model.vision_tower",
    language: str = "model.model.language_model",
    tied: bool = False,
) -> dict[str, Any]:
    """What the families with a tower, a projector and a language model side by side have in common."""
    decoder = (language,) if tied else (language, "model.lm_head")
    return {
        "modalities": ("vision", "language"),
        "layers": {"vision": (f"{tower}.{encoder_layers}",), "language": (f"{language}.layers",)},
        "boundaries": {"vision": "model.model.get_image_features"},
        "frozen": {
            "none": (),
            "encoder": (tower,),
            "projector_only": (tower, *decoder),
            "language": decoder,
        },
    }


CASES = [
    Case(
        name="llava",
        make_module=build_llava,
        make_batch=lambda counts: image_batch(counts, size=8),
        items=(PIXELS,),
        unused=UNUSED_LAST_LAYER,
        image_counts=(0, 1, 2),
        **tower_and_projector("encoder.layers"),
    ),
    Case(
        name="gemma3",
        make_module=build_gemma3,
        make_batch=gemma3_batch,
        items=(PIXELS,),
        image_counts=(0, 1, 2),
        **tower_and_projector("encoder.layers", tied=True),
    ),
    Case(
        name="blip_2",
        make_module=build_blip_2,
        make_batch=lambda counts: image_batch(counts, size=8),
        modalities=("vision", "language"),
        layers={
            "vision": ("model.vision_model.encoder.layers", "model.qformer.encoder.layer"),
            "language": ("model.language_model.model.decoder.layers",),
        },
        boundaries={"vision": "model.get_image_features"},
        frozen={
            "none": (),
            "encoder": ("model.vision_model", "model.qformer", "model.query_tokens"),
            "projector_only": (
                "model.vision_model",
                "model.qformer",
                "model.query_tokens",
                "model.language_model",
            ),
            "language": ("model.language_model",),
        },
        items=(PIXELS,),
        image_counts=(1, 2),  # the forward takes no text without images
    ),
    Case(
        name="llava_next",
        make_module=build_llava_next,
        make_batch=tiled_image_batch,
        items=(TILED,),
        unused=UNUSED_LAST_LAYER,
        image_counts=(0, 1, 2),
        **tower_and_projector("encoder.layers"),
    ),
    Case(
        name="internvl",
        make_module=build_internvl,
        make_batch=lambda counts: image_batch(counts, size=8),
        items=(PIXELS,),
        image_counts=(0, 1, 2),
        **tower_and_projector("encoder.layer", tied=True),
    ),
    Case(
        name="smolvlm",
        make_module=build_smolvlm,
        make_batch=nested_image_batch,
        items=(PIXELS,),
        **tower_and_projector("encoder.layers", tower="model.model.vision_model", language="model.model.text_model"),
    ),
]
