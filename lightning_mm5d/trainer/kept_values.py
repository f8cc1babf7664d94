"""What steps keep in attributes of the LightningModule: ``self.outputs.append(loss)``, ``self.seen += len(batch)``.

Hooks read it on all ranks, as in Lightning's own idiom for the end of an epoch, and only the ranks where the step ends
have all of it: others are cut off before. So after each step every rank of a replica comes to hold what they kept.

1. `KeptValues` notes, before the step, what the attributes hold.
2. Where the step ends, `changes` tells what it changed, in terms that cross to other ranks.
3. It is shared within the `StepResult`.
4. Elsewhere `adopt` puts back what was there, and repeats the changes.

Containers keep their identity. Where the step ran for M microbatches, what it appended to a list is joined as results
of steps are (`merge`): a batch adds one entry. So is what it put into an attribute with a row or an entry for each
sample: a tensor, an array, a list, or a tuple or dict of them. Entries that are appended for each sample, in one list
or shared out over those of a dict, those that code appends by what it finds in a batch, integers, and what cannot be
joined stay M times as many. What cannot cross, an object of the user's own, raises on other ranks where it is read.
Iterators and random
generators stay as a rank's own runs leave them (`user_step.BatchDraws`). Not seen are changes inside of objects of
torch, Lightning and transformers, of elements of long containers, and of modules other than the root.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric, MetricCollection

from lightning_mm5d.config.errors import private
from lightning_mm5d.data.joining import BatchNumber, Sizes, merge, unsqueezed
from lightning_mm5d.data.random_state import generator_states, is_iterator, put_generators_back
from lightning_mm5d.sharded.remote_value import RemoteValue, is_remote, make_plain
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.stage.payload import detached, encoded

OF_LIGHTNING = frozenset(vars(pl.LightningModule()))
"""names of the attributes that Lightning and torch keep in a module"""
_OF_THREADS = {"threading", "queue", "concurrent", "multiprocessing", "asyncio", "subprocess", "weakref"}
"""whose objects change beside what a step does"""
_OTHERS = {"torch", "lightning", "pytorch_lightning", "transformers", "tokenizers", "torchmetrics", "lightning_mm5d"}
LONG = 100  # elements of longer containers are not looked into
_DEEP = 3
_MISSING = object()
_ROWS: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Attributes that have held the rows of a batch: those of a small one may be as many as a microbatch has."""
_CONSTANT = (
    "the step put {got!r} into {name!r} for each microbatch, as many entries as there are samples, so it holds "
    "those of the batch: {joined!r}. If this is no list of samples, keep a tuple"
)
_REDUCED = (
    "the step put a tensor of {shape} into {name!r} for each microbatch, without a row for each sample, so it holds "
    "that of the last one. Keep a row for each sample, add to one tensor (+=), or set num_microbatches: 1"
)


class KeptValues:
    """What the attributes of a module hold, as they are when this object is made.

    Args:
        module: the LightningModule.
        apart: names of attributes whose containers are not joined (`source.loops`).
    """

    def __init__(self, module: pl.LightningModule, apart: Collection[str] = ()) -> None:
        self._apart = apart
        self._before = attributes_of(module)

    def restore(self) -> None:
        """Put everything back."""
        self._before.restore()

    def mark(self) -> None:
        """Note what a microbatch has left, for `join`."""
        self._before.mark()

    def join(self, samples: Sizes) -> None:
        """Make one entry of those that the microbatches have left, in containers of this rank.

        Args:
            samples: of each microbatch, in the order of the marks.
        """
        self._before.join(samples, self._apart)

    def changes(self) -> list[Any]:
        """Return what has changed, as tensors and plain values in containers.

        Collective over ranks that share the layers of the last stage, where values are sharded over them.
        """
        return self._before.changes("self") or []

    def adopt(self, changes: list[Any]) -> None:
        """Put everything back, and make `changes`."""
        self._before.restore()
        if changes:
            self._before.apply(changes)


