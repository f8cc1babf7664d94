"""Calls of an encoder on a few items at a time: ``activation_checkpointing: {items: 16}``.

An *item* is one image, frame, video or sound: a row along dim 0 of the first tensor among a call's arguments, and of
all others of the same length; or the rows of packed patches that a table of sizes (``image_grid_thw`` and its like)
says. Results of chunks are joined along dim 0, and lists with one entry for each item one after the other. Other
tensors and plain values are those of every chunk.

That items do not depend on each other is proved where a call of a new form first has several chunks: the first and the
last item are computed alone and together, without gradients. Where the call draws random numbers, as for dropout, they
are compared in evaluation mode, and no gradient may pass from one to the other in training mode.

It refuses (`ConfigError`) batch norms in training mode; results that do not have the rows of items first, or that
depend on the items beside them or on their number; and calls that write buffers or attributes, or update metrics:
these would be those of the last chunk.

Shapes: N items, P rows of packed inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.random_state import all_states, kept_random_state, pack_states
from lightning_mm5d.partition.parts import is_metric
from lightning_mm5d.sharded.removable import meanwhile
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.stage.payload import tensors_in
from lightning_mm5d.stage.runtime import Runtime
from lightning_mm5d.stage.step_writes import attributes, written

Compute = Callable[..., Any]
Place = tuple[Any, ...]
_MOST_OFF = 1e-3  # relative: of an item alone and beside another, in precisions whose rounding is finer


class _ItemsError(Exception):
    """Chunks of items would give something else; its text says why."""


@dataclass(frozen=True)
class _Items:
    """How the tensors of a call divide.

    Attributes:
        count: N.
        ends: where items begin in packed tensors, with P at the end; None without a table of sizes.
    """

    count: int
    ends: tuple[int, ...] | None = None

    def part(self, leaf: Any, first: int, end: int) -> Any:
        """Return the rows of the items ``[first, end)`` of a tensor; what has none as it is."""
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        if self.ends is not None and len(leaf) == self.ends[-1]:
            return leaf[self.ends[first] : self.ends[end]]
        return leaf[first:end] if len(leaf) == self.count else leaf


def check_norms(field: str, setting: Any, parts: Mapping[str, nn.Module]) -> None:
    """Refuse batch norms in training mode.

    Args:
        field: path of the field.
        setting: what it says.
        parts: modules by path.

    Raises:
        ConfigError: with the path of the first one.
    """
    for path, part in parts.items():
        for where, module in part.named_modules(prefix=path):
            if isinstance(module, _BatchNorm) and module.training:
                rule = f"{where} ({type(module).__name__}) in training mode computes with all items of a batch"
                fix = f"Call eval() on {where} in __init__ or configure_model, which Lightning keeps, or use 'full'"
                raise ConfigError(field, setting, rule, fix)


class Chunks:
    """One callable of an encoder, on a few items at a time.

    Args:
        runtime: the module and its stages.
        field: path of the field, for errors.
        size: items of a chunk.
        path: of the module whose callable it is.
        parts: what the callable computes with, by path.
        device: where this rank computes.
        fix: what helps where items cannot be computed apart.
    """

    def __init__(
        self,
        runtime: Runtime,
        field: str,
        size: int,
        path: str,
        parts: Mapping[str, nn.Module],
        device: torch.device,
        fix: str,
    ) -> None:
        self._runtime, self._field, self._size, self._path, self._device = runtime, field, size, path, device
        self._parts, self._fix = parts, fix
        self._modules = list(dict.fromkeys(module for part in parts.values() for module in part.modules()))
        # the places of lists with an entry for each item, by the form of a call
        self._proved: dict[Hashable, frozenset[Place]] = {}

    def __call__(self, compute: Compute, chunk: Compute, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return what ``compute(*args, **kwargs)`` would.

        Args:
            compute: the callable.
            chunk: computes one chunk with it, given its arguments.
            args: of the call.
            kwargs: of the call.

        Raises:
            ConfigError: items cannot be computed apart.
        """
        leaves, spec = tree_flatten((args, kwargs))
        items = _items_in(leaves)
        if items is None or items.count <= self._size:
            return chunk(*args, **kwargs)
        form = str(spec), *map(_form, leaves), any(module.training for module in self._modules)
        try:
            if form not in self._proved:
                self._proved[form] = self._prove(compute, leaves, spec, items)
            results = []
            for first in range(0, items.count, self._size):
                end = min(first + self._size, items.count)
                positional, named = tree_unflatten([items.part(leaf, first, end) for leaf in leaves], spec)
                results.append(chunk(*positional, **named))
            return _joined(results, self._proved[form])
        except _ItemsError as error:
            rule = f"{self._path or 'the module'} cannot compute its items apart: {error}"
            raise ConfigError(self._field, {"items": self._size}, rule, self._fix) from None

    def _prove(self, compute: Compute, leaves: Sequence[Any], spec: Any, items: _Items) -> frozenset[Place]:
        """Compare the first and the last item alone and together; return the places of lists of items."""
        check_norms(self._field, {"items": self._size}, self._parts)
        ends = [[items.part(leaf, at, at + 1) for leaf in leaves] for at in (0, items.count - 1)]
        pair = [
            torch.cat([head, tail]) if head is not leaf and isinstance(leaf, Tensor) else leaf
            for leaf, head, tail in zip(leaves, *ends, strict=True)
        ]

        def call(arguments: Sequence[Any]) -> Any:
            args, kwargs = tree_unflatten(list(arguments), spec)
            try:
                return compute(*args, **kwargs)
            except Exception as error:
                raise _ItemsError(f"it does not compute some items without the others ({error})") from error

        with self._apart(), torch.no_grad():
            before = pack_states(all_states(self._device))
            pair_result = call(pair)
            draws = not torch.equal(before, pack_states(all_states(self._device)))
            with ExitStack() as stack:
                for module in self._modules if draws else ():
                    if module.training:
                        stack.callback(setattr, module, "training", True)
                        module.training = False
                pair_result = call(pair) if draws else pair_result
                first = call(ends[0])
                with self._unwritten():
                    last = call(ends[1])
            lists = frozenset(_lists(pair_result, first))
            expected, actual = (dict(tensors_in(result)) for result in (pair_result, _joined([first, last], lists)))
            if expected.keys() != actual.keys() or not all(_is_close(actual[at], expected[at]) for at in actual):
                raise _ItemsError(
                    "the first and the last item of this call give something else together than each alone, so that "
                    "items depend on each other, or their rows are not along dim 0 of the result"
                )
        if draws and torch.is_grad_enabled():
            with self._apart():
                _check_gradients(call, pair, ends[0], first)
        return lists

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Compute within nothing that belongs to the step: its stage, its random numbers, its casts."""
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cast without gradients must not serve the step
        try:
            with meanwhile(self._runtime, active=None), kept_random_state(self._device):
                yield
        finally:
            torch.set_autocast_cache_enabled(caches)

    @contextmanager
    def _unwritten(self) -> Iterator[None]:
        """Refuse what is written meanwhile; an earlier call may have filled caches."""
        before, versions = self._attributes(), self._versions()
        yield
        names = [name for name, version in self._versions().items() if versions.get(name) != version]
        for path, name, _ in written(before, self._attributes()):
            is_of_transformers = type(self._runtime.root.get_submodule(path)).__module__.startswith("transformers.")
            if not (is_of_transformers and name.startswith("_")):  # which it keeps for itself
                names.append(f"{path}.{name}")
        if names:
            raise _ItemsError(f"it writes {names[0]}, which would be that of the last chunk")

    def _attributes(self) -> dict[tuple[str, str], Any]:
        return {key: value for path, part in self._parts.items() for key, value in attributes(part, path).items()}

    def _versions(self) -> dict[str, Any]:
        """How often each buffer and each metric has been written."""
        counts: dict[str, Any] = {}
        for path, part in self._parts.items():
            counts |= {name: (id(buffer), version_of(buffer)) for name, buffer in part.named_buffers(prefix=path)}
            counts |= {name: child.update_count for name, child in part.named_modules(prefix=path) if is_metric(child)}
        return counts


def _items_in(leaves: Sequence[Any]) -> _Items | None:
    """How the tensors among a call's arguments divide; None where there are none."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    for table in tensors:
        if table.dim() == 2 and table.shape[1] in (2, 3) and table.dtype in (torch.int64, torch.int32):
            ends = tuple(accumulate(map(math.prod, table.tolist()), initial=0))
            if ends[-1] != len(table) and any(len(tensor) == ends[-1] for tensor in tensors):
                return _Items(len(table), ends)
    return _Items(len(tensors[0])) if tensors else None


