"""Rows of calls: arguments of several calls of a module are joined to those of one, and its result is divided again.

An *item* is one image, frame or sound: a row along dim 0 of the first tensor among a call's arguments, or the rows of
packed patches that a table of sizes says. Shapes: N items, P rows of packed inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_mm5d.data.lazy import Waiting
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.sharded.removable import meanwhile
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.stage import Deferred, Run
from lightning_mm5d.stage.payload import Path
from lightning_mm5d.stage.taps import mark_dependent

_ROW_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class ApartError(Exception):
    """A call is not joined with others; its text says why."""


@dataclass(frozen=True)
class RowCall:
    """The arguments of a call.

    Attributes:
        values: by name, or by place among the arguments without one.
        form: equal for calls that may be joined.
        items: N.
        rows: P; None without a table of sizes.
    """

    values: Mapping[Any, Any]
    form: Hashable
    items: int
    rows: int | None

    @classmethod
    def of(cls, args: tuple, kwargs: Mapping[str, Any], beside: Hashable = None) -> RowCall:
        """Describe a call; raise ApartError where it cannot be joined with any.

        Args:
            args: of the call.
            kwargs: of the call.
            beside: what else it depends on.
        """
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        form = beside, tuple((key, _form(key, value)) for key, value in values.items())
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        if not tensors:
            raise ApartError("none of its arguments is a tensor")
        for table in tensors:
            if table.dim() == 2 and table.shape[1] in (2, 3) and table.dtype in (torch.int64, torch.int32):
                rows = sum(map(math.prod, table.tolist()))
                if any(tensor is not table and len(tensor) == rows for tensor in tensors):
                    return cls(values, form, len(table), rows)
        return cls(values, form, len(tensors[0]), None)

    def length(self, unit: str) -> int:
        """N or P."""
        return self.items if unit == "items" or self.rows is None else self.rows


def _form(key: Any, value: Any) -> Hashable:
    """What an argument of calls that may be joined has in common."""
    if isinstance(value, Tensor) and value.dim() and not is_remote(value) and not isinstance(value, Sharded):
        if value.requires_grad:
            raise ApartError(f"its argument {key!r} needs a gradient")
        return value.dtype, value.device, *value.shape[1:]
    if isinstance(value, _ROW_PLAIN) or (
        isinstance(value, tuple) and all(isinstance(element, _ROW_PLAIN) for element in value)
    ):
        return value
    raise ApartError(f"its argument {key!r} is {type(value).__name__}, of which no rows are known")


def joined_rows(calls: Sequence[RowCall]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of one call for all; raise ApartError where they do not join."""
    joined: dict[Any, Any] = {}
    for key, first in calls[0].values.items():
        column = [call.values[key] for call in calls]
        if not isinstance(first, Tensor):
            joined[key] = first
        elif _has_rows(column, calls):
            # lazy tensors are read first: what joins them would load them for itself
            joined[key] = torch.cat([tensor.moved() if isinstance(tensor, Waiting) else tensor for tensor in column])
        elif all(is_same_argument(argument, first) for argument in column):
            joined[key] = first
        else:
            raise ApartError(f"its argument {key!r} has neither a row for each item nor equal values in all calls")
    places = [key for key in joined if isinstance(key, int)]
    return tuple(joined[key] for key in places), {key: value for key, value in joined.items() if key not in places}


def _has_rows(column: Sequence[Tensor], calls: Sequence[RowCall]) -> bool:
    """Whether an argument has a row for each item, or packed row, in all calls."""
    return any(all(len(x) == call.length(unit) for x, call in zip(column, calls, strict=True)) for unit in _UNITS)


def changed_beside(calls: Sequence[RowCall], number: int) -> list[RowCall]:
    """Return calls of the same shapes, of which only that of `number` has the same values.

    Whole numbers, which may be ids or masks, become those of its first item; in packed calls they stay.
    """
    unchanged = calls[number]
    rows = {
        key
        for key, arg in unchanged.values.items()
        if isinstance(arg, Tensor) and _has_rows([call.values[key] for call in calls], calls)
    }

    def changed(key: Any, value: Tensor) -> Tensor:
        if value.is_floating_point() or value.is_complex():
            return value.flip(-1) * 0.5 + 0.25
        first = unchanged.values[key][:1]
        return first.expand_as(value) if unchanged.rows is None and len(first) else value

    return [
        call
        if call is unchanged
        else replace(call, values={key: changed(key, arg) if key in rows else arg for key, arg in call.values.items()})
        for call in calls
    ]