class KeptState:
    """All that a step may change but metrics and parameters, as it is when this object is made: for all modules.

    These are attributes of modules, buffers, and random generators that modules hold. Runs write to
    copies of buffers, so that the versions of buffers, which ranks compare, stay as they are.

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = [part for part in module.modules() if not isinstance(part, (Metric, MetricCollection))]
        self._parts: list[_Object | OfHooks] = [attributes_of(part, lambda name: name != HOOKED) for part in modules]
        self._parts.append(OfHooks(modules))
        holders = [*modules, *objects_of_hooks(modules)]
        self._generators = generator_states(value for owner in holders for value in vars(owner).values())
        self._buffers = [(part._buffers, name, buffer) for part in modules for name, buffer in part._buffers.items()]

    def begin(self) -> None:
        """Let a run begin with everything as it was; may be called more than once."""
        self._put_back()
        copies = {id(buffer): buffer.clone() for _, _, buffer in self._buffers if buffer is not None}
        for buffers, name, buffer in self._buffers:
            buffers[name] = None if buffer is None else copies[id(buffer)]

    def restore(self) -> None:
        """Put everything back."""
        self._put_back()
        for buffers, name, buffer in self._buffers:
            buffers[name] = buffer

    def _put_back(self) -> None:
        for part in self._parts:
            part.restore()
        put_generators_back(self._generators)


class OfHooks:
    """What the user's own forward hooks write to beside modules, as it is when this object is made.

    These are the objects whose methods hooks are, as callbacks, and variables of functions around hooks.

    Args:
        modules: whose hooks are meant.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        cells, owners = _written_by_hooks(modules)
        self._cells = [(cell, cell.cell_contents) for cell in cells]
        containers = enumerate(owner for owner in owners if isinstance(owner, (list, dict, set, deque)))
        self._parts = [*map(attributes_of, filter(_is_object, owners)), *_look_into(containers, 0).values()]

    def restore(self) -> None:
        """Put everything back."""
        for cell, value in self._cells:
            cell.cell_contents = value
        for part in self._parts:
            part.restore()


def objects_of_hooks(modules: Iterable[nn.Module]) -> list[Any]:
    """Return those of the user's own classes that the user's own forward hooks of modules may write to."""
    return [*filter(_is_object, _written_by_hooks(modules)[1])]


def _written_by_hooks(modules: Iterable[nn.Module]) -> tuple[list[CellType], list[Any]]:
    """Variables around hooks; and what is in these, what methods are of, and what functions are given or default to."""
    cells, owners = list[CellType](), list[Any]()
    names = "_forward_hooks", "_forward_pre_hooks"
    for hook in (hook for part in modules for name in names for hook in private(part, name).values()):
        call, *given = (hook.func, *hook.args, *hook.keywords.values()) if isinstance(hook, partial) else (hook,)
        if is_own(call, getattr(call, "__module__", None)):
            cells += [cell for cell in getattr(call, "__closure__", None) or () if cell != _EMPTY]
            given += (*(getattr(call, "__defaults__", None) or ()), getattr(call, "__self__", None))
            owners += [call, *given, *(getattr(call, "__kwdefaults__", None) or {}).values()]
    owners += [cell.cell_contents for cell in cells]
    return cells, [*{id(owner): owner for owner in owners}.values()]


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a class of the user's own, and no module, class, function or thread."""
    if not hasattr(value, "__dict__") or isinstance(value, (nn.Module, type, FunctionType, MethodType, ModuleType)):
        return False
    return is_own(value) and not any(base.__module__.partition(".")[0] in _OF_THREADS for base in type(value).__mro__)


_EMPTY = CellType()
HOOKED = "_output_capturing_hooks_installed"  # by transformers at the first call, where its hooks stay


def attributes_of(module: Any, counts: Callable[[str], bool] = lambda _: True) -> _Object:
    """The attributes of a module, without its parameters, buffers and submodules, and what Lightning keeps there.

    Args:
        module: whose they are, or a callback.
        counts: whether one of a name is looked at.
    """

    def counted(name: str, value: Any) -> bool:
        return not callable(value) and not is_iterator(value) and counts(name)

    return _Object(module, 0, counted, OF_LIGHTNING if isinstance(module, nn.Module) else ())


