"""Lets hooks on all ranks read what modules inside of the LightningModule keep: ``self.encoder.last_attention``.

A rank runs the code of a module for the stages that it has, once for each microbatch. Elsewhere stand-ins pass it. So
after a step each rank comes to hold what the module keeps where it is computed, as `trainer.kept_values` does it for
the LightningModule. The *home* of a module is the last stage that holds any of its parameters. Phases:

1. The first step of its kind in an epoch notes the attributes of all modules; later steps those that it has changed.
2. After each run of a stage the modules at home there are marked, for values of microbatches to be joined.
3. At the end of a first step the ranks of a replica agree which modules have changed.
4. The first rank of each home sends what has changed to its replica, where stand-ins have left nothing.

An attribute of more than `_LARGE` elements is not sent: a read of it on other ranks raises. Neither is one of a home
that serves several replicas, or of which a replica has several, whose ranks hold what their own microbatches leave, as
a warning tells. An attribute of a user's own class that the first step of an epoch leaves alone and
a later one changes is told of by a warning. Not seen are attributes of metrics, and those that change in steps without
a schedule.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_mm5d.data.joining import Sizes
from lightning_mm5d.engine.codec import TreeChannel
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.partition.parts import holds_metrics
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.stage import Run
from lightning_mm5d.stage.payload import NotSent
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.kept_values import attributes_of, is_own

_LARGE = 1 << 18
_REPEATED = (
    "{step}: {what} of {path!r} is written for each microbatch, and holds what {count} microbatches leave there, not "
    "what the batch would. Write it in a hook, or set num_microbatches: 1."
)


_LATE = (
    "{step}: {name!r} of {path!r} is written, and the first step of the epoch left it alone, so that hooks on other "
    "ranks find there what it was. Write it in each step, or in the first one of an epoch, too."
)
_SHARED_OUT = (
    "{step}: {name!r} of {path!r} is written by several ranks, which share out its microbatches, so that hooks on each "
    "find there what its own ones left. Return it from the step, or give the module as many replicas as the step has."
)
_OF_TORCH = frozenset(vars(nn.Module()))


class KeptInParts(Feature):
    """Has no field: it changes no number."""

    def attach(self, running: Running) -> Attached | None:
        """Watch the steps of schedules."""
        return None if running.is_plain or running.plan.partition.pipelines else _Watched(running)


class _Watched(Attached, AroundSteps):
    """
    Attributes:
        modules: inside of the LightningModule, by path.
        own: those of classes of the user's own that this rank computes.
        homes: the stages at which they are computed, by path.
        rank: this one.
        plan: all stages.
    """

    def __init__(self, running: Running) -> None:
        found = {path: one for path, one in running.module.named_modules() if path and not holds_metrics(one)}
        self.plan, self.rank, self.modules = running.plan, running.rank, found
        self.homes = {path: _home(path, running.plan) for path in found}
        self.own = {path: one for path, one in found.items() if is_own(one) and self.is_here(path)}
        self._told = set[tuple[type, str]]()
        self._device, self._groups = message_device(running.device), running.groups
        self._channels: dict[tuple[int, int], TreeChannel] = {}
        self._known: dict[str, tuple[int, list[str]]] = {}
        running.engine.around.append(self)

    def step(self, course: Course) -> AroundStep | None:
        """Watch a step, unless the first of its kind in this epoch has changed nothing."""
        step: Any = course.step
        if Exception in step.forgives:
            return None
        epoch, known = self._known.get(step.name, (-1, []))
        return _Step(self, step, known if epoch == step.epoch else None)

    def agree(self, step: Any, changed: Sequence[str]) -> list[str]:
        """Return the paths that any rank of the replicas which this one serves has changed at their home."""
        known, paths = set(changed), [*self.modules]
        for number in sorted(step.microbatches):
            if (group := self._host(number) or self._groups.replicas.get(number)) is not None:
                bits = torch.tensor([path in known for path in paths], device=self._device_of(number)).int()
                dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
                known |= {path for path, bit in zip(paths, bits.tolist(), strict=True) if bit}
        found = [path for path in paths if path in known]
        self._known[step.name] = step.epoch, found
        return found

    def source(self, path: str, number: int) -> int:
        """Return the rank that sends what a module keeps to a replica."""
        instances = self.plan.topology.instances(self.homes[path])
        return instances[number * len(instances) // self.plan.layout.num_replicas][0]

    def is_own(self, path: str) -> bool:
        """Whether each replica has a home of its own for a module."""
        return len(self.plan.topology.instances(self.homes[path])) == self.plan.layout.num_replicas

    def is_here(self, path: str) -> bool:
        """Whether this rank computes a module."""
        return any(self.rank in ranks for ranks in self.plan.topology.instances(self.homes[path]))

    def is_news(self, cls: type, name: str) -> bool:
        """Whether nothing was told of an attribute of a class yet."""
        is_first = (cls, name) not in self._told
        self._told.add((cls, name))
        return is_first

    def exchange(self, number: int, src: int, rows: list[Any]) -> list[Any]:
        """Return what `src` sends to the ranks of a replica; collective over these."""
        group = self._groups.replicas.get(number)
        if group is None:
            return rows
        if (number, src) not in self._channels:
            self._channels[number, src] = TreeChannel.within(group, src, self._device, self._host(number))
        channel = self._channels[number, src]
        if src != self.rank:
            return channel.receive()
        channel.send(rows)
        return rows

    def _host(self, number: int) -> dist.ProcessGroup | None:
        return self._groups.hosts.get(number)

    def _device_of(self, number: int) -> torch.device:
        return self._device if self._host(number) is None else torch.device("cpu")


class _Step(AroundStep):
    def __init__(self, watched: _Watched, step: Any, paths: Sequence[str] | None) -> None:
        self._watched, self._step, self._is_first = watched, step, paths is None
        paths = [*watched.modules] if paths is None else paths
        self._held = {path: attributes_of(watched.modules[path]) for path in paths}
        self._here = {path for path in paths if watched.is_here(path)}
        told = paths if self._is_first else ()  # numbers may be on a device, for which the host waits
        self._numbers: dict[str, list[dict[str, float]]] = {path: [_numbers(watched.modules[path])] for path in told}
        self._entered = 0
        self._is_apart = True
        own = watched.own if watched.plan.topology.edges else {}
        self._unwatched = {path: _places(one) for path, one in own.items() if path not in self._held}

    def forward(self, run: Run, action: Action) -> AbstractContextManager[Any]:
        """Mark, after the run, what it has left in the modules whose home it is."""
        return self._marked(action.stage)

    @contextmanager
    def _marked(self, stage: StageKey) -> Iterator[None]:
        self._entered += 1
        self._is_apart &= self._entered == 1  # side by side, microbatches write over each other
        own = {path for path in self._here if self._watched.homes[path] == stage}
        others = [attributes_of(self._watched.modules[path]) for path in self._here - own]
        yield
        self._entered -= 1
        for one in others:  # which computed with stand-ins
            one.restore()
        for path in own:
            self._held[path].mark()
            if self._is_first:
                self._numbers[path].append(_numbers(self._watched.modules[path]))

    def end(self) -> None:
        """Join what microbatches have left, and share it."""
        self._tell_of_late()
        numbers = sorted(self._step.microbatches)
        if len(numbers) == 1 and self._is_apart and not self._step.fails:
            sizes = Sizes.of(self._step.microbatches[numbers[0]])
            if len(sizes) > 1:
                for path in sorted(self._here):
                    self._held[path].join(sizes)
        changes = {path: self._held[path].changes(path) for path in sorted(self._here)}
        changed = [path for path, change in changes.items() if change is not None]
        paths = self._watched.agree(self._step, changed) if self._is_first else [*self._held]
        if self._is_first:
            self._tell(changed)
        for path in self._held.keys() - self._here:
            self._held[path].restore()
        for number in numbers if self._watched.plan.topology.edges else ():  # else each rank has all modules
            for src in sorted({self._watched.source(path, number) for path in paths}):
                own = [path for path in paths if self._watched.source(path, number) == src]
                rows = [[path, self._sent(path, changes.get(path))] for path in own]
                for path, change in self._watched.exchange(number, src, rows):
                    if change is not None and path not in self._here:
                        self._held[path].apply(change)
        for path, change in changes.items() if not self._is_first else ():
            if change is not None and change[1] and not self._watched.is_own(path):
                self._say(_SHARED_OUT, path, change[1][0][0])

    def _sent(self, path: str, change: list[Any] | None) -> list[Any] | None:
        if change is None:
            return None
        is_own, found = self._watched.is_own(path), list[Any]()
        for name, one in change[1]:
            tensors = [leaf for leaf in tree_leaves(one) if isinstance(leaf, Tensor)]
            is_sent = is_own and sum(map(Tensor.numel, tensors)) <= _LARGE
            found.append([name, one if is_sent else ["set", NotSent(f"{path}.{name}, which other ranks compute,")]])
        return [change[0], found, change[2]]

    def _tell_of_late(self) -> None:
        for path, before in self._unwatched.items():
            now = _places(self._watched.own[path])
            names = sorted(name for name in now if now[name] != before.get(name))
            if names:
                self._say(_LATE, path, names[0])

    def _say(self, text: str, path: str, name: str) -> None:
        if self._watched.is_news(type(self._watched.modules[path]), name):
            warnings.warn(text.format(step=self._step.name, name=name, path=path), stacklevel=3)

    def _tell(self, changed: Sequence[str]) -> None:
        for path in changed:
            before, *left = self._numbers[path]
            names = {name for one in left for name in one if len({each.get(name) for each in left}) > 1}
            names = {name for name in names if left[-1].get(name) != before.get(name)}
            if names and self._watched.source(path, min(self._step.microbatches)) == self._watched.rank:
                said = _REPEATED.format(step=self._step.name, what=min(names), path=path, count=len(left))
                warnings.warn(said, stacklevel=2)


def _numbers(module: nn.Module) -> dict[str, float]:
    """The attributes of a module that are single numbers."""
    return {
        name: float(value)
        for name, value in vars(module).items()
        if type(value) in (int, float) or (type(value) is Tensor and value.numel() == 1 and not is_remote(value))
    }


def _places(module: nn.Module) -> dict[str, tuple[int, int]]:
    """What tells whether attributes are others than before, or containers in them have other lengths."""
    return {
        name: (id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    }


def _home(path: str, plan: Plan) -> StageKey:
    """Return the last stage that holds a part of a module, or of the smallest one around it that has any."""
    owners, topology = plan.partition.owners, plan.topology
    while path:
        begin = f"{path}."
        found = {topology.stage_of[key] for name, keys in owners.items() if name.startswith(begin) for key in keys}
        if found:
            order: Mapping[str, int] = {name: index for index, name in enumerate(topology.order)}
            last = topology.last_stage
            return last if last in found else max(found, key=lambda key: (order[key.modality], key.number))
        path = path.rpartition(".")[0]
    return topology.last_stage


FEATURE = KeptInParts
