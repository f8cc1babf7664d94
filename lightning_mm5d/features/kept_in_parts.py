"""Lets hooks on all ranks read what modules inside of the LightningModule keep: ``self.encoder.last_attention``.

A rank runs the code of a module for the stages that it has, once for each microbatch. Elsewhere stand-ins pass it. So
after a step each rank comes to hold what the module keeps where it is computed, as `trainer.kept_values` does it for
the LightningModule. The *home* of a module is the last stage that holds any of its parameters. Phases:

1. The first step of its kind in an epoch notes the attributes of all modules, also those that a hook has put in since;
   later steps those that it has changed.
2. After each run of a stage the modules at home there are marked, for values of microbatches to be joined.
3. At the end of a first step the ranks of a replica agree which modules have changed.
4. The first rank of each home sends what has changed to its replica, where stand-ins have left nothing.

Private attributes are left alone, and those that code of libraries keeps in its modules. One of more than `_LARGE`
elements, or that cannot be sent, is not sent, as a warning tells. Neither is one of a home that serves several
replicas, or of which a replica has several, whose ranks hold what their own microbatches leave. An attribute of which
ranks that share layers or sequences hold unlike parts is left as it is, and told of by a warning. An attribute of a
user's own class that the first step of an epoch leaves alone and a later one changes is told of by a warning. Not seen
are attributes of metrics, and those that change in steps without a schedule.
"""

from __future__ import annotations

