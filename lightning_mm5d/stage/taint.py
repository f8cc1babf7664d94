"""Finds the values that depend on weights of other ranks, and those of them that later stages use again.

A skip input of a later layer is either computable on every rank from the batch alone (masks, rotary tables) or not (an
encoder's states, a position bias). Only the second kind must travel. Whether a tensor carries a gradient does not tell
them apart: a frozen model has none. So the first microbatch of each structure runs under `Trace`, which marks every
result of parameters, received tensors and placeholders.

Beside the mark, a result remembers its *taps*: the calls of modules here that it was computed from. Where code puts it
together with what a later stage computes, that stage needs the results of these calls (`lightning_mm5d.stage.taps`).

A custom autograd function hides what it does from the trace; its results count as marked where
they carry a gradient, and have no taps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_mm5d.sharded.remote_value import LEAVING
from lightning_mm5d.stage.payload import tensors_in

Call = tuple[str, str, int, int]
"""What was called: ``layer``, ``inner...`` (in a layer), ``module``, ``boundary`` or ``parameter``; its path
or modality; the number of the layer or -1; and how many calls of it came before."""
Tap = tuple[str, str, int, int, str | int | None]
"""A call, and which entry of its result; None for all of it."""

_DEPENDS, _EARLIER, _LATER = 1, 2, 3
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
_NONE = frozenset[Tap]()


def mark_dependent(tensor: Tensor) -> None:
    """Mark `tensor` as known to this rank only, for instance because it was received."""
    tensor._mm5d_mark = _DEPENDS  # type: ignore[attr-defined]


def mark_stand_in(tensor: Tensor, *, later: bool = True) -> None:
    """Mark `tensor` as standing in for a tensor that later stages compute themselves, or that earlier ones did."""
    tensor._mm5d_mark = _LATER if later else _EARLIER  # type: ignore[attr-defined]


def mark_tap(tensor: Tensor, *taps: Tap) -> None:
    """Mark `tensor` as known to this rank only, which sends `taps` to stages that need it."""
    tensor._mm5d_mark, tensor._mm5d_taps = _DEPENDS, frozenset(taps)  # type: ignore[attr-defined]


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
        if leaf is not None and getattr(leaf, "_mm5d_mark", 0) > _DEPENDS:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Mark results inside of the block; compiled layers run uncompiled there, because they would hide what they do."""
    with torch.compiler.set_stance("force_eager"), trace:
        yield


class Trace(TorchFunctionMode):
    """Marks the result of every torch function that takes a marked tensor or a parameter.

    Args:
        own: of the parameters that only this stage and earlier ones hold, their taps, by id.
        later: ids of the parameters that only later stages hold.

    Attributes:
        found: the taps that later stages need.
    """

    def __init__(self, own: Mapping[int, Tap] | None = None, later: Collection[int] = ()) -> None:
        super().__init__()
        self.found: set[Tap] = set()
        self._own, self._later = own or {}, later

    def needs(self, tree: Any) -> None:
        """Note that later stages need the tensors in `tree`."""
        for _, tensor in tensors_in(tree):
            if self._mark(tensor) == _DEPENDS:
                self.found |= self._taps(tensor)

    def _mark(self, tensor: Tensor) -> int:
        mark: int = getattr(tensor, "_mm5d_mark", 0)
        if not mark and isinstance(tensor, torch.nn.Parameter):
            return _LATER if id(tensor) in self._later else _DEPENDS
        return mark

    def _taps(self, tensor: Tensor) -> frozenset[Tap]:
        taps: frozenset[Tap] | None = getattr(tensor, "_mm5d_taps", None)
        if taps is None and id(tensor) in self._own and isinstance(tensor, torch.nn.Parameter):
            return frozenset({self._own[id(tensor)]})
        return taps or _NONE

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        taken = [tensor for _, tensor in tensors_in((args, kwargs))]
        marks = [self._mark(tensor) for tensor in taken]
        mark = max(marks, default=0)
        taps = _NONE
        if mark and func not in _SHAPE_ONLY:
            taps = taps.union(*(self._taps(one) for one, own in zip(taken, marks, strict=True) if own == _DEPENDS))
            if mark == _LATER or getattr(func, "__name__", "") in LEAVING:
                self.found |= taps
        result = func(*args, **kwargs)
        if func in _SHAPE_ONLY or not mark:
            return result
        written = args[0] if result is None and args else result
        for _, tensor in tensors_in(written):
            if isinstance(tensor, torch.nn.Parameter):  # it lives on, and means something else in the next stage
                continue
            tensor._mm5d_mark = mark  # type: ignore[attr-defined]
            tensor._mm5d_taps = taps if mark == _DEPENDS else _NONE  # type: ignore[attr-defined]
        return result
