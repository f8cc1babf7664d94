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

Refuses hooks that write on some ranks alone, as under ``if trainer.is_global_zero``: ranks compute with what each has.

1. `HookWrites` notes around each hook of a user which parameters and buffers it writes, and which modules, settings of
   optimizers, `requires_grad` and numbers in attributes it changes.
2. With the round in which a batch begins, ranks compare a digest of these names. Where it differs they exchange them.
3. A parameter, module or setting that some rank which needs it has not changed is refused. So is a buffer, but for
   ranks that are all replicas of it: there all take that of rank 0, as under DDP. An attribute that a step reads is
   warned of.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.engine.codec import broadcast_tree
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.monitor.verdict import named
from lightning_mm5d.schedule import Action
from lightning_mm5d.sharded.data_accesses import accesses
from lightning_mm5d.sharded.remote_value import TELLING, is_remote, plain
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.sharded.tensor import functions_named, written_by
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.source.trees import names, reached
from lightning_mm5d.stage import Run
from lightning_mm5d.trainer.feature import Attached, Feature, Running, is_of_user
from lightning_mm5d.trainer.kept_values import is_own

_SHOWING = TELLING | {*functions_named("data detach", Tensor)}
_VERSION = attrgetter("_version")
Weights = Mapping[str, nn.Parameter]
Place = tuple[dict[str, Tensor | None], str]
"""Where a module has a buffer: its own ones, and the name there."""


class WeightWrites(Feature):
    """Has no field: it changes no number."""

    def attach(self, running: Running) -> Attached | None:
        """Watch the steps of schedules, and hooks where there are several ranks."""
        steps = None if running.is_plain else _Watched(running)
        if running.plan.layout.size == 1 or running.trainer.predicting:
            return steps
        hooks = HookWrites(running)
        if steps is not None:
            hooks.changes.callback(steps.remove)
        return hooks


