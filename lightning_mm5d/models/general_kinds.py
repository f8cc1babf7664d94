"""Encoders that are known by nothing but their results: a ``last_hidden_state``, or maps of features.

How many rows an item has tells a forward on torch's meta device, which needs neither weights nor data. Those of an
input's shape are kept, since a processor asks again for every image.

Shapes: N items, C channels, H height, W width, L rows of an item, D width.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.image_kinds import called_on_images, pair, split_frames
from lightning_mm5d.models.item_rows import EncoderKind, Inputs, ItemRows, ItemSize, hidden_state

_MOST_PREFIX_TOKENS = 16


def general_kind(model_or_config: Any) -> EncoderKind:
    """Return the kind of an encoder that is known by its results alone."""
    built = isinstance(model_or_config, nn.Module)
    main = _first_input(model_or_config) if built else _main_input(_text(model_or_config))
    images = main == "pixel_values"
    encode = _encode_images if images else functools.partial(_encode_others, main)
    return EncoderKind(
        names=(main, "num_frames") if images else (main,),
        required=(main,),
        sizes=functools.partial(_sizes, main, encode),
        encode=encode,
        width=lambda config: _width(_text(config)),
    )


def built_bare(config: Any) -> nn.Module:
    """Build a model of transformers on the meta device, in evaluation mode.

    Raises:
        ConfigError: transformers has no model for the config.
    """
    with torch.device("meta"):
        try:
            model = AutoModel.from_config(config)
        except ValueError:
            rule = "It is no encoder that is known, and transformers builds no model of it"
            raise ConfigError("config.model_type", config.model_type, rule, "Use an encoder of AutoModel") from None
        if getattr(config, "is_encoder_decoder", False):
            model = model.get_encoder()
    return model.eval()


def _encode_images(model: nn.Module, inputs: Inputs, layer: int) -> ItemRows:
    pixels, frames = split_frames(inputs)
    states = called_on_images(model, pixels, layer)
    if states.dim() == 4:  # maps of features: (N, D, H, W), or (N, H, W, D)
        last = states.shape[1] != states.shape[-1] == _channels(model)
        maps = states if last else states.movedim(1, -1)
        grid: tuple[int, int] | None = (maps.shape[1], maps.shape[2])
        states, length = maps.flatten(1, 2), maps.shape[1] * maps.shape[2]
    else:
        grid, length = _grid(model, states.shape[1], pixels)
    if layer != -1 and states.shape[-1] != _channels(model):
        rule = f"{type(model).__name__} has another width there than at its end"
        raise ConfigError("feature_layer", layer, rule, "Use -1, the encoder's own result")
    rows = states[:, states.shape[1] - length :].flatten(0, 1)
    return ItemRows(rows, [ItemSize(length * count, grid, count) for count in frames])


def _encode_others(main: str, model: nn.Module, inputs: Inputs, layer: int) -> ItemRows:
    states = hidden_state(model, layer, inputs[main])
    return ItemRows(states.flatten(0, 1), [ItemSize(states.shape[1])] * len(states))


def _grid(model: nn.Module, length: int, pixels: Tensor) -> tuple[tuple[int, int] | None, int]:
    """The grid of an image's patches and their number, of `length` rows that may begin with prefix tokens."""
    height, width = pixels.shape[-2:]
    patch = getattr(getattr(model, "timm_model", None), "patch_embed", getattr(model, "config", None))
    if (size := getattr(patch, "patch_size", None)) is not None:
        grid = height // pair(size)[0], width // pair(size)[1]
        if 0 <= length - grid[0] * grid[1] <= _MOST_PREFIX_TOKENS:
            return grid, grid[0] * grid[1]
    rows = math.isqrt(length * height // width)
    return (rows, length // rows) if rows and rows * (length // rows) == length else None, length


def _first_input(model: nn.Module) -> str:
    names = list(inspect.signature(type(model).forward).parameters)
    main = getattr(model, "main_input_name", None)
    return main if main in names else names[1]


def _channels(model: nn.Module) -> int:
    timm, config = getattr(model, "timm_model", None), getattr(model, "config", None)
    known = timm.num_features if timm is not None else getattr(config, "hidden_size", None)
    if known is None and (sizes := getattr(config, "hidden_sizes", None)):
        known = sizes[-1]
    if known is None:
        rule = "The width of its features cannot be told from its configuration"
        raise ConfigError("ModalityEncoder.model", type(model).__name__, rule, "Pass a projector module of your own")
    return known


# --- without a forward on data ---


def _text(config: Any) -> str:
    return json.dumps({**config.to_dict(), "model_type": config.model_type}, sort_keys=True, default=str)


def _from_text(text: str) -> Any:
    fields = json.loads(text)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


@functools.lru_cache(maxsize=32)
def _main_input(text: str) -> str:
    return _first_input(built_bare(_from_text(text)))


@functools.lru_cache(maxsize=32)
def _width(text: str) -> int:
    return _channels(built_bare(_from_text(text)))


@functools.lru_cache(maxsize=1024)
def _size(text: str, main: str, shape: tuple[int, ...], encode: Callable[..., ItemRows]) -> ItemSize:
    item = {main: torch.empty(1, *shape, device="meta")}
    return encode(built_bare(_from_text(text)), item, -1).sizes[0]


def _sizes(main: str, encode: Callable[..., ItemRows], config: Any, inputs: Inputs) -> list[ItemSize]:
    values = inputs[main]
    if main != "pixel_values":
        return [_size(_text(config), main, tuple(values.shape[1:]), encode)] * len(values)
    frames, counts = split_frames(inputs)
    size = _size(_text(config), main, tuple(frames.shape[1:]), encode)
    return [ItemSize(size.length * count, size.grid, count) for count in counts]
