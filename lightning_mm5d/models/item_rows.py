"""What an encoder makes of a batch of items: rows of features, and how many of them each item has.

An *item* is one image, video or piece of audio. A video is a number of *frames* of equal size; any other item is one
frame. Projectors work on frames, so that pooling never mixes two of them.

Shapes: N items, T rows of all items, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError


@dataclass(frozen=True)
class ItemSize:
    """How many rows an item has.

    Attributes:
        length: rows of the item, frame after frame.
        grid: rows and columns of one frame; None where its rows have no such order.
        frames: how many frames the item has.
    """

    length: int
    grid: tuple[int, int] | None = None
    frames: int = 1


def size_of_grid(height: int, width: int, frames: int = 1) -> ItemSize:
    """Return the size of an item of `frames` frames, each with a row for each place of a grid."""
    return ItemSize(height * width * frames, (height, width), frames)


@dataclass(frozen=True)
class ItemRows:
    """The features of all items of a batch, one item after the other, without padding.

    Attributes:
        rows: the features. (T, D)
        sizes: of each item; their lengths add up to T.
    """

    rows: Tensor
    sizes: list[ItemSize]


Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class EncoderKind:
    """What the composer knows of a kind of encoder.

    Attributes:
        names: of the inputs that it takes.
        required: those that a batch must have.
        sizes: the size of each item, from the encoder's config and its inputs.
        encode: calls an encoder with its inputs and the number of a layer.
        width: D, from the config.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    sizes: Callable[[Any, Inputs], list[ItemSize]]
    encode: Callable[[nn.Module, Inputs, int], ItemRows]
    width: Callable[[Any], int]


def known_kind(
    names: tuple[str, ...],
    sizes: Callable[[Any, Inputs], list[ItemSize]],
    rows: Callable[[nn.Module, Inputs, list[ItemSize], int], Tensor],
    width: Callable[[Any], int],
    required: int = 1,
) -> EncoderKind:
    """Return a kind whose sizes follow from its config and inputs; of `names` the first ones are `required`."""

    def encode(model: nn.Module, inputs: Inputs, layer: int) -> ItemRows:
        known = sizes(model.config, inputs)
        return ItemRows(rows(model, inputs, known, layer), known)

    return EncoderKind(names=names, required=names[:required], sizes=sizes, encode=encode, width=width)


def hidden_state(model: nn.Module, layer: int, *args: Any, **inputs: Any) -> Tensor:
    """Call an encoder and return its result, or the hidden state of one of its layers.

    Args:
        model: an encoder.
        layer: -1 for the encoder's own result, after its last norm where it has one; other numbers count the hidden
            states as transformers does: -2 is what enters the last layer, 0 what enters the first one.
        args: what the model takes by position.
        inputs: what it takes by name.

    Raises:
        ConfigError: the encoder keeps no hidden states, or not so many.
    """
    if layer == -1:
        result = model(*args, **inputs)
        return result if isinstance(result, Tensor) else result.last_hidden_state
    result = model(*args, **inputs, output_hidden_states=True)
    states = getattr(result, "hidden_states", None)
    if not states:
        rule = f"{type(model).__name__} returns no hidden states of its layers"
        raise ConfigError("feature_layer", layer, rule, "Use -1, the encoder's own result")
    if not -len(states) <= layer < len(states):
        rule = f"{type(model).__name__} has {len(states)} hidden states"
        raise ConfigError("feature_layer", layer, rule, f"Use a number from {-len(states)} to {len(states) - 1}")
    return states[layer]


def result_only(model: nn.Module, layer: int) -> None:
    """Refuse other layers than the last.

    Raises:
        ConfigError: `layer` is not -1.
    """
    if layer != -1:
        rule = f"The features of {type(model).__name__} are its result, of which no other layer has the form"
        raise ConfigError("feature_layer", layer, rule, "Use -1")


def kept_rows(states: Tensor, sizes: Sequence[ItemSize]) -> Tensor:
    """Return the first rows of each item of `states` (N, L, D), as many as it has, one item after the other (T, D)."""
    counts = [size.length for size in sizes]
    if counts == [states.shape[1]] * len(states):
        return states.flatten(0, 1)
    return torch.cat([item[:count] for item, count in zip(states, counts, strict=False)])