_UNITS = ("items", "rows")
_ENTRIES = "entries"
RowUnits = dict[Path, set[str]]
"""what rows of the tensors of a result follow, as far as calls have told"""


def rows_of_call(
    tree: Any, units: RowUnits, calls: Sequence[RowCall], number: int, take: Callable[..., Any], place: Path = ()
) -> Any:
    """Return what a joined result has for one of `calls`, of each tensor what `take` gives of it and of all ends."""
    if isinstance(tree, Tensor):
        divisions = {tuple(_ends(tree, calls, unit)) for unit in units.get(place, ())}
        if len(divisions) != 1:
            raise ApartError("its rows do not follow the items")
        return take(number, tree, divisions.pop())
    if _ENTRIES in units.get(place, ()):
        ends = [0, *accumulate(call.items for call in calls)]
        return type(tree)(take(0, entry, (0, len(entry))) for entry in tree[ends[number] : ends[number + 1]])
    if isinstance(tree, Mapping):
        fields = {key: rows_of_call(value, units, calls, number, take, (*place, key)) for key, value in tree.items()}
        return fields if type(tree) is dict else type(tree)(**fields)
    if isinstance(tree, (list, tuple)):
        entries = [rows_of_call(entry, units, calls, number, take, (*place, at)) for at, entry in enumerate(tree)]
        return type(tree)(*entries) if hasattr(tree, "_fields") else type(tree)(entries)
    return tree


