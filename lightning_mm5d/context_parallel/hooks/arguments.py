"""Tells which arguments of a layer have an entry for each token, and replaces them.

Beside its hidden state ``[B, S, W]`` a layer takes rotary tables and positions, with an entry for each token, and
others without, such as masks or the states of an encoder. All families of transformers use the same names. The dim of
tokens is the last but one in tables and the last in indices. Names decide first, then shapes; running the layer on some
of its tokens checks it (layer_ways.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_mm5d.partition.hidden_state import Place

_OF_ANOTHER = ("encoder_hidden_states", "cross_attention_states", "key_value_states", "kv_states", "cu_seqlens")
_MASK_BY_TOKEN = "full_text_row_masked_out_mask"


class Arguments(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional arguments of a bound forward."""
    try:
        found = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(one.name for one in found if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD))


def token_dim(name: str, x: Tensor, size: int) -> int | None:
    """Return the dim of `x` that counts the `size` tokens of a sequence, from the last; None where none does."""
    if name in _OF_ANOTHER or ("mask" in name and name != _MASK_BY_TOKEN):
        return None
    if "bias" in name:  # of scores
        return None
    if x.is_floating_point() or x.is_complex():
        return -2 if x.dim() >= 2 and x.shape[-2] == size else None
    return -1 if x.dim() and x.shape[-1] == size else None


def item_dim(name: str, x: Tensor, size: int, ndim: int) -> int | None:
    """Return the first dim of `x`, from the last, where it counts the `size` items of a batch; None where it does not.

    Args:
        name: of the argument.
        x: its value.
        size: items in the batch.
        ndim: dims of the hidden state.
    """
    batched = x.dim() >= ndim or (x.dim() >= 2 and not x.is_floating_point())
    return -x.dim() if batched and x.shape[0] == size and "cu_seqlens" not in name else None


def replaced(
    call: Arguments, names: tuple[str, ...], change: Callable[[str, Any], Any], hidden: Place, state: Any
) -> Arguments:
    """Return the arguments with `state` for the hidden state, and the others changed.

    Args:
        call: what the layer was given.
        names: of its positional arguments.
        change: takes a name and a value that is no list or tuple; it gets their entries, and dicts as they are.
        hidden: place of the hidden state.
        state: the new hidden state.
    """

    def walk(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(one, (Tensor, list, tuple)) for one in value):
            parts = [walk(name, one) for one in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return change(name, value)

    args = tuple(
        state if hidden == (0, index) else walk(names[index] if index < len(names) else "", value)
        for index, value in enumerate(call.args)
    )
    kwargs = {name: state if hidden == (1, name) else walk(name, value) for name, value in call.kwargs.items()}
    return Arguments(args, kwargs)
