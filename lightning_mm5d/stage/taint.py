"""Finds the values that depend on weights of other ranks.

A skip input of a later layer is either computable on every rank from the batch alone (masks, rotary tables) or not (an
encoder's states, a position bias). Only the second kind must travel. Whether a tensor carries a gradient does not tell
them apart: a frozen model has none. So the first microbatch of each structure runs under `Trace`, which marks every
result of parameters, received tensors and placeholders.

A custom autograd function hides what it does from the trace; its results count as marked where
they carry a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_mm5d.stage.payload import tensors_in

_DEPENDS, _STANDS_IN = 1, 2
# These take a tensor for its shape, dtype and device only.
_SHAPE_ONLY = {
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_empty,
    Tensor.new_full,
    Tensor.new_tensor,
    Tensor.size,
}


def mark_dependent(tensor: Tensor) -> None:
    """Mark `tensor` as known to this rank only, for instance because it was received."""
    tensor._mm5d_mark = _DEPENDS  # type: ignore[attr-defined]


def mark_stand_in(tensor: Tensor) -> None:
    """Mark `tensor` as standing in for a tensor that later stages compute themselves."""
    tensor._mm5d_mark = _STANDS_IN  # type: ignore[attr-defined]


def must_travel(tensor: Tensor) -> bool:
    """Whether a later stage cannot compute `tensor` by itself."""
    mark = getattr(tensor, "_mm5d_mark", None)
    if mark is not None:
        return mark == _DEPENDS
    return isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and not _from_stand_in(tensor))


def _from_stand_in(tensor: Tensor) -> bool:
    """Whether the graph of an unmarked tensor, the result of a custom autograd function, begins at a stand-in."""
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and getattr(leaf, "_mm5d_mark", None) == _STANDS_IN:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


@contextmanager
def traced() -> Iterator[None]:
    """Mark results inside of the block; compiled layers run uncompiled there, because they would hide what they do."""
    with torch.compiler.set_stance("force_eager"), Trace():
        yield


class Trace(TorchFunctionMode):
    """Marks the result of every torch function that takes a marked tensor or a parameter."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _SHAPE_ONLY:
            return result
        mark = 0
        for _, tensor in tensors_in((args, kwargs)):
            own = getattr(tensor, "_mm5d_mark", 0) or (_DEPENDS if isinstance(tensor, torch.nn.Parameter) else 0)
            mark = max(mark, own)
        if mark:
            written = args[0] if result is None and args else result
            for _, tensor in tensors_in(written):
                tensor._mm5d_mark = mark  # type: ignore[attr-defined]
        return result
