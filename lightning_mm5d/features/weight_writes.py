"""Refuses steps that write to weights or buffers otherwise than one process, which runs the step once a batch.

Here it runs for each microbatch and stage. That is the same where a write gives the same however often it is made (a
clamp, a copy of other weights), before the step computes with the weight, or where the step undoes it. Else:

1. A weight that a run has written to has the same norm after each later run of the batch, or the write adds up.
2. From the second such run on, the step does not compute with the weight before the first write, unless what follows
   undoes that: earlier microbatches would have computed with other values than later ones.
3. What the step writes to where it ends is written by all ranks that hold it, whose runs may have ended before
   (`trainer.steps`). That goes for buffers of layers, too, which one stage has.
4. All runs that write to a weight write as often, unless no write of the later ones changes it: one that ends before
   the step puts a value back would leave it.
5. No write goes past torch, through an array of numpy. A weight that a run looks at as an array is compared for that.

Embeddings with ``max_norm`` write to the rows that they read, and are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.schedule import Action
from lightning_mm5d.sharded.data_accesses import accesses
from lightning_mm5d.sharded.remote_value import TELLING, is_remote, plain
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.sharded.tensor import functions_named, written_by
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.stage import Run
from lightning_mm5d.trainer.feature import Attached, Feature, Running

_SHOWING = TELLING | {*functions_named("data detach", Tensor)}
_VERSION = attrgetter("_version")
Weights = Mapping[str, nn.Parameter]
Place = tuple[dict[str, Tensor | None], str]
"""Where a module has a buffer: its own ones, and the name there."""


class WeightWrites(Feature):
    """Has no field: it changes no number."""

    def attach(self, running: Running) -> Attached | None:
        """Watch the steps of schedules."""
        return None if running.is_plain else _Watched(running)


class _Watched(Attached, AroundSteps):
    def __init__(self, running: Running) -> None:
        tables = [one for one in running.module.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
        renormed = {id(one.weight) for one in tables if one.max_norm is not None}
        named = running.module.named_parameters()
        self._weights = {name: one for name, one in named if id(one) not in renormed}
        self._names = {id(one): name for name, one in self._weights.items()}
        ownership = running.plan.ownership
        shared, root = {*ownership.written_by_all}, running.module
        names = {name for name, _ in root.named_buffers() if running.plan.topology.edges} - shared
        owned = sorted(names & running.plan.partition.owners.keys())
        self._buffers = {name: _place(root, name) for name in owned}
        self._looks = Looks(self._weights)
        self.changes.callback(self._looks.remove)
        running.engine.around.append(self)

    def step(self, course: Course) -> AroundStep | None:
        """Watch a step, unless nothing of it stays, whatever happens."""
        if Exception in course.step.forgives:
            return None
        return _Step(self._weights, self._names, self._buffers, course.step, self._looks)


class _Step(AroundStep):
    def __init__(
        self,
        weights: Weights,
        names: Mapping[int, str],
        buffers: Mapping[str, Place],
        step: Any,
        looks: Looks,
    ) -> None:
        self._weights, self._names, self._buffers, self._looks = weights, names, buffers, looks
        self._step, self._written = step, step.weights_written
        self._norms = dict[str, Tensor]()  # of those that runs have written to
        self._counts = dict[str, int]()
        self._doubts: list[tuple[Tensor, str, str]] = []  # whether a write is refused, to which weight, and why

    def forward(self, run: Run, action: Action) -> AbstractContextManager[Any]:
        """Watch one run."""
        return self._watched()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        known = {name: self._weights[name] for name in self._norms}
        order = _Order(known, counts_all=not self._step.trains) if known else nullcontext()
        before = self._versions()
        with written(self._weights, self._names) as names, self._looks.noted() as shown, order as early:
            yield
        self._written |= {name: 1 for name, one in self._versions().items() if one != before[name]}
        found = names()
        for name, (memory, was) in shown.items():
            if name not in found and not torch.allclose(memory, was, rtol=0.0, atol=0.0, equal_nan=True):
                raise self._refusal(name, "and a write past torch leaves no trace, so that ranks cannot take it over")
        for name, count in found.items():
            self._written[name] = max(count, self._written.get(name, 0))
            if is_remote(self._weights[name]):
                continue
            norm = _norm(self._weights[name])
            if self._counts.setdefault(name, count) != count:
                changes = [torch.ones_like(norm[0]).bool()] if early is None else early.changes.get(name, [])
                self._doubts += [(one, name, "and one has ended between two writes") for one in changes]
            if self._step.fails:
                raise self._refusal(name, "and this one has ended before its end, and would run once more")
            self._doubts.append((_differ(self._norms.setdefault(name, norm), norm), name, "and would write as often"))
            if early is not None and name in early.used_before:
                why = "and computes with the weight before it writes: later runs with what earlier ones left"
                self._doubts.append((~early.changes[name][0], name, why))
        if all(one.device.type == "cpu" for one, _, _ in self._doubts):  # for others the host would wait in the midst
            self.end()

    def end(self) -> None:
        """Refuse what runs have written; the host waits for the device once."""
        doubts, self._doubts = self._doubts, []
        if not doubts:
            return
        device = doubts[0][0].device
        are_refused = torch.stack([one.to(device) for one, _, _ in doubts]).tolist()
        for is_refused, (_, name, why) in zip(are_refused, doubts, strict=True):
            if is_refused:
                raise self._refusal(name, why)

    def _refusal(self, name: str, why: str) -> ConfigError:
        rule = f"The step runs for each microbatch and stage, {why}"
        fix = f"Write in {self._step.hooks}_start or {self._step.hooks}_end, which run once and see all weights"
        return ConfigError(self._step.name, f"a write to {name!r}", rule, fix)

    def _versions(self) -> dict[str, tuple[int, int]]:
        with plain():
            found = {name: buffers.get(key) for name, (buffers, key) in self._buffers.items()}
            return {name: (id(one), 0 if one is None else version_of(one)) for name, one in found.items()}


class Looks(Removable):
    """Notices which weights runs look at as arrays, until `remove`.

    Methods of tensors are replaced once, and not in each run: Python keeps what it knows of a class until that changes.

    Args:
        weights: by name.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._runs: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        for name in ("numpy", "__dlpack__"):
            had, original = name in vars(Tensor), getattr(Tensor, name)
            setattr(Tensor, name, self._noticing(original))
            self.changes.callback(partial(setattr, Tensor, name, original) if had else partial(delattr, Tensor, name))

    @contextmanager
    def noted(self) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        """Enter around a run; gives the memory of the weights that it looks at, and a copy of it before, by name."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        self._runs[id(found)] = found
        try:
            yield found
        finally:
            del self._runs[id(found)]

    def _noticing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def noticed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.is_floating_point()
            if self._runs and is_plain:
                with plain(), torch.no_grad():
                    address = _address(tensor)
                    here = ((name, one.detach()) for name, one in self._weights.items() if not is_remote(one))
                    name, memory = next((pair for pair in here if _address(pair[1]) == address), ("", tensor))
                    for found in self._runs.values() if name else ():
                        if name not in found:
                            found[name] = memory, memory.clone()
            return function(tensor, *args, **kwargs)

        return noticed


def _place(root: nn.Module, name: str) -> Place:
    path, _, key = name.rpartition(".")
    return root.get_submodule(path)._buffers, key


@contextmanager
def written(weights: Weights, names: Mapping[int, str]) -> Iterator[Callable[[], dict[str, int]]]:
    """Enter around a run; what it gives returns, after the run, how often it wrote to which weights, by name.

    A weight may show other data for a time.

    Args:
        weights: by name.
        names: of them, by identity.
    """
    with plain():
        before = [*map(_VERSION, weights.values())]
    reads: list[tuple[str, Tensor, int]] = []
    sets = dict[str, tuple[int, int]]()

    def notice(parameter: Tensor, data: Tensor, is_set: bool) -> None:
        name = names.get(id(parameter))
        if name is not None and is_set:
            sets.setdefault(name, _state(parameter))
        elif name is not None:
            reads.append((name, data, version_of(data)))

    def found() -> dict[str, int]:
        with plain():
            now = [*map(_VERSION, weights.values())]
            if now == before and not (reads or sets):
                return {}
            counts = Counter({name: new - old for name, new, old in zip(weights, now, before, strict=True)})
            for name, data, version in reads:
                counts[name] += version_of(data) - version
            counts.update(name for name, state in sets.items() if _state(weights[name]) != state)
        return {name: counts[name] for name in weights if counts[name]}

    with accesses(notice):
        yield found


def _state(weight: Tensor) -> tuple[int, int]:
    with plain():
        return version_of(weight), weight.data_ptr()


class _Order(TorchFunctionMode):
    """Notes what writes change, and weights with which a run computes, for gradients, before the first of them.

    Args:
        weights: those that earlier runs have written to, by name.
        counts_all: whether it computes for no gradients, so that all computing counts.

    Attributes:
        changes: whether each write has changed a weight, by name, on the device of the weight.
        used_before: names of the weights with which it computes before it writes to them.
    """

    def __init__(self, weights: Weights, *, counts_all: bool = False) -> None:
        super().__init__()
        self._counts_all = counts_all
        self._weights, self._ids = weights, {id(one): name for name, one in weights.items()}
        self._used = set[str]()
        self.changes: dict[str, list[Tensor]] = {}
        self.used_before = set[str]()

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SHOWING:
            return func(*args, **kwargs)
        targets = {_address(one) for one in written_by(func, args, kwargs) if not is_remote(one)}
        written = {name: _norm(one) for name, one in self._weights.items() if targets and self._is_among(one, targets)}
        if not targets and (self._counts_all or torch.is_grad_enabled()):
            self._used |= {
                self._ids[id(one)] for one in tree_leaves((args, kwargs)) if id(one) in self._ids
            } - self.changes.keys()
        result = func(*args, **kwargs)
        for name, norm in written.items():
            self.changes.setdefault(name, []).append(_differ(norm, _norm(self._weights[name])))
        self.used_before |= self._used & written.keys()
        return result

    def _is_among(self, weight: Tensor, targets: set[int]) -> bool:
        return not is_remote(weight) and _address(weight) in targets


def _norm(weight: Tensor) -> Tensor:
    """Return numbers that tell whether values are others: the norm, and a sum that signs and places change."""
    weight = weight.detach().flatten()
    if weight.is_floating_point() and weight.dtype.itemsize < 4:
        weight = weight.float()
    places = torch.linspace(1, 2, weight.numel(), dtype=weight.dtype.to_real(), device=weight.device)
    total = (weight * places).sum()
    parts = torch.view_as_real(total) if weight.is_complex() else total.view(1)
    return torch.cat([torch.linalg.vector_norm(weight).view(1), parts])


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Return whether norms differ, on the device of `one`; of what rests elsewhere both are NaN."""
    other = other.to(one.device)
    return ((one != other) & ~(one.isnan() & other.isnan())).any()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


FEATURE = WeightWrites