def _ends(tensor: Tensor, calls: Sequence[RowCall], unit: str) -> Iterator[int]:
    """Yield where the rows of each call begin, and where the last end."""
    lengths = [call.length(unit) for call in calls]
    total, count = sum(lengths), len(tensor) if tensor.dim() else 0
    if not total or any(length * count % total for length in lengths):
        raise ApartError("its rows do not follow the items")
    yield from accumulate((length * count // total for length in lengths), initial=0)


def prove_rows_alone(joint: Any, units: RowUnits, calls: Sequence[RowCall], compute: Callable[..., Any]) -> None:
    """Raise ApartError where rows of a joined result change with those of other calls, however little.

    Calls before and after those that stay change, so that rows which follow from earlier ones alone are seen, too.
    """

    def rows_of(result: Any, number: int) -> list[Tensor]:
        rows: list[Tensor] = []
        rows_of_call(result, units, calls, number, lambda at, whole, ends: rows.append(whole[ends[at] : ends[at + 1]]))
        return rows

    for number in (0, len(calls) - 1):
        args, kwargs = joined_rows(changed_beside(calls, number))
        pairs = zip(rows_of(joint, number), rows_of(compute(*args, **kwargs), number), strict=True)
        if not all(torch.equal(before, after) for before, after in pairs):
            raise ApartError("rows of one microbatch change with those of another, or from call to call")


def row_units(joint: Any, single_results: Sequence[Any], calls: Sequence[RowCall]) -> RowUnits:
    """Return how a joined result divides, given what each call returns alone; raise ApartError where it does not."""
    units: dict[Path, set[str]] = {}

    def walk(tree: Any, singles: Sequence[Any], place: Path) -> None:
        if any(type(single) is not type(tree) for single in singles):
            raise ApartError("its results are of unlike types")
        if isinstance(tree, Tensor):
            fits = set[str]()
            for unit in _UNITS if calls[0].rows is not None else _UNITS[:1]:
                try:
                    ends = list(_ends(tree, calls, unit))
                except ApartError:
                    continue
                pieces = [tree[start:end] for start, end in pairwise(ends)]
                if all(_is_close(single, piece) for single, piece in zip(singles, pieces, strict=True)):
                    fits.add(unit)
            if not fits:
                raise ApartError(
                    "it gives something else for several microbatches together than for each alone: rows depend on "
                    "each other, or are not along dim 0 of the result"
                )
            units[place] = fits
        elif isinstance(tree, Mapping):
            if any(single.keys() != tree.keys() for single in singles):
                raise ApartError("its results have unlike fields")
            for key, value in tree.items():
                walk(value, [single[key] for single in singles], (*place, key))
        elif isinstance(tree, (list, tuple)):
            entries = [entry for single in singles for entry in single]
            if [len(single) for single in singles] == [call.items for call in calls] and len(entries) == len(tree):
                if not all(
                    isinstance(x, Tensor) and x.dim() and _is_close(y, x) for x, y in zip(tree, entries, strict=True)
                ):
                    raise ApartError("it gives something else for several microbatches together than for each alone")
                units[place] = {_ENTRIES}
                return
            if any(len(single) != len(tree) for single in singles):
                raise ApartError("it returns a list without an entry for each item")
            for at, value in enumerate(tree):
                walk(value, [single[at] for single in singles], (*place, at))
        elif not isinstance(tree, _ROW_PLAIN) or any(single != tree for single in singles):
            raise ApartError(f"it returns {type(tree).__name__} beside tensors")

    walk(joint, single_results, ())
    return units


def _is_close(actual: Any, expected: Tensor) -> bool:
    """Whether two results are equal but for rounding."""
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not actual.is_floating_point() or not actual.numel():
        return torch.equal(actual, expected)
    off = torch.finfo(actual.dtype).eps ** 0.5
    actual, expected = actual.double(), expected.double()
    return bool((actual - expected).abs().max() <= off * expected.abs().max())


def is_same_argument(first: Any, second: Any) -> bool:
    """Whether arguments are equal; no values are read where they are views of the same memory."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return bool(first == second)
    if first.shape != second.shape:
        return False
    return (first.data_ptr(), first.stride()) == (second.data_ptr(), second.stride()) or torch.equal(first, second)


@dataclass
class _Source:
    """A tensor of a joined result, whose rows are leaves of the graphs of microbatches."""

    tensor: Tensor
    ends: Sequence[int]
    leaves: dict[int, Tensor] = field(default_factory=dict)

    def gradient(self) -> Tensor | None:
        """Return the gradient of all rows, zero where none came; None where none came at all."""
        if all(leaf.grad is None for leaf in self.leaves.values()):
            return None
        parts = list[Tensor]()
        for number, (start, end) in enumerate(pairwise(self.ends)):
            leaf = self.leaves.get(number)
            grad = None if leaf is None else leaf.grad
            parts.append(self.tensor.new_zeros((end - start, *self.tensor.shape[1:])) if grad is None else grad)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Joint:
    """A joined call, from its forward to its backward."""

    def __init__(
        self, name: str, members: Sequence[int], calls: Sequence[RowCall], result: Any, units: RowUnits
    ) -> None:
        self.name, self.members, self.calls, self._result, self._units = name, members, calls, result, units
        self._versions = [_versions(call) for call in calls]
        self.deferred: Deferred | None = None
        self.sources: dict[int, _Source] = {}
        self._given = set[int]()

    @property
    def is_done(self) -> bool:
        """Whether all microbatches have their rows, and no gradient comes back."""
        return not self.sources and self._given.issuperset(self.members)

    def has(self, member: int, call: RowCall) -> bool:
        """Whether a microbatch calls the encoder with what it was called with for it."""
        number = self.members.index(member)
        joined = self.calls[number]
        if joined.form != call.form or self._versions[number] != _versions(joined):
            return False
        return all(map(is_same_argument, call.values.values(), joined.values.values()))

    def rows(self, member: int) -> Any:
        """Return the result of one microbatch."""
        self._given.add(member)
        return rows_of_call(self._result, self._units, self.calls, self.members.index(member), self._taken)

    def _taken(self, number: int, tensor: Tensor, ends: Sequence[int]) -> Tensor:
        rows = tensor[ends[number] : ends[number + 1]]
        if tensor.requires_grad:
            source = self.sources.setdefault(id(tensor), _Source(tensor, ends))
            rows = source.leaves.setdefault(number, rows.detach().requires_grad_())  # of one at two places
        copy = rows.clone()  # a step may write to it
        mark_dependent(copy)
        return copy

    def backward(self, run: Run) -> None:
        """Go on through the encoder, in the backward of the last microbatch."""
        pairs = [(get_gradient_edge(source.tensor), source.gradient()) for source in self.sources.values()]
        self.sources, self._result = {}, None
        edges = [edge for edge, gradient in pairs if gradient is not None]
        gradients = [gradient for _, gradient in pairs if gradient is not None]
        if edges:
            with self.deferred or nullcontext(), meanwhile(run, deferred=self.deferred):
                run.backward(edges, gradients)  # type: ignore[arg-type]
        if self.deferred is not None and run.deferred is not None:
            run.deferred.take(self.deferred)


def _versions(call: RowCall) -> list[int]:
    """How often each tensor among the arguments of a call has been written."""
    return [version_of(tensor) for tensor in call.values.values() if isinstance(tensor, Tensor)]
