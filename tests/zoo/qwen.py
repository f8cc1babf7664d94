"""The Qwen multimodal families: packed patches with grids, rotary positions in three dimensions, audio.

An image is one grid of 4 x 4 patches, merged 2 x 2 into four features; patches of all images stand in one
tensor [patches of the batch, channels * frames * height * width] in the order of the samples.
"""

from typing import Any

import lightning as L
import torch

from .case import LABELS, Batch, Case, Items, TinyModule, text_batch
from .text import LLAMA, MEL_BINS, SOURCE_FRAMES
from .vision_language import FEATURES, LENGTH

IMAGE_ID, VIDEO_ID, VISION_START_ID, VISION_END_ID, AUDIO_ID = 1, 2, 3, 4, 5
AUDIO_START_ID, AUDIO_END_ID = 8, 9
GRID = (1, 4, 4)
PATCHES = 16
PATCH_WIDTH = 3 * 2 * 4 * 4
VISION: dict[str, Any] = {
    "depth": 3,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
SMALL_VISION = VISION | {
    "hidden_size": 16,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "num_position_embeddings": PATCHES,
    "deepstack_visual_indexes": [0, 1],
}
"""of Qwen3-VL and later, with features of the language model's width"""
WINDOWED: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "window_size": 8,  # pixels: each merged feature is a window of its own
    "fullatt_block_indexes": [2],
}
AUDIO: dict[str, Any] = {
    "num_mel_bins": MEL_BINS,
    "d_model": 16,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "max_source_positions": SOURCE_FRAMES,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
VISION_TOKEN_IDS: dict[str, Any] = {
    "vision_start_token_id": VISION_START_ID,
    "vision_end_token_id": VISION_END_ID,
}
TOKEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE_ID,
    "video_token_id": VIDEO_ID,
} | VISION_TOKEN_IDS
IMAGE = Items(placeholder=IMAGE_ID, length=FEATURES, rows={"pixel_values": PATCHES, "image_grid_thw": 1})
CLIP = Items(placeholder=AUDIO_ID, length=4, rows={"input_features": 1, "feature_attention_mask": 1})


def build_qwen2_vl() -> L.LightningModule:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig(
        text_config=LLAMA | {"rope_parameters": ROPE},
        vision_config=VISION | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        **TOKEN_IDS,
    )
    return TinyModule(Qwen2VLForConditionalGeneration(config), use_cache=False)


def build_qwen2_5_vl() -> L.LightningModule:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config=LLAMA | {"rope_parameters": ROPE}, vision_config=VISION | WINDOWED, **TOKEN_IDS
    )
    return TinyModule(Qwen2_5_VLForConditionalGeneration(config), use_cache=False)


def build_qwen3_vl() -> L.LightningModule:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "num_position_embeddings": PATCHES,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config=LLAMA | {"rope_parameters": ROPE, "head_dim": 8},
        vision_config=VISION | vision,
        **TOKEN_IDS,
    )
    return TinyModule(Qwen3VLForConditionalGeneration(config), use_cache=False)


def build_qwen2_5_omni_thinker() -> L.LightningModule:
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    audio: dict[str, Any] = AUDIO | {"n_window": SOURCE_FRAMES // 2, "output_dim": 32}
    config = Qwen2_5OmniThinkerConfig(
        text_config=LLAMA | {"rope_parameters": ROPE},
        vision_config=VISION | WINDOWED,
        audio_config=audio,
        audio_token_index=AUDIO_ID,
        image_token_index=IMAGE_ID,
        video_token_index=VIDEO_ID,
        audio_start_token_id=AUDIO_START_ID,
        audio_end_token_id=AUDIO_END_ID,
        tie_word_embeddings=False,
        **VISION_TOKEN_IDS,
    )
    return TinyModule(Qwen2_5OmniThinkerForConditionalGeneration(config), use_cache=False)


def build_qwen2_audio() -> L.LightningModule:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2"} | LLAMA,
        audio_config={"model_type": "qwen2_audio_encoder"} | AUDIO,
        audio_token_index=AUDIO_ID,
    )
    return TinyModule(Qwen2AudioForConditionalGeneration(config), use_cache=False)


def packed_images(count: int) -> Batch:
    if count == 0:
        return {}
    return {
        "pixel_values": torch.randn(count * PATCHES, PATCH_WIDTH),
        "image_grid_thw": torch.tensor([GRID] * count),
    }


