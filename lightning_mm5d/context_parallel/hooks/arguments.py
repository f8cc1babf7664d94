"""Which arguments of a layer go along with its tokens, and the arguments for some of them.

A layer takes, beside its hidden state ``[B, S, W]``, rotary tables, positions and other things that have an entry for
each token, and things that have not, such as masks or the states of an encoder. Transformers names them alike in all
families, and dims of a token stand last but one in tables and last in indices. Names decide first, then shapes; whether
that was right is found out by running a layer on some of its tokens (`check.probe`).
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
    """What a call passes on."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what a bound forward takes by position."""
    try:
        found = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(one.name for one in found if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD))


def token_dim(name: str, x: Tensor, size: int) -> int | None:
    """The dim of `x` that counts the `size` tokens of a sequence, from the last; None where none does."""
    if name in _OF_ANOTHER or ("mask" in name and name != _MASK_BY_TOKEN):
        return None
    if x.is_floating_point() or x.is_complex():
        return -2 if x.dim() >= 2 and x.shape[-2] == size else None
    return -1 if x.dim() and x.shape[-1] == size else None


def item_dim(name: str, x: Tensor, size: int, ndim: int) -> int | None:
    """The first dim of `x`, counted from the last, where it counts the `size` items of a batch.

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
    """The arguments with `state` for the hidden state, and the others changed.

    Args:
        call: what the layer was given.
        names: of its positional arguments.
        change: takes a name and a value that is no container; lists and tuples are gone through, dicts are its own.
        hidden: where the hidden state is.
        state: what to put there.
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