def memory_kept(owner: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, and arrays as such, in attributes of an object and of modules inside of it, with their names.

    What torch computes anew from another parameter (spectral norm, pruning) is left out.
    """
    for path, part in owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]:
        of_lightning = OF_LIGHTNING if isinstance(part, nn.Module) else ()
        for key, value in vars(part).items():
            is_made = key in of_lightning or f"{key}_orig" in vars(part).get("_parameters", {})
            for leaf in () if is_made else tree_leaves(value):
                if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
                    while isinstance(leaf.base, np.ndarray):  # of which the leaf is a part
                        leaf = leaf.base
                    is_memory = leaf.flags.writeable and leaf.dtype.kind == "f" and leaf.dtype.itemsize <= 8
                    leaf = torch.as_tensor(leaf) if is_memory else None
                if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                    yield f"{path}.{key}".lstrip("."), leaf


def is_own(value: Any, module: str | None = None) -> bool:
    """Whether an object is of a class of the user's own, or of a Python `module` of theirs where one is given."""
    return (module or type(value).__module__).partition(".")[0] not in _OTHERS


class _Object:
    """The attributes of an object, or the entries of a dict.

    Args:
        owner: that has them.
        depth: how many others it is inside of.
        counts: whether one of a name and value is looked at.
        apart: names of others that are not, whatever their values.
    """

    def __init__(
        self,
        owner: Any,
        depth: int,
        counts: Callable[[Any, Any], bool] = lambda *_: True,
        apart: Collection[Any] = frozenset(),
    ) -> None:
        self.owner, self._counts, self._apart = owner, counts, apart
        self._values = self._counted()
        few = depth == 0 or len(self._values) <= LONG
        self._inside = _look_into(self._values.items(), depth) if few else {}
        self._marks: list[dict[Any, Any]] = []

    def mark(self) -> None:
        """Note new tensors and containers, and what was added to those that were there."""
        new = {
            name: [*value] if isinstance(value, list) else value
            for name, value in self._now().items()
            if value is not self._values.get(name, _MISSING)
            and (isinstance(value, (Tensor, np.ndarray, list, tuple, dict)) or isinstance(name, BatchNumber))
            and name not in self._apart
            and self._counts(name, value)
        }
        self._marks.append(new)
        for part in self._inside.values():
            part.mark()

    def join(self, samples: Sizes, apart: Collection[str] = ()) -> None:
        """Join what the marks tell, but for the entries in `apart`."""
        now = self._now()
        inside = [part for name, part in self._inside.items() if name not in apart]
        for name in self._inside.keys() & set(apart):
            if isinstance(part := self._inside[name], _Row):
                part.put_in_order(samples)
        rows = [part for part in inside if isinstance(part, _Row)]
        marks = self._marks if len(self._marks) == len(samples) else []
        for name in {name: 0 for mark in marks for name in mark if isinstance(name, BatchNumber)}:  # of this batch
            now[name] = merge([detached(mark.get(name, self._values.get(name))) for mark in marks], samples)
        for name, last in (marks[-1] if marks else {}).items():
            values = [mark.get(name) for mark in marks]
            if isinstance(name, BatchNumber):
                continue
            before = self._inside.get(name)
            if name in apart:
                if isinstance(last, list) and before is None and isinstance(now.get(name), list):
                    row = _Row(now[name], _DEEP, values=[])
                    row.marks = [[] if value is None else value for value in values]
                    row.put_in_order(samples)
                continue
            held = before.values if isinstance(before, _Row) else self._values.get(name)
            known = _ROWS.setdefault(self.owner, set()) if isinstance(self.owner, nn.Module) else set()
            if (joined := _joined_rows(values, samples, None if name in known else held)) is not _MISSING:
                now[name] = joined
                known.add(name)
                if len(values) > 1 and _may_be_constant(values):
                    warnings.warn(_CONSTANT.format(name=name, got=last, joined=joined), stacklevel=2)
            elif isinstance(last, list) and isinstance(now.get(name), list):
                row = _Row(now[name], _DEEP, values=before.values if isinstance(before, _Row) else [])
                row.marks = [row.values if value is None else value for value in values]
                rows.append(row)
            elif held is None and _are_reduced(values, samples):
                warnings.warn(_REDUCED.format(shape=tuple(last.shape), name=name), stacklevel=2)
        if not (isinstance(self.owner, dict) and _are_groups(rows, samples)):
            for row in rows:
                row.join(samples)
        for part in inside:
            if not isinstance(part, _Row):
                part.join(samples)

    def _now(self) -> dict[Any, Any]:
        return self.owner if isinstance(self.owner, dict) else vars(self.owner)

    def _counted(self) -> dict[Any, Any]:
        """What it holds now of that which is looked at."""
        others = ((name, value) for name, value in self._now().items() if name not in self._apart)
        return {name: value for name, value in others if self._counts(name, value)}

    def restore(self) -> None:
        self._marks.clear()
        now = self._now()
        for name in self._counted().keys() - self._values.keys():
            del now[name]
        for name, value in self._values.items():
            if now.get(name, _MISSING) is not value:
                now[name] = value
        for part in self._inside.values():
            part.restore()

    def changes(self, where: str) -> list[Any] | None:
        now = self._counted()
        gone = [name for name in self._values if name not in self._now()]
        rows = []
        for name, value in now.items():
            path = f"{where}.{name}" if where == "self" else f"{where}[{name!r}]"
            if value is not self._values.get(name, _MISSING) and not _same(value, self._values.get(name, _MISSING)):
                rows.append([name, ["set", encoded(value, path)]])
            elif name in self._inside and (change := self._inside[name].changes(path)):
                rows.append([name, change])
        return ["entries", rows, gone] if rows or gone else None

    def apply(self, change: list[Any]) -> None:
        _, rows, gone = change
        now = self._now()
        for name in gone:
            now.pop(name, None)
        for name, inner_change in rows:
            if inner_change[0] == "set":
                now[name] = inner_change[1]
            elif name in self._inside:
                self._inside[name].apply(inner_change)


class _Row:
    """The elements of a list or a deque."""

    def __init__(self, owner: Any, depth: int, values: list[Any] | None = None) -> None:
        self.owner, self.values = owner, [*owner] if values is None else values
        self.marks: list[list[Any]] = []
        self._inside = _look_into(enumerate(self.values), depth) if len(self.values) <= LONG else {}

    def mark(self) -> None:
        """Note all elements."""
        self.marks.append([*self.owner])
        for part in self._inside.values():
            part.mark()

    def added(self) -> list[list[Any]]:
        """What each microbatch has appended."""
        pairs = pairwise([self.values, *self.marks])
        return [mark[len(before) - _dropped(before, mark) :] for before, mark in pairs]

    def join(self, samples: Sizes) -> None:
        """Make one element of each that was appended for all microbatches."""
        added, before = self.added(), self.marks[-1] if self.marks else self.values
        is_last = len(before) == len(self.owner) and all(map(is_, before, self.owner))
        if is_last and len(added) == len(samples) and is_per_batch(added, samples):
            joined = joined_entries(added, samples)
            if joined is not None:
                self.owner.clear()
                self.owner.extend([*self.values[_dropped(self.values, self.marks[0]) :], *joined])
        elif is_last:
            self.put_in_order(samples)
        for part in self._inside.values():
            part.join(samples)

    def put_in_order(self, samples: Sizes) -> None:
        """Put the elements of dealt samples, of which each has one, into the order of the batch."""
        now, count = [*self.owner], sum(samples)
        if [len(new) for new in self.added()] == [*samples] and samples.order is not None and len(now) >= count:
            self.owner.clear()
            self.owner.extend([*now[:-count], *samples.restored(now[-count:])])

    def restore(self) -> None:
        self.marks.clear()
        if len(self.owner) != len(self.values) or not all(map(is_, self.owner, self.values)):
            self.owner.clear()
            self.owner.extend(self.values)
        for part in self._inside.values():
            part.restore()

    def changes(self, where: str) -> list[Any] | None:
        now, count = [*self.owner], len(self.values)
        if self.values and all(map(is_iterator, self.values)):  # which cannot be sent
            places = {id(value): index for index, value in enumerate(self.values)}
            if all(id(value) in places for value in now):
                order = [places[id(value)] for value in now]
                return None if order == [*range(count)] else ["order", order]
        if len(now) < count or not all(map(is_, now, self.values)):
            return ["replace", [encoded(value, where) for value in now]]
        inside = [[index, diff] for index, part in self._inside.items() if (diff := part.changes(f"{where}[{index}]"))]
        added = [encoded(value, where) for value in now[count:]]
        return ["extend", added, inside] if added or inside else None

    def apply(self, change: list[Any]) -> None:
        if change[0] == "order":
            change = ["replace", [self.values[index] for index in change[1]]]
        if change[0] == "replace":
            self.owner.clear()
        for index, inner_change in change[2] if change[0] == "extend" else ():
            if index in self._inside:
                self._inside[index].apply(inner_change)
        self.owner.extend(change[1])


class _Whole:
    """A set, a tensor or an array that may be changed in place, and goes as a whole where it was."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._before = owner.detach().clone() if isinstance(owner, Tensor) else owner.copy()
        self._version = owner._version if isinstance(owner, Tensor) and not owner.is_inference() else None

    def mark(self) -> None:
        """Note nothing."""

    def join(self, samples: Sizes) -> None:
        """Leave what it holds."""

    def restore(self) -> None:
        was_remote = isinstance(self.owner, RemoteValue)
        if was_remote:  # what other ranks compute was added to it
            make_plain(self.owner)
        if was_remote or self._changed():
            self._fill(self._before)

    def _changed(self) -> bool:
        if isinstance(self.owner, Tensor):
            if self.owner.is_inference():  # has no version, and changes in inference mode only
                return torch.is_inference_mode_enabled() and not torch.equal(self.owner, self._before)
            return self.owner._version != self._version
        if isinstance(self.owner, set):
            return self.owner != self._before
        return not np.array_equal(self.owner, self._before)

    def _fill(self, value: Any) -> None:
        if isinstance(self.owner, set):
            self.owner.clear()
            self.owner.update(value)
        elif isinstance(self.owner, Tensor):
            self.owner.data.copy_(value)
        else:
            self.owner[...] = value

    def changes(self, where: str) -> list[Any] | None:
        # which may be put back before it is filled
        value = self.owner.copy() if isinstance(self.owner, set) else self.owner
        return ["fill", encoded(value, where)] if self._changed() else None

    def apply(self, change: list[Any]) -> None:
        self._fill(change[1])


_Part = _Object | _Row | _Whole


def _look_into(items: Any, depth: int) -> dict[Any, _Part]:
    return {name: part for name, value in items if (part := _part(value, depth + 1)) is not None}


def _part(value: Any, depth: int) -> _Part | None:
    if depth > _DEEP or value is None or isinstance(value, (str, bytes, int, float, nn.Module, nn.Parameter, type)):
        return None
    if isinstance(value, Tensor):
        return None if is_remote(value) or isinstance(value, Sharded) else _Whole(value)
    if isinstance(value, set) or (isinstance(value, np.ndarray) and value.dtype != object):
        return _Whole(value)
    if isinstance(value, (list, deque)):
        return _Row(value, depth)
    if isinstance(value, dict):
        return _Object(value, depth)
    return _Object(value, depth) if _is_object(value) and not callable(value) else None


def _begins(values: list[Any], first: list[Any]) -> bool:
    return len(values) >= len(first) and all(map(is_, values, first))


def _dropped(before: list[Any], after: list[Any]) -> int:
    """How many elements a list has lost at its beginning."""
    return next(start for start in range(len(before) + 1) if _begins(after, before[start:]))


def _are_groups(rows: Sequence[_Row], samples: Sequence[int]) -> bool:
    """Whether each sample of the microbatches has an entry in one of the lists of a dict, as by its label."""
    counts = [[len(new) for new in row.added()] for row in rows]
    return max(samples) > 1 and [sum(microbatch) for microbatch in zip(*counts, strict=True)] == [*samples]


def is_per_batch(added: Sequence[Sequence[Any]], samples: Sequence[int]) -> bool:
    """Whether all microbatches have appended equally many entries, which are not one for each sample.

    Of microbatches of one sample code tells which they are: the attribute is apart where they are of samples.
    """
    counts = [len(new) for new in added]
    return 0 < max(counts) == min(counts) and (counts != [*samples] or max(samples) == 1)


def joined_entries(added: Sequence[Sequence[Any]], samples: Sizes) -> list[Any] | None:
    """Return the entries of a batch, of those that each microbatch has appended; None where they cannot be joined."""
    joined = [_joined(values, samples) for values in zip(*added, strict=True)]
    return None if any(element is _MISSING for element in joined) else joined


def _joined(values: Sequence[Any], samples: Sizes) -> Any:
    """One value of those of the microbatches; `_MISSING` where these cannot be joined."""
    if not all(map(_can_join, values, samples)):
        return _MISSING
    joined = merge([detached(value) for value in values], samples, tells=False, reads=False)
    return joined if _is_like(joined, values[0]) else _MISSING


def _can_join(value: Any, size: int) -> bool:
    """Whether a value of a microbatch of `size` samples may be joined; of integers alone is not known what they are."""
    if isinstance(value, Tensor):
        return not is_remote(value) and not isinstance(value, Sharded)
    if isinstance(value, dict):
        return all(_can_join(element, size) or _is_plain(element, size) for element in value.values())
    if isinstance(value, (list, tuple)):
        texts = isinstance(value, list) and len(value) == size and all(isinstance(text, str) for text in value)
        return texts or all(_can_join(element, size) or isinstance(element, int) for element in value)
    return isinstance(value, (float, BatchNumber))


def _is_plain(value: Any, size: int) -> bool:
    """Whether a value is none of numbers, or the number of samples."""
    return isinstance(value, (bool, str, type(None))) or (isinstance(value, int) and value == size)


def _is_like(joined: Any, value: Any) -> bool:
    """Whether nothing has become a list of what microbatches gave."""
    if isinstance(joined, dict) and isinstance(value, dict):
        return all(_is_like(joined[name], value[name]) for name in value)
    return isinstance(value, type(joined))


def _joined_rows(values: Sequence[Any], samples: Sizes, before: Any) -> Any:
    """The rows of all samples, where each microbatch has put those of its own into an attribute; else `_MISSING`.

    What has as many rows as `before` may go on with what that was.
    """
    first, *_ = values = unsqueezed([*values], samples)
    if any(type(value) is not type(first) for value in values) or not all(map(_hold_rows, values, samples)):
        return _MISSING
    is_same_kind = type(before) is type(first) and not isinstance(first, (tuple, dict))
    if is_same_kind and (len(before) == len(first) if isinstance(first, list) else before.shape == first.shape):
        return _MISSING
    if len(values) > 1 and values[1] is first:  # that the second microbatch added to
        return _MISSING
    joined = merge([detached(value) for value in values], samples, tells=False, reads=False)
    return joined if type(joined) is type(first) else _MISSING


def _are_reduced(values: Sequence[Any], samples: Sequence[int]) -> bool:
    """Whether tensors of the microbatches are unequal, and have neither rows nor columns for samples."""
    first, *others = values
    if not all(
        isinstance(value, Tensor) and value.ndim and _can_join(value, size)
        for value, size in zip(values, samples, strict=True)
    ):
        return False
    has_samples = any(size in value.shape[:2] for value, size in zip(values, samples, strict=True))
    return not has_samples and any(other is not first and not torch.equal(other, first) for other in others)


def _may_be_constant(values: Sequence[Any]) -> bool:
    """Whether lists of all microbatches are equal and plain, as `list(images.shape)` is, which tells of no sample."""
    first = values[0]
    is_plain = isinstance(first, list) and all(isinstance(element, (bool, int, float, str)) for element in first)
    return is_plain and all(value == first for value in values)


def _hold_rows(value: Any, size: int) -> bool:
    """Whether a tensor or container has something for each of `size` samples, and all of it in full."""
    if isinstance(value, Tensor):
        return _can_join(value, size) and value.shape[:1] == (size,)
    if isinstance(value, (tuple, dict)):
        parts = [*value.values()] if isinstance(value, dict) else value
        joins = all(_can_join(part, size) for part in parts if isinstance(part, Tensor))
        return joins and any(_hold_rows(part, size) for part in parts)
    return len(value) == size if isinstance(value, list) else np.shape(value)[:1] == (size,)


def _same(value: Any, before: Any) -> bool:
    """Whether plain values are equal, which need not be the same objects."""
    return type(value) is type(before) and isinstance(value, (bool, int, float, str)) and value == before