def clips(count: int) -> Batch:
    if count == 0:
        return {}
    return {
        "input_features": torch.randn(count, MEL_BINS, 2 * SOURCE_FRAMES),
        "feature_attention_mask": torch.ones(count, 2 * SOURCE_FRAMES, dtype=torch.long),
    }


def packed_image_batch(counts: list[int]) -> Batch:
    batch = text_batch(counts, length=LENGTH, items=IMAGE, begin=VISION_START_ID, end=VISION_END_ID)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_ID).int()
    return batch | packed_images(sum(counts))


def audio_batch(counts: list[int]) -> Batch:
    return text_batch(counts, length=LENGTH, items=CLIP) | clips(sum(counts))


def image_and_audio_batch(counts: list[int]) -> Batch:
    """Up to two images and then one clip per sample."""
    batch = text_batch(counts, length=LENGTH + 4, items=IMAGE, begin=VISION_START_ID, end=VISION_END_ID)
    at = 1 + 2 * (FEATURES + 2)
    assert at + CLIP.length + 2 <= LENGTH + 4 - LABELS
    batch["input_ids"][:, at] = AUDIO_START_ID
    batch["input_ids"][:, at + 1 : at + 1 + CLIP.length] = AUDIO_ID
    batch["input_ids"][:, at + 1 + CLIP.length] = AUDIO_END_ID
    return batch | packed_images(sum(counts)) | clips(len(counts))


def packed_vision(*others: str) -> dict[str, Any]:
    """What the families with `visual.blocks` have in common; `others` are parts of the encoder."""
    tower, language = "model.model.visual", ("model.model.language_model", "model.lm_head")
    inside = ("patch_embed", "blocks", *others)
    return {
        "modalities": ("vision", "language"),
        "layers": {"vision": (f"{tower}.blocks",), "language": ("model.model.language_model.layers",)},
        "boundaries": {"vision": "model.model.get_image_features"},
        "frozen": {
            "none": (),
            "encoder": tuple(f"{tower}.{part}" for part in inside),
            "projector_only": (*(f"{tower}.{part}" for part in inside), *language),
            "language": language,
        },
        "items": (IMAGE,),
        "image_counts": (0, 1, 2),
    }


CASES = [
    Case(
        name="qwen2_vl",
        make_module=build_qwen2_vl,
        make_batch=packed_image_batch,
        **packed_vision(),
    ),
    Case(
        name="qwen2_audio",
        make_module=build_qwen2_audio,
        make_batch=audio_batch,
        modalities=("audio", "language"),
        layers={
            "audio": ("model.model.audio_tower.layers",),
            "language": ("model.model.language_model.layers",),
        },
        boundaries={"audio": "model.model.audio_tower"},
        frozen={
            "none": (),
            "encoder": ("model.model.audio_tower",),
            "projector_only": ("model.model.audio_tower", "model.model.language_model", "model.lm_head"),
            "language": ("model.model.language_model", "model.lm_head"),
        },
        items=(CLIP,),
        image_counts=(0, 1, 2),
    ),
    Case(
        name="qwen2_5_vl",
        make_module=build_qwen2_5_vl,
        make_batch=packed_image_batch,
        **packed_vision(),
    ),
    Case(
        name="qwen3_vl",
        make_module=build_qwen3_vl,
        make_batch=packed_image_batch,
        **packed_vision("pos_embed"),
    ),
    Case(
        name="qwen2_5_omni_thinker",
        make_module=build_qwen2_5_omni_thinker,
        make_batch=image_and_audio_batch,
        modalities=("vision", "audio", "language"),
        layers={
            "vision": ("model.model.visual.blocks",),
            "audio": ("model.model.audio_tower.layers",),
            "language": ("model.model.language_model.layers",),
        },
        boundaries={
            "vision": "model.model.get_image_features",
            "audio": "model.model.get_audio_features",
        },
        frozen={
            "none": (),
            "encoder": ("model.model.visual", "model.model.audio_tower"),
            "language": ("model.model.language_model", "model.lm_head"),
        },
        unused=("model.model.audio_tower.audio_bos_eos_token",),
        items=(IMAGE, CLIP),
        image_counts=(0, 1, 2),
    ),
]