import ast
import functools
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_mm5d.data.joining import Sizes
from lightning_mm5d.data.random_state import generator_states, is_iterator, moved
from lightning_mm5d.engine.codec import TreeChannel
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.partition.parts import holds_metrics
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.source.trees import codes_in, own_functions, tree_of
from lightning_mm5d.stage import Run
from lightning_mm5d.stage.payload import NotSent, Packer
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.kept_values import attributes_of, is_own, objects_of_hooks

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
_NOT_SENT = (
    "{step}: {name!r} of {path!r} is too large to be sent to other ranks, or holds what cannot be sent: hooks on these "
    "find there what it was. Return it from the step, or keep less of it."
)
_PART = (
    "{step}: {name!r} of {path!r} is not whole: {count} ranks share its layers or its sequences, and hooks find "
    "on each what it computed of its own part. Keep a value that is whole on each rank, as results of the step are."
)
_OF_HOOKS = (
    "{step}: a forward hook of {path!r} writes {name!r} of a {owner}, which stays on the ranks that compute the "
    "module: others find there what they had, or what stand-ins left. Keep it in an attribute of the hook's module, "
    "which travels to all ranks."
)
_UNLIKE_DRAWS = (
    "{step}: self.{name} draws for this rank's microbatches alone, as several ranks share out those of an encoder. So "
    "ranks draw unlike numbers for a microbatch. Where these decide what the encoder gets, draw from torch's own "
    "generator (without generator=), which every microbatch seeds, or give the encoder as many replicas as the model."
)
_NO_ITEM = (
    "{step}: this rank's replica of an encoder has no microbatch in a batch, and takes nothing of self.{name}, as "
    "other ranks may: later batches would get other items here. Set drop_last=True, or give the encoder fewer replicas."
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
        module: the LightningModule.
        takes_turns: whether this rank and others share out the microbatches of a replica.
        has_run: whether this rank has had a microbatch in any step.
        modules: inside of the LightningModule, by path.
        users_modules: those of classes of the user's own that this rank computes.
        homes: the stages at which they are computed, by path.
        runs: paths of those of which this rank holds a part, and whose forward it runs.
        rank: this one.
        plan: all stages.
    """

    def __init__(self, running: Running) -> None:
        self.module, self.plan, self.rank = running.module, running.plan, running.rank
        instances = map(self.plan.topology.instances, self.plan.topology.stages_of(self.rank))
        self.takes_turns = any(len(ranks) > self.plan.layout.num_replicas for ranks in instances)
        self.has_run = False
        self.modules: dict[str, nn.Module] = {}
        self._survey()
        self._told = set[tuple[type, str]]()
        self._device, self._groups = message_device(running.device), running.groups
        self._channels: dict[tuple[int, int], TreeChannel] = {}
        self._known: dict[tuple[str, int], tuple[int, list[str]]] = {}
        running.engine.around.append(self)

    def step(self, course: Course) -> AroundStep | None:
        """Watch a step; after the first of its kind in an epoch, the modules which that has changed."""
        if any(self.known(course.step, number) is None for number in course.step.microbatches):
            self._survey()
        return None if Exception in course.step.forgives else _Step(self, course.step)

    def _survey(self) -> None:
        """Look at the modules that there are, to which a hook may have added some."""
        modules = {path: part for path, part in self.module.named_modules() if path and not holds_metrics(part)}
        if modules.keys() == self.modules.keys() and all(part is self.modules[path] for path, part in modules.items()):
            return
        held, stages = _stages_below(self.plan), set(self.plan.topology.stages_of(self.rank))
        self.modules = modules
        self.homes = {path: _home(path, held, self.plan) for path in modules}
        self.runs = {path for path in modules if not stages.isdisjoint(held.get(path, ()))}
        self.users_modules = {path: module for path, module in modules.items() if is_own(module) and self.is_here(path)}

    def known(self, step: Any, number: int) -> list[str] | None:
        """Return the modules that the first step of its kind has changed in a replica; None for such a step."""
        epoch, known = self._known.get((step.name, number), (-1, []))
        return known if epoch == step.epoch else None

    def agree(self, step: Any, number: int, changed: Sequence[str]) -> list[str]:
        """Return the paths that any rank of a replica has changed, and note them; collective over its ranks."""
        local_paths, paths = set(changed), [*self.modules]
        bits = self.most(number, [path in local_paths for path in paths])
        agreed = [path for path, bit in zip(paths, bits, strict=True) if bit]
        self._known[step.name, number] = step.epoch, agreed
        return agreed

    def most(self, number: int, bits: Sequence[bool]) -> list[bool]:
        """Return which of `bits` are set on any rank of a replica; collective over these."""
        group = self._host(number) or self._groups.replicas.get(number)
        if group is None:
            return [*bits]
        device = self._device if self._host(number) is None else torch.device("cpu")
        message = torch.tensor(bits, device=device).int()
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
        return list(map(bool, message.tolist()))

    def source(self, path: str, number: int) -> int:
        """Return the rank that sends what a module keeps to a replica."""
        instances = self.plan.topology.instances(self.homes[path])
        return instances[number * len(instances) // self.plan.layout.num_replicas][0]

    def has_own_homes(self, path: str) -> bool:
        """Whether each replica has a home of its own for a module."""
        return len(self.plan.topology.instances(self.homes[path])) == self.plan.layout.num_replicas

    def hooked(self) -> list[tuple[str, Any]]:
        """Return objects of the user's own that hooks of modules here may write to, with the path of such a module."""
        here = {path: module for path, module in self.modules.items() if self.is_here(path)}
        owners = [(path, owner) for path, module in here.items() for owner in objects_of_hooks([module])]
        return [*{id(owner): (path, owner) for path, owner in owners}.values()]

    def sharers(self, path: str) -> int:
        """Return how many ranks share the layers or the sequences of a module that has a home in each replica."""
        return len(self.plan.topology.instances(self.homes[path])[0]) if self.has_own_homes(path) else 1

    def is_here(self, path: str) -> bool:
        """Whether this rank computes a module."""
        return self.rank in self.plan.topology.ranks_of(self.homes[path])

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


class _Step(AroundStep):
    def __init__(self, watched: _Watched, step: Any) -> None:
        self._watched, self._step = watched, step
        self._known = {number: watched.known(step, number) for number in sorted(step.microbatches)}
        self._is_first = None in self._known.values()
        named = {path for paths in self._known.values() for path in paths or ()}
        paths = [path for path in watched.modules if self._is_first or path in named]
        self._held = {path: _attributes(watched.modules[path]) for path in paths}
        self._here = {path for path in paths if watched.is_here(path)}
        told = paths if self._is_first else ()  # numbers may be on a device, for which the host waits
        self._numbers: dict[str, list[dict[str, float]]] = {path: [_numbers(watched.modules[path])] for path in told}
        self._entered = 0
        self._is_apart, self._runs = True, False
        modules = watched.users_modules if watched.plan.topology.edges else {}
        self._unwatched = {path: _places(module) for path, module in modules.items() if path not in self._held}
        hooked = watched.hooked() if self._is_first and watched.plan.topology.edges else []
        self._hooked = [(path, owner, _contents(owner)) for path, owner in hooked]
        draws = vars(watched.module).values() if self._is_first and watched.takes_turns else ()
        self._generators = generator_states(draws)

    @contextmanager
    def forward(self, run: Run, action: Action) -> Iterator[None]:
        """Mark, after the run, what it has left in the modules whose home it is."""
        self._entered, self._runs = self._entered + 1, True
        self._is_apart &= self._entered == 1  # side by side, microbatches write over each other
        of_stage = {path for path in self._here if self._watched.homes[path] == action.stage}
        others = [_attributes(self._watched.modules[path]) for path in self._here - of_stage]
        yield
        self._entered -= 1
        for attributes in others:  # which computed with stand-ins
            attributes.restore()
        for path in of_stage:
            if len(self._known) == 1:
                self._held[path].mark()
            if self._is_first:
                self._numbers[path].append(_numbers(self._watched.modules[path]))

    def end(self) -> None:
        """Join what microbatches have left, and share it; nothing of a step that fails on a rank."""
        failed = [
            bool(self._step.forgives) and paths != [] and self._watched.most(number, [self._step.fails])[0]
            for number, paths in self._known.items()
        ]
        try:
            if any(failed):
                for attributes in self._held.values():
                    attributes.restore()
            else:
                self._tell_of_late()
                self._tell_of_hooked()
                self._tell_of_draws()
                self._tell_of_no_item()
                self._join()
            self._share([number for number, fails in zip(self._known, failed, strict=True) if not fails], any(failed))
        finally:  # the engine keeps a step until the next one
            self._held.clear()
            self._numbers.clear()
            self._hooked.clear()

    def _join(self) -> None:
        if len(self._known) == 1 and self._is_apart:
            (samples,) = self._step.microbatches.values()
            sizes = Sizes.of(samples)
            for path in sorted(self._here) if len(sizes) > 1 else ():
                self._held[path].join(sizes)

    def _share(self, numbers: Sequence[int], fails: bool) -> None:
        """Send what has changed to the ranks of the replicas `numbers`, and receive what others send."""
        has_edges = bool(self._watched.plan.topology.edges)  # else each rank has all modules
        changes: dict[str, list[Any] | None] = {}
        if not fails and (has_edges or self._is_first):
            changes = {path: self._held[path].changes(path) for path in sorted(self._here)}
        changed = [path for path, change in changes.items() if change is not None]
        if self._is_first and not fails:
            self._tell(changed)
        elsewhere = self._held.keys() - self._here
        saved = {path: dict(vars(self._watched.modules[path])) for path in elsewhere & self._watched.runs}
        for path in elsewhere:
            self._held[path].restore()
        sent: dict[str, set[str]] = {path: set() for path in saved}
        for number in numbers:
            known = self._known[number]
            paths = self._watched.agree(self._step, number, changed) if known is None else known
            if known is None:
                self._tell_of_parts(number, [path for path in paths if self._watched.sharers(path) > 1], changes)
            for src in sorted({self._watched.source(path, number) for path in paths if has_edges}):
                own_paths = [path for path in paths if src == self._watched.rank == self._watched.source(path, number)]
                rows = [[path, self._sent(path, changes.get(path))] for path in own_paths]
                for path, change in self._watched.exchange(number, src, rows):
                    if change is not None and path in elsewhere:
                        if path in saved:
                            sent[path] |= {name for name, _ in change[1]}
                        self._held[path].apply(change)
        for path, values in saved.items():
            self._keep_own(self._watched.modules[path], values, sent[path])
        for path, change in changes.items() if has_edges and not self._is_first else ():
            if change is not None and change[1] and not self._watched.has_own_homes(path):
                self._say(_SHARED_OUT, path, change[1][0][0])

    def _tell_of_parts(self, number: int, paths: Sequence[str], changes: Mapping[str, list[Any] | None]) -> None:
        """Tell of attributes that differ between the ranks that share a module; collective over a replica."""
        local: dict[str, dict[str, list[float]]] = {}
        for path in paths:
            names = [name for name, _ in (changes.get(path) or ["entries", (), ()])[1]]
            local[path] = {name: _digest(vars(self._watched.modules[path]).get(name)) for name in names}
        rows = list[Any]()
        for src in sorted({self._watched.source(path, number) for path in paths}):
            sent = [[path, [*local[path].items()]] for path in paths if self._watched.source(path, number) == src]
            rows += self._watched.exchange(number, src, sent)
        shared = [(path, name, digest) for path, digests in rows for name, digest in digests]
        differs = [path in self._here and not _agree(local[path].get(name), digest) for path, name, digest in shared]
        for (path, name, _), is_part in zip(shared, self._watched.most(number, differs), strict=True) if shared else ():
            if is_part and self._watched.source(path, number) == self._watched.rank:
                self._say(_PART, path, name)

    def _keep_own(self, module: nn.Module, values: Mapping[str, Any], sent: Collection[str]) -> None:
        """Put back what the code of a module has computed on this rank, too, and its home has not sent."""
        now = vars(module)
        for name, value in values.items():
            is_new = now.get(name) is not value and name not in _OF_TORCH and name not in sent
            if is_new and not callable(value) and not any(map(is_remote, tree_leaves(value))):
                now[name] = value

    def _sent(self, path: str, change: list[Any] | None) -> list[Any] | None:
        """What crosses of a change; a warning tells of what does not, unless code of the module itself reads it."""
        if change is None:
            return None
        has_own, crossing = self._watched.has_own_homes(path), list[Any]()
        for name, value in change[1]:
            if has_own and _crosses(value):
                crossing.append([name, value])
            elif has_own and not _is_read(type(self._watched.modules[path]), name):
                self._say(_NOT_SENT, path, name)
        return [change[0], crossing, change[2]]

    def _tell_of_late(self) -> None:
        for path, before in self._unwatched.items():
            now = _places(self._watched.users_modules[path])
            names = sorted(name for name in now if now[name] != before.get(name))
            if names:
                self._say(_LATE, path, names[0])

    def _tell_of_draws(self) -> None:
        drawn, module = {id(generator) for generator in moved(self._generators)}, self._watched.module
        for name in [name for name, value in vars(module).items() if id(value) in drawn]:
            if self._watched.is_news(type(module), name):
                warnings.warn(_UNLIKE_DRAWS.format(step=self._step.name, name=name), stacklevel=2)

    def _tell_of_no_item(self) -> None:
        watched, names = self._watched, list[str]()
        if watched.takes_turns and watched.has_run and not self._runs:
            names = [name for name, value in vars(watched.module).items() if is_iterator(value)]
        watched.has_run |= self._runs
        for name in names:
            if watched.is_news(type(watched.module), name):
                warnings.warn(_NO_ITEM.format(step=self._step.name, name=name), stacklevel=2)

    def _tell_of_hooked(self) -> None:
        for path, owner, before in self._hooked:
            now = _contents(owner)
            names = sorted(name for name in now if _changed(now[name], before.get(name, [])))
            if names and self._watched.is_news(type(owner), names[0]):
                kind = type(owner).__name__
                message = _OF_HOOKS.format(step=self._step.name, path=path, name=names[0], owner=kind)
                warnings.warn(message, stacklevel=2)

    def _say(self, text: str, path: str, name: str) -> None:
        if self._watched.is_news(type(self._watched.modules[path]), name):
            count = self._watched.sharers(path)
            warnings.warn(text.format(step=self._step.name, name=name, path=path, count=count), stacklevel=3)

    def _tell(self, changed: Sequence[str]) -> None:
        for path in changed:
            before, *after = self._numbers[path]
            names = {name for numbers in after for name in numbers if len({each.get(name) for each in after}) > 1}
            names = {name for name in names if after[-1].get(name) != before.get(name)}
            if names and self._watched.source(path, min(self._step.microbatches)) == self._watched.rank:
                message = _REPEATED.format(step=self._step.name, what=min(names), path=path, count=len(after))
                warnings.warn(message, stacklevel=2)


def _attributes(module: nn.Module) -> Any:
    return attributes_of(module, partial(_is_for_hooks, module))


def _numbers(module: nn.Module) -> dict[str, float]:
    """The attributes of a module that are single numbers."""
    numbers: dict[str, float] = {}
    for name, value in vars(module).items():
        if type(value) is Tensor and value.numel() == 1 and not (is_remote(value) or value.is_meta):
            value = value.item()
        if type(value) in (int, float):
            numbers[name] = float(value)
    return numbers


def _digest(value: Any) -> list[float]:
    """Sizes and sums of the tensors and numbers in a value."""
    sums = list[float]()
    for leaf in tree_leaves(value):
        if type(leaf) is Tensor and not (is_remote(leaf) or leaf.is_meta):
            sums += [float(leaf.numel()), abs(leaf.detach() * 1.0).sum(dtype=torch.float64).item()]
        elif type(leaf) in (int, float):
            sums.append(float(leaf))
    return sums


def _agree(digest: list[float] | None, other: list[float]) -> bool:
    pairs = [*zip(digest or (), other, strict=False)]
    same = all(math.isclose(*pair, rel_tol=1e-6) or all(map(math.isnan, pair)) for pair in pairs)
    return digest is not None and len(digest) == len(other) and same


def _crosses(change: list[Any]) -> bool:
    """Whether other ranks can repeat a change, which is small enough to be sent."""
    leaves = tree_leaves(change)
    if any(isinstance(leaf, NotSent) for leaf in leaves):
        return False
    sizes = [leaf.numel() if isinstance(leaf, Tensor) else getattr(leaf, "size", 1) for leaf in leaves]
    try:
        Packer().describe(change)
    except (TypeError, ValueError):
        return False
    return sum(sizes) <= _LARGE


@functools.cache
def _functions(owner: type) -> dict[str, list[FunctionType]]:
    """The functions that a class itself defines, by each global and attribute that their code names."""
    functions: dict[str, list[FunctionType]] = {}
    for _, function in own_functions(owner) if owner.__module__.partition(".")[0] != "torch" else ():
        for name in {name for code in codes_in(function.__code__) for name in code.co_names}:
            functions.setdefault(name, []).append(function)
    return functions


def _uses(cls: type, name: str) -> Iterator[type | None]:
    """Yield what methods of a class do with an attribute: load, store or delete it; None for one without source.

    Parses only methods of which the compiled code has the name, one by one: a model of transformers has hundreds.
    """
    for function in (function for owner in cls.__mro__ for function in _functions(owner).get(name, ())):
        tree = tree_of(function)
        if tree is None:
            yield None
        else:
            nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == name)
            yield from (type(node.ctx) for node in nodes)