def _form(leaf: Any) -> Hashable:
    """What calls of one form have in common."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim()
    return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf).__name__


def _lists(pair: Any, single: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the places of lists that are longer in the result of two items than in that of one."""
    if isinstance(pair, Mapping) and isinstance(single, Mapping):
        for key in pair.keys() & single.keys():
            yield from _lists(pair[key], single[key], (*place, key))
    elif isinstance(pair, (list, tuple)) and isinstance(single, (list, tuple)):
        if len(pair) != len(single):
            yield place
        for number, (left, right) in enumerate(zip(pair, single, strict=False) if len(pair) == len(single) else ()):
            yield from _lists(left, right, (*place, number))


def _joined(results: Sequence[Any], lists: frozenset[Place], place: Place = ()) -> Any:
    """Return the result for the items of all chunks; raise _ItemsError where they do not join."""
    first = results[0]
    if any(type(result) is not type(first) for result in results):
        raise _ItemsError(f"chunks return {type(first).__name__} and others")
    if isinstance(first, Tensor):
        if not first.dim():
            raise _ItemsError("it returns one number for all items")
        if any(result.shape[1:] != first.shape[1:] for result in results):
            raise _ItemsError(f"chunks return unlike shapes, {[list(result.shape) for result in results]}")
        return torch.cat(list(results))
    if isinstance(first, Mapping):
        if any(result.keys() != first.keys() for result in results):
            raise _ItemsError("chunks return unlike fields")
        return type(first)(**{key: _joined([result[key] for result in results], lists, (*place, key)) for key in first})
    if isinstance(first, (list, tuple)):
        if place in lists:
            entries = [entry for result in results for entry in result]
        elif any(len(result) != len(first) for result in results):
            raise _ItemsError("chunks return lists of unlike lengths")
        else:
            entries = [
                _joined(column, lists, (*place, number)) for number, column in enumerate(zip(*results, strict=True))
            ]
        return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)
    if not (first is None or isinstance(first, (bool, int, float, str))) or any(result != first for result in results):
        raise _ItemsError(f"it returns {type(first).__name__} beside tensors, and which one is that of all items?")
    return first


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    """Whether what items give is equal but for rounding."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    off = max(torch.finfo(actual.dtype).eps ** 0.5, _MOST_OFF)
    actual, expected = actual.double(), expected.double()
    # of tensors without memory nothing is larger
    return not bool((actual - expected).abs().max() > off * expected.abs().max()) if actual.numel() else True


def _rows_of_first(pair: Any, first: Any) -> Iterator[Tensor]:
    """Yield what the first of two items has of their result, given its own alone."""
    if isinstance(pair, Tensor):
        yield pair[: len(first)]
    elif isinstance(pair, Mapping):
        for key in pair:
            yield from _rows_of_first(pair[key], first[key])
    elif isinstance(pair, (list, tuple)):
        for element, first_element in zip(pair, first, strict=False):  # of a list of items the first one
            yield from _rows_of_first(element, first_element)


def _check_gradients(call: Compute, pair: Sequence[Any], first_leaves: Sequence[Any], first: Any) -> None:
    """Raise _ItemsError where a gradient passes from the result of the first of two items to the other."""
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in pair]
    watched = [
        (leaf.requires_grad_(), len(first_leaf))
        for leaf, first_leaf in zip(leaves, first_leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and len(first_leaf) != len(leaf)
    ]
    total = torch.zeros((), dtype=torch.float64, device=watched[0][0].device) if watched else torch.zeros(())
    for rows in _rows_of_first(call(leaves), first):
        if rows.requires_grad and rows.numel():
            weights = torch.linspace(0.5, 1.0, rows.numel(), dtype=torch.float64, device=rows.device)
            total = total + (rows.double() * weights.view_as(rows)).sum()
    if not total.requires_grad:
        return
    gradients = torch.autograd.grad(total, [leaf for leaf, _ in watched], allow_unused=True)
    for gradient, (_, length) in zip(gradients, watched, strict=True):
        if gradient is not None and bool((gradient[length:] != 0).any()):
            raise _ItemsError("in training mode the result of one item depends on the items beside it")