class _Watched(Attached, AroundSteps):
    """The steps of one rank.

    Attributes:
        weights: that are watched, by name.
        names: of them, by identity.
        buffers: where those of layers are, by name.
        last_stage: where the step ends.
        looks: at weights as arrays.
    """

    def __init__(self, running: Running) -> None:
        tables = [module for module in running.module.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
        renormed = {id(table.weight) for table in tables if table.max_norm is not None}
        named = running.module.named_parameters()
        self.weights = {name: weight for name, weight in named if id(weight) not in renormed}
        self.names = {id(weight): name for name, weight in self.weights.items()}
        ownership = running.plan.ownership
        shared, root = {*ownership.written_by_all}, running.module
        names = {name for name, _ in root.named_buffers() if running.plan.topology.edges} - shared
        owned = sorted(names & running.plan.partition.owners.keys())
        self.buffers = {name: _place(root, name) for name in owned}
        self.last_stage = running.plan.topology.last_stage
        self.looks = Looks(self.weights)
        self.changes.callback(self.looks.remove)
        running.engine.around.append(self)

    def step(self, course: Course) -> AroundStep | None:
        """Watch a step, unless nothing of it stays, whatever happens."""
        if Exception in course.step.forgives:
            return None
        return _Step(self, course.step)


class _Step(AroundStep):
    def __init__(self, watched: _Watched, step: Any) -> None:
        self._watched, self._weights = watched, watched.weights
        self._step, self._written = step, step.weights_written
        self._norms = dict[str, Tensor]()  # of those that runs have written to
        self._counts = dict[str, int]()
        self._doubts: list[tuple[Tensor, str, str]] = []  # whether a write is refused, to which weight, and why
        self._running, self._are_beside = 0, False  # runs, and whether there were several at a time

    @contextmanager
    def forward(self, run: Run, action: Action) -> Iterator[None]:
        """Watch one run."""
        known = {name: self._weights[name] for name in self._norms}
        order = _Order(known, counts_all=not self._step.trains) if known else nullcontext()
        before = self._versions()
        watched = self._watched
        self._running += 1
        self._are_beside |= self._running > 1
        with written(self._weights, watched.names) as names, watched.looks.noted() as shown, order as early:
            yield
        self._running -= 1
        for name, version in self._versions().items():
            if version != before[name]:
                has_ended = action.stage == watched.last_stage
                self._written[name] = 1 if has_ended else self._written.get(name, -1)
        counts = names()
        for name, (memory, was) in shown.items():
            if name not in counts and not torch.allclose(memory, was, rtol=0.0, atol=0.0, equal_nan=True):
                raise self._refusal(name, "and a write past torch leaves no trace, so that ranks cannot take it over")
        for name, count in counts.items():
            # a run counts the writes of those beside it, too
            self._written[name] = max(1 if self._are_beside else count, self._written.get(name, 0))
            if is_remote(self._weights[name]):
                continue
            norm = _norm(self._weights[name])
            if not self._are_beside and self._counts.setdefault(name, count) != count:
                changes = [torch.ones_like(norm[0]).bool()] if early is None else early.changes.get(name, [])
                self._doubts += [(change, name, "and one has ended between two writes") for change in changes]
            if self._step.fails:
                raise self._refusal(name, "and this one has ended before its end, and would run once more")
            self._doubts.append((_differ(self._norms.setdefault(name, norm), norm), name, "and would write as often"))
            if early is not None and name in early.used_before:
                why = "and computes with the weight before it writes: later runs with what earlier ones left"
                self._doubts.append((~early.changes[name][0], name, why))
        if all(flag.device.type == "cpu" for flag, _, _ in self._doubts):  # for others the host would wait in the midst
            self.end()

    def end(self) -> None:
        """Refuse what runs have written; the host waits for the device once."""
        doubts, self._doubts = self._doubts, []
        if not doubts:
            return
        device = doubts[0][0].device
        are_refused = torch.stack([flag.to(device) for flag, _, _ in doubts]).tolist()
        for is_refused, (_, name, why) in zip(are_refused, doubts, strict=True):
            if is_refused:
                raise self._refusal(name, why)

    def _refusal(self, name: str, why: str) -> ConfigError:
        rule = f"The step runs for each microbatch and stage, {why}"
        fix = f"Write in {self._step.hooks}_start or {self._step.hooks}_end, which run once and see all weights"
        return ConfigError(self._step.name, f"a write to {name!r}", rule, fix)

    def _versions(self) -> dict[str, tuple[int, int]]:
        with plain():
            tensors = {name: buffers.get(key) for name, (buffers, key) in self._watched.buffers.items()}
            return {name: (id(tensor), 0 if tensor is None else version_of(tensor)) for name, tensor in tensors.items()}


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
        copies: dict[str, tuple[Tensor, Tensor]] = {}
        self._runs[id(copies)] = copies
        try:
            yield copies
        finally:
            del self._runs[id(copies)]

    def _noticing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def noticed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.is_floating_point()
            if self._runs and is_plain:
                with plain(), torch.no_grad():
                    address = _address(tensor)
                    here = ((name, weight.detach()) for name, weight in self._weights.items() if not is_remote(weight))
                    name, memory = next((pair for pair in here if _address(pair[1]) == address), ("", tensor))
                    for copies in self._runs.values() if name else ():
                        if name not in copies:
                            copies[name] = memory, memory.clone()
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

    def writes() -> dict[str, int]:
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
        yield writes


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
        self._weights, self._ids = weights, {id(weight): name for name, weight in weights.items()}
        self._used = set[str]()
        self.changes: dict[str, list[Tensor]] = {}
        self.used_before = set[str]()

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SHOWING:
            return func(*args, **kwargs)
        targets = {_address(tensor) for tensor in written_by(func, args, kwargs) if not is_remote(tensor)}
        written = {name: _norm(p) for name, p in self._weights.items() if targets and self._is_among(p, targets)}
        if not targets and (self._counts_all or torch.is_grad_enabled()):
            self._used |= {
                self._ids[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._ids
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


def _differ(norm: Tensor, other: Tensor) -> Tensor:
    """Return whether norms differ, on the device of `norm`; of what rests elsewhere both are NaN."""
    other = other.to(norm.device)
    return ((norm != other) & ~(norm.isnan() & other.isnan())).any()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_STEPS = ("training_step", "validation_step", "test_step", "forward")
_RULE = "Ranks compute with parameters, buffers and settings of their own, and others would go on with the old one"
_FIX = (
    "Write it on all ranks, outside of conditions such as trainer.is_global_zero; a value that rank 0 alone has comes "
    "to all by self.trainer.strategy.broadcast(value)"
)
_CPU = torch.device("cpu")
Kind = str  # "parameter", "buffer", "module", "requires_grad", "attribute" or "setting"


class HookWrites(Attached):
    """What hooks have written on this rank since ranks last compared; a `BatchProof`.

    Args:
        running: of several ranks.
    """

    def __init__(self, running: Running) -> None:
        self._module, self._trainer = running.module, running.trainer
        self._plan, self._rank = running.plan, running.rank
        self._weights: Weights = dict(running.module.named_parameters())
        self._ids = {id(weight): name for name, weight in self._weights.items()}
        self._writers = dict[tuple[Kind, str], str]()  # by kind and name, the hook
        self._told = set[str]()  # attributes
        self._tree: list[nn.Module] = [running.module]
        self._held: list[int] = []  # identities of what these hold
        self._modules: dict[tuple[Kind, str], int] = {}
        self._buffers: list[tuple[str, Tensor]] = []
        self._trained: list[bool] = []
        self._requires: dict[tuple[Kind, str], bool] = {}
        self._read = _read_by_steps(running.module)
        self._between = is_overridden("on_train_batch_start", running.module)  # which runs before a step is compared
        self._group = running.more_groups.get(range(self._plan.layout.size), "turns", backend="gloo")
        running.turns.proofs.append(self)
        self.changes.callback(running.turns.proofs.remove, self)
        for owner in (running.module, *vars(running.trainer)["callbacks"]):
            for name in dir(type(owner)):
                hook = getattr(owner, name, None) if name.startswith("on_") and "transfer" not in name else None
                if callable(hook) and is_of_user(hook):
                    self.put_attribute(owner, name, self._watched(hook, f"{type(owner).__name__}.{name}"))

    def _watched(self, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(hook)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = self._states()
            with written(self._weights, self._ids) as weights:
                result = hook(*args, **kwargs)
            changed = [("parameter", weight) for weight in weights()]
            for had, has in zip(before, self._states(), strict=True):
                if had is not has and had != has:
                    both = {**had, **has}
                    changed += [key for key in both if key not in had or key not in has or had[key] != has[key]]
            for key in changed:
                self._writers.setdefault(key, name)
            return result

        return watched

    def _states(self) -> tuple[Mapping[tuple[Kind, str], Any], ...]:
        """What hooks may change; of the first and the second of these the same object until something has."""
        self._look_at_modules()
        with plain():
            trained = [weight.requires_grad for weight in self._weights.values()]
            if trained != self._trained:
                self._trained = trained
                self._requires = {
                    ("requires_grad", name): is_trained for name, is_trained in zip(self._weights, trained, strict=True)
                }
            buffers = {("buffer", name): _Buffer(buffer) for name, buffer in self._buffers}
        others: dict[tuple[Kind, str], Any] = {}
        for number, optimizer in enumerate(self._trainer.optimizers):
            for group, options in enumerate(optimizer.param_groups):
                where = f"of group {group} of optimizer {number}"
                for name, value in options.items():
                    if type(value) in _NUMBERS or isinstance(value, Tensor):
                        setting = _Buffer(value) if isinstance(value, Tensor) else value
                        others["setting", f"{name} {where}"] = setting
        for path, module, read in self._read:
            for name in vars(module).keys() & read:
                if type(value := vars(module)[name]) in _NUMBERS:
                    others["attribute", f"{path}.{name}".lstrip(".")] = value
        return self._modules, self._requires, buffers, others

    def _look_at_modules(self) -> None:
        """Walk the tree of modules where anything is registered that was not."""
        if [*map(id, self._children())] != self._held:
            named_modules = dict(self._module.named_modules())
            self._tree = [*named_modules.values()]
            self._modules = {("module", path): id(module) for path, module in named_modules.items()}
            self._buffers = [*self._module.named_buffers()]
            self._held = [*map(id, self._children())]

    def _children(self) -> Iterator[object]:
        for module in self._tree:
            yield from module._modules.values()
            if module._buffers:
                yield from module._buffers.values()

    # --- of ranks that begin a batch ---

    def slots(self) -> list[int]:
        """Return a number of what hooks have written, and its negative."""
        digest = hashlib.blake2b(json.dumps(sorted(self._writers)).encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big") >> 2
        return [number, -number]

    def check(self, agreed: list[int], group: dist.ProcessGroup) -> None:
        """Refuse or mend what some ranks alone have written; collective where any has.

        Raises:
            ConfigError: on all ranks; names the hook, what it writes, and the ranks that did not.
        """
        writers, self._writers = self._writers, {}
        if agreed[0] == -agreed[1]:
            return
        by_key: dict[tuple[Kind, str], dict[int, str]] = {}
        for rank in range(self._plan.layout.size):
            text = json.dumps([*writers.items()]) if rank == self._rank else None
            for (kind, name), hook in json.loads(broadcast_tree(text, rank, _CPU, group)):
                by_key.setdefault((kind, name), {})[rank] = hook
        for (kind, name), hooks in sorted(by_key.items()):
            self._judge(kind, name, hooks, group)

    @property
    def is_due(self) -> bool:
        """Whether the module has a hook between the beginning of a batch and its step."""
        return self._between

    def compare_alone(self) -> None:
        """Evaluation of replicas by themselves: the next round compares."""

    def leave(self, targets: Sequence[int], *, failed: bool) -> None:
        """Compare what the last hooks have written."""
        if not failed and self._group is not None:
            agreed = torch.tensor(self.slots())
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
            self.check(agreed.tolist(), self._group)

    def _judge(self, kind: Kind, name: str, hooks: Mapping[int, str], group: dist.ProcessGroup) -> None:
        plan, all_ranks = self._plan, range(self._plan.layout.size)
        is_owned = kind in ("parameter", "buffer") and name in plan.partition.owners
        is_shared = not is_owned or name in plan.ownership.written_by_all
        needing = [*all_ranks] if is_shared else [*plan.ownership.ranks_holding(name)]
        replicas = [set(plan.layout.replica_ranks(number)) for number in range(plan.layout.num_replicas)]
        lacking = [rank for rank in needing if rank not in hooks]
        if kind == "buffer" or (kind == "attribute" and [*hooks] != [0]):  # replicas may write by their samples
            lacking = [
                rank
                for rank in lacking
                if any(rank in replica and not replica.isdisjoint(hooks) for replica in replicas)
            ]
        if kind == "buffer" and 0 in hooks and not plan.topology.edges and name not in plan.division.shards:
            self._take_over(name, group)
        elif lacking:
            hook, ranks = hooks[min(hooks)], named([*hooks])
            what = {"attribute": "self.", "setting": "", "requires_grad": "requires_grad of "}.get(kind, f"the {kind} ")
            got = f"a change of {what}{name} on {ranks} and not on {named(lacking)}"
            if kind != "attribute":
                raise ConfigError(hook, got, _RULE, _FIX)
            if name not in self._told:
                self._told.add(name)
                rank_zero_warn(f"{hook} makes {got}, and steps read it: ranks compute with unequal values. {_FIX}")

    def _take_over(self, name: str, group: dist.ProcessGroup) -> None:
        path, _, key = name.rpartition(".")
        module = self._module.get_submodule(path)
        buffer = module._buffers.get(key)
        value = broadcast_tree(None if buffer is None or self._rank else buffer.detach().to(_CPU), 0, _CPU, group)
        if value is None or self._rank == 0:  # rank 0 has deleted it since, or has it
            return
        value = value.to(self._module.device if buffer is None else buffer.device)
        if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
            with torch.no_grad():
                buffer.copy_(value)
            return
        if hasattr(module, key):
            delattr(module, key)
        module.register_buffer(key, value)


_SMALL = 4096  # elements of buffers in host memory whose values are compared: a write through `data` leaves no trace
_NUMBERS = (bool, int, float, str)


def _read_by_steps(root: nn.Module) -> list[tuple[str, nn.Module, frozenset[str]]]:
    """Return path, module and the names in the code of its steps and forward, for modules of classes of users."""
    reads: list[tuple[str, nn.Module, frozenset[str]]] = []
    for path, module in root.named_modules():
        steps = _STEPS if module is root else ("forward",)
        if module is root or is_own(module):
            codes = [code for step in steps for code in reached(type(module), step)]
            reads.append((path, module, frozenset().union(*(names(code) or () for code in codes))))
    return reads


class _Buffer:
    """A buffer at a moment: which tensor, its version, and the values of a small one in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        is_small = tensor.is_cpu and tensor.numel() <= _SMALL and type(tensor) is Tensor
        self._state = id(tensor), version_of(tensor)
        self._values = tensor.detach().clone() if is_small else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Buffer) or self._state != other._state:
            return False
        values, others = self._values, other._values
        if values is None or others is None:
            return values is others
        if torch.equal(values, others):
            return True
        return values.shape == others.shape and bool(((values == others) | (values.isnan() & others.isnan())).all())

    __hash__ = None  # type: ignore[assignment]


FEATURE = WeightWrites
