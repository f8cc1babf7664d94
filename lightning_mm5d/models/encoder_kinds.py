"""Encoders of any kind: what they take, which rows of features they give, and how many, known without a forward.

Encoders whose number of rows follows from values (grids, sizes, masks) are known by their ``model_type``. For any other
one that returns a ``last_hidden_state`` a forward without memory or data, on torch's meta device, tells the numbers.

Shapes: N items, C channels, H height, W width, L rows of an item, T rows of all items, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.audio_kinds import AUDIO_KINDS, MASK
from lightning_mm5d.models.general_kinds import general_kind
from lightning_mm5d.models.image_kinds import IMAGE_KINDS
from lightning_mm5d.models.item_rows import EncoderKind, Inputs, ItemRows, ItemSize

__all__ = ["ItemRows", "ItemSize", "count_rows", "encode", "encoder_of", "input_names", "own_inputs", "width"]

_FROM_PROCESSORS = {
    "attention_mask": MASK,
    "audio_attention_mask": MASK,
    "input_features_mask": MASK,
    "audio_input_features": "input_features",
    "pixel_values_videos": "pixel_values",
    "video_grid_thw": "image_grid_thw",
}
_PARTS = ("vision_model", "visual", "vision_tower", "audio_tower")


def input_names(model_or_config: Any) -> tuple[str, ...]:
    """Return the names of the inputs that an encoder takes; some of them are optional."""
    return _kind_of(model_or_config).names


def own_inputs(model_or_config: Any, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of an encoder from what its image processor or feature extractor returned.

    Names that processors use otherwise are replaced: an audio encoder's ``attention_mask`` becomes
    ``feature_attention_mask``, ``pixel_values_videos`` becomes ``pixel_values``. Fields that it does not take are left
    out.
    """
    names = input_names(model_or_config)
    renamed = {_FROM_PROCESSORS.get(key, key): value for key, value in outputs.items() if key not in names}
    renamed |= {key: value for key, value in outputs.items() if key in names}
    frames = outputs.get("audio_input_features")  # of Phi-4, whose extractor makes no mask for a single item
    if frames is not None and renamed.get(MASK) is None:
        renamed[MASK] = torch.ones(frames.shape[:2], dtype=torch.bool)
    return {name: renamed[name] for name in names if renamed.get(name) is not None}


def encode(model: nn.Module, inputs: Mapping[str, Tensor | None], layer: int = -1) -> ItemRows:
    """Call an encoder and return the rows of features of each item, without padding and prefix tokens.

    Args:
        model: the encoder, with its ``config``.
        inputs: by the names that `input_names` returns; optional ones may be missing or None.
        layer: -1 for the encoder's own result, after its last norm where it has one; -2 for the hidden state that
            enters its last layer, and so on, as transformers counts hidden states.

    Raises:
        ConfigError: an input is missing, or the encoder has no such layer.
    """
    kind = _kind_of(model)
    given = _given(kind, inputs)
    result = kind.encode(model, given, layer)
    expected = sum(size.length for size in result.sizes)
    if len(result.rows) != expected:
        rule = f"{type(model).__name__} returned {len(result.rows)} rows of features, where its inputs tell {expected}"
        fix = "Pass the inputs that belong together, from one call of the encoder's processor"
        raise ConfigError("inputs", {name: tuple(value.shape) for name, value in given.items()}, rule, fix)
    return result


def count_rows(config: Any, inputs: Mapping[str, Tensor | None]) -> list[ItemSize]:
    """Return the size of each item as `encode` does, from the encoder's config and inputs, without a forward."""
    kind = _kind_of(config)
    return kind.sizes(config, _given(kind, inputs))


def width(config: Any) -> int:
    """Return the width D of an encoder's features."""
    return _kind_of(config).width(config)


def encoder_of(model: Any) -> nn.Module:
    """Return the encoder in a model that has more beside it: CLIP's vision model, the encoder of Whisper."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and getattr(model, "decoder", None) is not None:
        return model.get_encoder()
    kind = getattr(config, "model_type", None)
    if kind not in IMAGE_KINDS and kind not in AUDIO_KINDS:
        for holder in (model, getattr(model, "model", None)):
            for name in _PARTS:
                if isinstance(part := getattr(holder, name, None), nn.Module) and hasattr(part, "config"):
                    return encoder_of(part)
    return model


# --- kinds ---


def _kind_of(model_or_config: Any) -> EncoderKind:
    config = getattr(model_or_config, "config", None) if isinstance(model_or_config, nn.Module) else model_or_config
    name = getattr(config, "model_type", "")
    return IMAGE_KINDS.get(name) or AUDIO_KINDS.get(name) or general_kind(model_or_config)


def _given(kind: EncoderKind, inputs: Mapping[str, Tensor | None]) -> Inputs:
    given = {name: value for name in kind.names if (value := inputs.get(name)) is not None}
    for name in kind.required:
        if name not in given:
            rule = f"This encoder takes {', '.join(kind.names)}, of which {', '.join(kind.required)} must be there"
            raise ConfigError("inputs", sorted(inputs), rule, f"Pass {name!r}")
    return given
