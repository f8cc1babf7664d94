"""What is known of image and video encoders: their inputs, their rows of features, and the size of each item.

Rows are those of patches. Class and register tokens come first in an encoder's result and are dropped, as is customary
in models that feed a language model (LLaVA's default); padding is dropped, too.

Shapes: N items, F frames, C channels, H height, W width, P patches, T rows of all items, D width.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.item_rows import (
    Inputs,
    ItemSize,
    hidden_state,
    kept_rows,
    known_kind,
    result_only,
    size_of_grid,
)


def pair(value: Any) -> tuple[int, int]:
    """Return height and width of a size in a config: one number, or one for each."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)


# --- images in a grid of patches, all of one size ---


def split_frames(inputs: Inputs) -> tuple[Tensor, list[int]]:
    """Return the frames (N, C, H, W) of ``pixel_values``, and how many each item has.

    An image (N, C, H, W) is one frame. Videos (N, F, C, H, W) have as many as ``num_frames`` (N,) says, or F.
    """
    pixels = inputs["pixel_values"]
    if pixels.dim() == 4:
        return pixels, [1] * len(pixels)
    if pixels.dim() != 5:
        rule = "Images are (N, C, H, W), videos (N, F, C, H, W)"
        raise ConfigError("pixel_values", tuple(pixels.shape), rule, "Stack the images of a batch along the first dim")
    counts = inputs.get("num_frames")
    if counts is None:
        return pixels.flatten(0, 1), [pixels.shape[1]] * len(pixels)
    frames = [int(count) for count in counts.tolist()]
    if pixels.is_meta:
        return pixels.flatten(0, 1)[: sum(frames)], frames
    return torch.cat([video[:count] for video, count in zip(pixels, frames, strict=True)]), frames


def _patch_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    pixels, frames = split_frames(inputs)
    height, width = pair(config.patch_size)
    return [size_of_grid(pixels.shape[-2] // height, pixels.shape[-1] // width, count) for count in frames]


def called_on_images(model: nn.Module, pixels: Tensor, layer: int) -> Tensor:
    """Return a layer's result for frames; positions are interpolated where the encoder can and sizes are unusual."""
    expected = getattr(model.config, "image_size", None)
    known = inspect.signature(type(model).forward).parameters
    if expected is None or pair(expected) == tuple(pixels.shape[-2:]) or "interpolate_pos_encoding" not in known:
        return hidden_state(model, layer, pixel_values=pixels)
    return hidden_state(model, layer, pixel_values=pixels, interpolate_pos_encoding=True)


def _patch_rows(model: nn.Module, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    states = called_on_images(model, split_frames(inputs)[0], layer)
    length = math.prod(sizes[0].grid or ()) if sizes else 0
    return states[:, states.shape[1] - length :].flatten(0, 1)


def _hidden_size(config: Any) -> int:
    return config.hidden_size


PATCHES = known_kind(("pixel_values", "num_frames"), _patch_sizes, _patch_rows, _hidden_size)


# --- images of unlike sizes ---


def _shape_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    return [size_of_grid(height, width) for height, width in inputs["spatial_shapes"].tolist()]


def _naflex_rows(model: nn.Module, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    mask = inputs.get("pixel_attention_mask")
    if mask is None:  # transformers wants one
        places = torch.arange(inputs["pixel_values"].shape[1], device=inputs["pixel_values"].device)
        mask = (places < inputs["spatial_shapes"].prod(-1, keepdim=True)).long()
    named = {name: inputs[name] for name in ("pixel_values", "spatial_shapes")}
    return kept_rows(hidden_state(model, layer, pixel_attention_mask=mask, **named), sizes)


NAFLEX = known_kind(
    ("pixel_values", "spatial_shapes", "pixel_attention_mask"), _shape_sizes, _naflex_rows, _hidden_size, required=2
)


def _pixtral_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    patch, given = config.patch_size, inputs.get("image_sizes")
    shapes = (
        [tuple(inputs["pixel_values"].shape[-2:])] * len(inputs["pixel_values"]) if given is None else given.tolist()
    )
    return [size_of_grid(height // patch, width // patch) for height, width in shapes]


def _pixtral_rows(model: nn.Module, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    shapes = inputs.get("image_sizes")
    return hidden_state(model, layer, inputs["pixel_values"], image_sizes=shapes).squeeze(0)


PIXTRAL = known_kind(("pixel_values", "image_sizes"), _pixtral_sizes, _pixtral_rows, _hidden_size)


# --- Qwen's encoders: patches of all images and videos in a row, merged by the encoder ---


def _merged_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    merge = config.spatial_merge_size
    grids = inputs["image_grid_thw"].tolist()
    return [size_of_grid(height // merge, width // merge, frames) for frames, height, width in grids]


def _merged_rows(model: nn.Module, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    result_only(model, layer)
    return model(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output


def _merged_width(config: Any) -> int:
    return getattr(config, "out_hidden_size", config.hidden_size)


MERGED = known_kind(("pixel_values", "image_grid_thw"), _merged_sizes, _merged_rows, _merged_width, required=2)

IMAGE_KINDS = {
    **dict.fromkeys(
        (
            "clip_vision_model",
            "siglip_vision_model",
            "vit",
            "deit",
            "dinov2",
            "dinov2_with_registers",
            "dinov3_vit",
            "internvl_vision",
        ),
        PATCHES,
    ),
    "siglip2_vision_model": NAFLEX,
    "pixtral": PIXTRAL,
    "qwen2_vl_vision": MERGED,
    "qwen2_5_vl_vision": MERGED,
    "qwen3_vl_vision": MERGED,
}
"""by ``model_type`` of the encoder's config"""