def _is_read(cls: type, name: str) -> bool:
    return any(use in (None, ast.Load) for use in _uses(cls, name))


@functools.cache
def _is_named(cls: Any, name: str) -> bool:
    return any(True for _ in _uses(cls, name))


def _is_for_hooks(module: nn.Module, name: str) -> bool:
    """Whether hooks may look for an attribute: no private one, nor one that code of a library keeps for itself."""
    cls: Any = type(module)
    return not name.startswith("_") and (is_own(module) or not _is_named(cls, name))


def _places(module: nn.Module) -> dict[str, tuple[int, int]]:
    """What tells whether attributes are others than before, or containers in them have other lengths."""
    return {
        name: (id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    }


def _contents(owner: Any) -> dict[str, list[tuple[Any, int]]]:
    """The attributes of an object, or the elements of those that are containers, each with its version."""
    contents = dict[str, list[tuple[Any, int]]]()
    for name, value in vars(owner).items():
        row = [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, (list, set)) else [value]
        contents[name] = [(element, version_of(element) if type(element) is Tensor else 0) for element in row]
    return contents


def _changed(row: list[tuple[Any, int]], before: list[tuple[Any, int]]) -> bool:
    pairs = zip(row, before, strict=False)
    return len(row) != len(before) or any(a is not b or version != old for (a, version), (b, old) in pairs)


def _stages_below(plan: Plan) -> dict[str, set[StageKey]]:
    """The stages that hold a part of each module, by path."""
    by_path: dict[str, set[StageKey]] = {}
    for name, keys in plan.partition.owners.items():
        stages = {plan.topology.stage_of[key] for key in keys}
        while name := name.rpartition(".")[0]:
            by_path.setdefault(name, set()).update(stages)
    return by_path


def _home(path: str, held: Mapping[str, Collection[StageKey]], plan: Plan) -> StageKey:
    """Return the last stage that holds a part of a module, or of the smallest one around it that has any."""
    topology = plan.topology
    while path and path not in held:
        path = path.rpartition(".")[0]
    if not path or topology.last_stage in held[path]:
        return topology.last_stage
    order: Mapping[str, int] = {name: index for index, name in enumerate(topology.order)}
    return max(held[path], key=lambda key: (order[key.modality], key.number))


FEATURE = KeptInParts
