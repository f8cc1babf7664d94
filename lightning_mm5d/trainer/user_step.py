"""The user's step as the engine runs it: once for each stage and microbatch of this rank.

The result of one step, what its microbatches weigh, and what a batch takes of the iterators and random generators that
the module holds, in all runs of its step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.joining import BatchNumber
from lightning_mm5d.data.microbatch import Microbatch, RepeatedItems, copied, with_tensors
from lightning_mm5d.data.random_state import generator_states, is_iterator, put_generators_back
from lightning_mm5d.engine.codec import TreeChannel
from lightning_mm5d.engine.engine import READS_SHARDS
from lightning_mm5d.engine.step import Scope
from lightning_mm5d.sharded.own_backwards import StepBackwards
from lightning_mm5d.sharded.remote_value import is_remote, settled
from lightning_mm5d.sharded.torch_internals import writes_counted
from lightning_mm5d.stage import StageError
from lightning_mm5d.stage.payload import Packer, detached, map_tensors, unsharded
from lightning_mm5d.trainer.kept_values import LONG, OF_LIGHTNING, KeptValues, is_own
from lightning_mm5d.trainer.logs import LogCapture, LogOptions, MergedLog, read_by
from lightning_mm5d.trainer.metrics import MetricSync
from lightning_mm5d.trainer.optimization import setting_holders

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(frozen=True)
class Weights:
    """The weight of each microbatch in the mean over all microbatches of all replicas.

    Attributes:
        of_replica: of this replica's microbatches, by index; empty on ranks where no step ends.
        total: of the microbatches of all replicas.
        samples: of all replicas, where these have unlike numbers; else None.
    """

    of_replica: tuple[float, ...] = ()
    total: float = 1.0
    samples: float | None = None

    def share(self, index: int) -> float:
        """Return the factor of a microbatch's loss in the mean over all replicas; NaN where nothing weighs anything."""
        return self.of_replica[index] / self.total if self.total else math.nan

    def weighted_sum(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the sum of this replica's losses times their weights, in float64.

        A loss of weight 0 is left out: a mean over no tokens is NaN, and on one process it would not be there.
        """
        terms = [loss.double() * weight for loss, weight in zip(losses, self.of_replica, strict=True) if weight]
        return torch.stack(terms).sum() if terms else losses[0].new_zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class StepResult:
    """What one process with the full batch would have returned and logged.

    Attributes:
        loss: mean over the replica's microbatches; None outside of training.
        outputs: what the user's step returned beside it, merged over microbatches.
        logs: merged calls of ``self.log``.
        has_graph: whether the loss of any microbatch of any replica has a gradient.
        fails: whether a pipeline could not run it, so that it has nothing else.
        module_changes: what the step changed in attributes of the module, see `KeptValues.changes`.
        stops: whether the step has asked the trainer to stop.
        weights_written: how often each run of the step wrote to which parameters and buffers, by name.
        settings: which settings of optimizers and schedulers it has changed, see `OptimizerSettings`.
    """

    loss: Tensor | None = None
    outputs: Any = None
    logs: list[MergedLog] = field(default_factory=list)
    has_graph: bool = True
    fails: bool = False
    module_changes: list[Any] = field(default_factory=list)
    stops: bool = False
    weights_written: dict[str, int] = field(default_factory=dict)
    settings: dict[int, dict[str, Any]] = field(default_factory=dict)

    def check_equal(self, shared: StepResult) -> Callable[[], None]:
        """Return what refuses a loss or log that differs from the one of another rank with the same last layers.

        It raises a `StageError` where one differs by more than a relative 1e-5; 1e-2 for a loss in half precision.
        Until it is called, values travel to the host, which waits for none here.
        """
        pairs = [(f"log {log.options.name!r}", log, peer) for log, peer in zip(self.logs, shared.logs, strict=False)]
        computed = [(name, log.value, peer.value) for name, log, peer in pairs if log.is_computed]
        if self.loss is not None and shared.loss is not None:
            computed.insert(0, ("loss", self.loss, shared.loss))
        named = [(name, local, peer) for name, local, peer in computed if local is not None and peer is not None]
        is_half = self.loss is not None and torch.finfo(self.loss.dtype).bits < 32
        values = [
            (name, torch.stack([local.to(peer), peer]).double().to("cpu", non_blocking=True))
            for name, local, peer in named
        ]
        event = torch.cuda.current_stream().record_event() if any(peer.is_cuda for _, _, peer in named) else None

        def check() -> None:
            if event is not None:
                event.synchronize()
            for name, (local, peer) in values:
                if not local.isclose(peer, rtol=1e-2 if is_half else 1e-5, atol=0.0, equal_nan=True):
                    raise StageError(
                        f"the ranks that share the last layers have unequal values of the {name}, {local:.6g} and "
                        f"{peer:.6g}. {READS_SHARDS}"
                    )

        return check


class ResultChannel:
    """Shares results within one replica.

    Args:
        src: global rank where the step ends.
        group: the replica's ranks; None without other ranks.
        device: where messages live.
        host: the same ranks, for what is in host memory; None where `device` is that.
    """

    def __init__(
        self, *, src: int, group: dist.ProcessGroup | None, device: torch.device, host: dist.ProcessGroup | None = None
    ) -> None:
        is_alone = group is None or dist.get_world_size(group) == 1
        self._channel = None if is_alone else TreeChannel.within(group, src, device, host)
        self._sends = is_alone or dist.get_rank() == src

    def share(self, result: StepResult | None) -> StepResult:
        """Return the result of the rank where the step ends, on every rank of the replica; collective.

        Args:
            result: read on that rank only.
        """
        if self._sends:
            assert result is not None
            if self._channel is not None:
                self._channel.send(tree_of(result))
            return result
        assert self._channel is not None
        return _from_tree(self._channel.receive())


def tree_of(result: StepResult) -> dict[str, Any]:
    # numbers are a tensor, because a header is sent again when plain values in it change
    numbers = torch.tensor([result.has_graph, *(log.batch_size for log in result.logs)], dtype=torch.float64)
    logs = [asdict(log.options) for log in result.logs], [log.value for log in result.logs]
    first = {"loss": result.loss, "has_graph": numbers}  # what has equal dtypes travels in one message
    return {**first, **vars(result), **first, "logs": logs}


def _from_tree(tree: dict[str, Any]) -> StepResult:
    has_graph, *sizes = tree["has_graph"].tolist()
    logs = [
        MergedLog(options=LogOptions(**options), value=value, batch_size=size)
        for options, value, size in zip(*tree["logs"], sizes, strict=True)
    ]
    return StepResult(**{**tree, "has_graph": bool(has_graph), "logs": logs})


Context = Callable[[], AbstractContextManager[Any]]
Watch = Callable[[Microbatch], AbstractContextManager[Any]]


class _Cell:
    """A number in a tensor, as ``lr=torch.tensor(0.1)``, which a step may change in place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version, self.value = tensor, tensor._version, tensor.detach().clone()

    def is_changed(self, now: Any) -> bool:
        is_other = now is not self.tensor or now._version != self.version
        return is_other or (now.is_cpu and not torch.equal(now, self.value))  # a write to `data` raises no version

    def taken(self, now: Any) -> Any:
        """Return what tells of `now`: a tuple holds another tensor, for this one may be that of other groups, too."""
        return (_copied_value(now),) if isinstance(now, Tensor) and now is not self.tensor else _copied_value(now)

    def fill(self, value: Any) -> Any:
        """Return what `taken` tells of: another value, or the tensor with its number; of this cell that from before."""
        if type(value) is tuple and value and isinstance(value[0], Tensor):
            return value[0].to(self.tensor.device, copy=True)
        if not isinstance(number := self.value if value is self else value, Tensor):
            return number
        with torch.no_grad():
            self.tensor.copy_(number)
        self.version = self.tensor._version if value is self else -1
        return self.tensor


class OptimizerSettings:
    """Numbers in the groups of optimizers, and of schedulers, that `training_step` changes: ``group["lr"] *= 0.5``.

    One process runs the step once a batch. So each run begins with the settings from before the batch, and the batch
    leaves, on all ranks, those that the last run to the end of the step has left.

    Args:
        module: the LightningModule, before the batch.
        step: name of the method. Of others than that of automatic optimization all changes stay.
    """

    def __init__(self, module: LightningModule, step: str) -> None:
        puts_back = step == "training_step" and module.automatic_optimization
        cells = dict[int, _Cell]()
        self._before = [(owner, _numbers(owner, cells)) for owner in (setting_holders(module) if puts_back else ())]
        self._left, self.of_batch = list[dict[str, Any]](), dict[int, dict[str, Any]]()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Enter around a run of the step, which leaves the settings as they were."""
        try:
            yield
        finally:
            self._left = self.take()
            self.put([{}] * len(self._before))

    def take(self) -> list[dict[str, Any]]:
        """Return what the microbatch that is computed has changed so far."""
        return [
            {name: _taken(owner[name], before[name]) for name in _changed(owner, before)}
            for owner, before in self._before
        ]

    def put(self, state: list[dict[str, Any]]) -> None:
        """Go on with the microbatch that `take` returned `state` of."""
        for owner, before in self._before:
            self._set(owner, before, {name: before[name] for name in _changed(owner, before)})
        for (owner, before), left in zip(self._before, state, strict=True):
            self._set(owner, before, left)

    def end(self) -> None:
        """The latest run has come to the end of the step."""
        self.of_batch = {index: left for index, left in enumerate(self._left) if left}

    def apply(self, settings: Mapping[int, Mapping[str, Any]]) -> None:
        """Put those of a batch in place, `of_batch` on the rank where its step ends."""
        for index, numbers in settings.items():
            self._set(*self._before[index], numbers)

    @staticmethod
    def _set(owner: dict[str, Any], before: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            cell = before.get(name)
            owner[name] = cell.fill(value) if isinstance(cell, _Cell) else _copied_value(value)


def _numbers(owner: Mapping[str, Any], cells: dict[int, _Cell]) -> dict[str, Any]:
    """The numbers of a group or scheduler, also in tensors, of which each has a cell, and rows of them."""
    return {
        name: cells.setdefault(id(value), _Cell(value)) if isinstance(value, Tensor) else _copied_value(value)
        for name, value in owner.items()
        if _is_number(value)
    }


def _copied_value(value: Any) -> Any:
    """The value itself, of a list or tensor a copy: the step may change it in place."""
    return value.detach().clone() if isinstance(value, Tensor) else [*value] if type(value) is list else value


def _taken(now: Any, before: Any) -> Any:
    return before.taken(now) if isinstance(before, _Cell) else _copied_value(now)


def _changed(owner: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    return [name for name, value in before.items() if name in owner and _differ(owner[name], value)]


def _differ(now: Any, before: Any) -> bool:
    if isinstance(before, _Cell):
        return before.is_changed(now)
    return now is not before and (type(now) is not type(before) or now != before)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return all(isinstance(number, int | float) for number in (value if isinstance(value, tuple | list) else [value]))


class BatchDraws:
    """What a batch takes of the iterators and random generators in attributes of the LightningModule.

    One process runs the step once a batch, and takes an item by ``next(self.other)``. So each run of a batch, for any
    microbatch and stage, gets the items that the first one has taken. Of a random generator (`random.Random`, numpy's,
    torch's) microbatches draw one after another, as the rows of a batch do, and each stage of this rank draws the same.

    Iterators are found in attributes of the module, in dicts and lists that it holds, and in attributes of objects of
    the user's own classes that it holds. What a batch takes is drawn from a random state of its own, the same on all
    ranks.

    Args:
        module: the LightningModule, before the batch.
        random_key: of the batch; None where nothing is seeded.
    """

    def __init__(self, module: LightningModule, random_key: tuple[int | str, ...] | None = None) -> None:
        values = vars(module)
        self._owners: list[Any] = [values]
        for _, _, value in [*self._entries()]:
            if (owner := _attributes(value)) is not None:
                self._owners.append(owner)
        iterators = [entry for entry in self._entries() if is_iterator(entry[2])]
        self._iterators = [(owner, name, RepeatedItems(value, self)) for owner, name, value in iterators]
        lists = {name: value for _, name, value in self._entries(1) if type(value) is list}
        self._rows = {name: (value, [*value]) for name, value in lists.items() if _has_iterators(value)}
        self._start = generator_states(values.values())
        self._states: dict[tuple[Hashable, int], Any] = {}  # what each stage of a replica has left
        self._runs = Counter[tuple[Hashable, int]]()
        self.random_key, self.items = random_key, dict[int, list[Any]]()

    def _entries(self, count: int | None = None) -> Iterator[tuple[Any, Any, Any]]:
        """What the first owners hold, each with its owner and name, without what Lightning keeps in the module."""
        for owner in self._owners[:count]:
            for name, value in owner.items() if isinstance(owner, dict) else enumerate(owner):
                if owner is not self._owners[0] or name not in OF_LIGHTNING:
                    yield owner, name, value

    @contextmanager
    def run(self, place: tuple[Hashable, int], *, counts: bool) -> Iterator[None]:
        """Enter around a run of the step.

        Args:
            place: the stage that runs, and its replica, of which this rank may serve several.
            counts: whether what it draws is drawn; else somebody puts random states back.

        Raises:
            ConfigError: an earlier run has made an iterator, of which each run would take items for itself.
        """
        if self._runs:
            self._check_new()
        for row, whole in self._rows.values():
            if all(map(is_iterator, whole)):  # others hold what the step keeps, too
                row[:] = whole
        for owner, name, repeated in self._iterators:
            owner[name], repeated.place = repeated, 0
        if counts:
            self._runs[place] += 1
        draws = counts and bool(self._start)
        if draws:
            put_generators_back(self._states.get(place, self._start))
        try:
            yield
        finally:
            if draws:
                self._states[place] = generator_states(generator for generator, _ in self._start)
                # of stages, the last one draws most; an encoder that ranks share has not run for all microbatches
                stages = [*dict.fromkeys(stage for stage, _ in self._states)]
                most = max(self._states, key=lambda key: (self._runs[key], stages.index(key[0])))
                put_generators_back(self._states[most])
            sources = {id(repeated): repeated.source for *_, repeated in self._iterators}
            lists = (value for value in self._owners[0].values() if type(value) is list and len(value) <= LONG)
            for owner in (*self._owners, *lists) if sources else ():
                entries = owner.items() if isinstance(owner, dict) else enumerate(owner)
                for name, value in [*entries]:  # wherever the step has put it
                    if id(value) in sources:
                        owner[name] = sources[id(value)]

    def _check_new(self) -> None:
        """Refuse iterators that the step has made where there was none; those in place of another go on."""
        known = {(id(owner), name) for owner, name, _ in self._iterators}
        for name, (row, whole) in self._rows.items():
            rule = "A step runs once for each microbatch, and each run would begin with the list that one has left"
            if self._owners[0].get(name) is not row:
                raise ConfigError(f"self.{name}", "a new list of iterators", rule, "Change the list itself")
            if not all(map(is_iterator, whole)) and _places(row) != _places(whole):
                fix = "Keep the iterators in a list of their own"
                raise ConfigError(f"self.{name}", "a list whose iterators the step moves", rule, fix)
        for owner, name, value in self._entries():
            if is_iterator(value) and (id(owner), name) not in known:
                rule = "A step runs once for each microbatch, and each run would make an iterator and read it"
                fix = "Make it in on_train_start, or in the constructor"
                raise ConfigError(f"self.{name}", f"{type(value).__name__} that the step makes", rule, fix)


def _attributes(value: Any) -> Any:
    """A dict or list, or the attributes of an object of a class of the user's own; None for anything else."""
    if type(value) is list:
        return value if _has_iterators(value) else None
    if type(value) is not dict:
        value = getattr(value, "__dict__", None) if is_own(value) and not isinstance(value, nn.Module) else None
    return value if type(value) is dict and len(value) <= LONG else None


def _has_iterators(value: Any) -> bool:
    """Whether a value is a list in which an iterator is; one with data in it may be what the step keeps, too."""
    return type(value) is list and len(value) <= LONG and any(map(is_iterator, value))


def _places(row: list[Any]) -> dict[int, int]:
    return {index: id(value) for index, value in enumerate(row) if is_iterator(value)}


class UserStep:
    """A `Step` that evaluates: ``validation_step``, ``test_step`` or ``predict_step``.

    Args:
        module: the user's module.
        name: of its method.
        arguments: of the method, after the batch.
        microbatches: by replica that this rank serves.
        weights: of this replica's microbatches.
        context: precision of the forward.
        capture: records what the step logs.
        metrics: the module's metrics.
        random_key: what random state depends on; None leaves generators alone.
        draws: what the batch takes of the module's own iterators and generators.
        settings: of optimizers and schedulers, which the step may change.
        watch: returns for a microbatch what is entered around a run on it; None for nothing.
        copies: whether each run gets tensors of its own, because a step that writes to its batch in place would do so
            in each stage of this rank, and under backwards of other microbatches.

    Attributes:
        name: of the method.
        writes: whether it has written to such copies.
        epoch: of the run.
        results: of the last stage, by index of the microbatch.
        scopes: what belongs to one microbatch at a time.
        kept_values: what the step keeps in attributes of the module, which is marked where a microbatch ends.
        ended: indices of the microbatches that have ended, in their order.
        weights_written: how often each run on this rank wrote to which parameters and buffers, where these are watched;
            -1 for buffers that only runs wrote which ended before the step's end.
    """

    trains = False
    fails = False
    forgives: tuple[type[Exception], ...] = ()

    def __init__(
        self,
        module: LightningModule,
        name: str,
        arguments: Sequence[Any],
        microbatches: Mapping[int, list[Microbatch]],
        weights: Weights,
        *,
        context: Context,
        capture: LogCapture,
        metrics: MetricSync,
        random_key: tuple[int | str, ...] | None,
        draws: BatchDraws,
        settings: OptimizerSettings,
        watch: Watch | None = None,
        copies: bool = False,
    ) -> None:
        self.microbatches, self.random_key, self.context = microbatches, random_key, context
        self.weights, self.results, self.epoch = weights, dict[int, Any](), module.current_epoch
        self._module, self.name = module, name
        self._arguments = [BatchNumber(arg) if type(arg) is int and self.is_split else arg for arg in arguments]
        self._capture, self._metrics, self._watch, self._draws = capture, metrics, watch, draws
        self._unchanged: dict[int, Any] = {}
        self._settings, self._copies, self.writes = settings, copies, False
        self._written: dict[int, _BatchCopy] = {}  # by identity of the tensor
        self.scopes: Sequence[Scope] = [capture, settings]
        self.kept_values: KeptValues | None = None
        self.ended: list[int] = []
        self.weights_written = dict[str, int]()
        self._repeats = False

    def structure(self, batch: Any) -> Hashable:
        """Return a key that is equal for batches of equal nesting, dtypes and numbers of dims, whatever their sizes."""
        return (self.name, self._module.training, _structure(batch))

    @contextmanager
    def reads(self) -> Iterator[list[str]]:
        """Enter around `run`; gives a list, empty unless the user's step reads `global_step`."""
        names: list[str] = []

        def read(value: int) -> int:
            names.append("global_step")
            return value

        with read_by("global_step", read):
            yield names

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Enter around all runs: the trainer's counters belong to the batch, where it is split."""
        with ExitStack() as stack:
            for name in ("global_step", "current_epoch") if self.is_split else ():
                stack.enter_context(read_by(name, BatchNumber))
            yield

    @property
    def hooks(self) -> str:
        """What the names of its batch's hooks begin with: ``on_train_batch``."""
        return f"on_{self.name.replace('ing', '').removesuffix('_step')}_batch"

    @property
    def is_split(self) -> bool:
        """Whether a replica that this rank serves has several microbatches."""
        return any(len(parts) > 1 for parts in self.microbatches.values())

    def run(self, microbatch: Microbatch, index: int, place: tuple[Hashable, int] = (None, 0)) -> Any:
        """Call the user's method; return its result, with full tensors in place of sharded ones.

        Raises:
            RemoteParameterError: in the last stage, the result depends on values that only other ranks have.
        """
        weights = self.weights.of_replica
        weight = weights[index] if index < len(weights) else microbatch.samples  # of another replica
        self._capture.begin_microbatch(index, weight, microbatch.samples)
        batch, copies = self._batch(microbatch), list[_BatchCopy]()
        if self._copies:
            batch = with_tensors(batch, lambda _, tensor: _copied(tensor, copies))
        try:
            watched = nullcontext() if self._watch is None else self._watch(replace(microbatch, batch=batch))
            with watched, self._settings.run(), self._draws.run(place, counts=not self._repeats):
                result = unsharded(getattr(self._module, self.name)(batch, *self._arguments))
        except StopIteration as error:  # Lightning would take it for the end of the data, on this rank only
            raise RuntimeError(f"{self.name} raised StopIteration") from error
        finally:
            written = [batch_copy for batch_copy in copies if batch_copy.copy._version != batch_copy.version]
            self.writes |= bool(written)
            self._written |= {id(batch_copy.tensor): batch_copy for batch_copy in written if not self.is_split}
        return _settled(result, f"what {self.name} returns")

    def write_back(self) -> None:
        """Write to a batch that is not split what the step has written to copies: hooks and closures see it."""
        with torch.no_grad():
            for batch_copy in self._written.values():
                batch_copy.tensor.copy_(batch_copy.copy)

    def _batch(self, microbatch: Microbatch) -> Any:
        """The batch of a microbatch as it was before an earlier stage of this rank took something out of it."""
        if id(microbatch) not in self._unchanged:
            self._unchanged[id(microbatch)] = copied(microbatch.batch)
            return microbatch.batch
        return copied(self._unchanged[id(microbatch)])

    def finish(self, result: Any, index: int) -> Tensor | None:
        """Keep `result`."""
        self.results[index] = detached(result)
        self._mark(index)
        return None

    def _mark(self, index: int) -> None:
        self.ended.append(index)
        self._settings.end()
        if self.kept_values is not None and self.is_split:
            self.kept_values.mark()

    @contextmanager
    def uncounted(self, *, repeats: bool = False) -> Iterator[None]:
        """Enter around a run whose metric updates and logs are dropped.

        Args:
            repeats: whether a stage runs once more, and somebody puts random states back.
        """
        before, self._repeats = self._repeats, self._repeats or repeats
        try:
            with self._metrics.discarded(), self._capture.discarded(), ExitStack() as stack:
                stack.callback(KeptValues(self._module).restore)
                yield
        finally:
            self._repeats = before


class TrainingStep(UserStep):
    """A `Step` that runs ``training_step``.

    Args:
        scale: multiplies a loss as the precision plugin does before backward.
        args: as for `UserStep`.
        kwargs: as for `UserStep`.

    Attributes:
        losses: of the last stage, by index of the microbatch, without a graph.
        has_graph: whether any of them had one.
        skipped: the microbatches for which the step returned None.
        backwards: refuses those that the step calls itself.
    """

    trains = True

    def __init__(self, *args: Any, scale: Callable[[Tensor], Tensor], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backwards = StepBackwards()
        self.losses: dict[int, Tensor] = {}
        self.has_graph = False
        self.skipped: set[int] = set()
        self._scale = scale

    def run(self, microbatch: Microbatch, index: int, place: tuple[Hashable, int] = (None, 0)) -> Any:
        """Call the user's method, in which backwards are refused."""
        with self.backwards.begun():
            return super().run(microbatch, index, place)

    def finish(self, result: Any, index: int) -> Tensor:
        """Keep the loss and the other outputs; return the loss, scaled and weighted, for the backward.

        Raises:
            ConfigError: `result` holds no loss.
        """
        self._mark(index)
        if result is None:
            self.skipped.add(index)
            self.results[index] = None
            self.losses[index] = torch.zeros((), device=self._module.device)
            return self.losses[index]
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            rule = "A training step returns its loss"
            fix = "Return a tensor, or a dict with a tensor under 'loss', or None to skip the batch on all ranks"
            raise ConfigError("training_step", type(loss).__name__, rule, fix)
        self.losses[index] = loss.detach()
        outputs = {k: detached(v) for k, v in result.items() if k != "loss"} if isinstance(result, Mapping) else None
        self.results[index] = outputs
        self.has_graph |= loss.requires_grad
        share = self.weights.share(index)
        # a mean over no tokens is NaN, and so would be its gradients, which no weight of 0 takes away
        return self._scale(loss * share) if share else loss.new_zeros(loss.shape)


class _BatchCopy(NamedTuple):
    """A tensor of a batch, and the copy that a step gets, with the version of the copy before the step."""

    tensor: Tensor
    copy: Tensor
    version: int


def _copied(tensor: Tensor, copies: list[_BatchCopy]) -> Tensor:
    with writes_counted():
        copy = tensor.clone()
    copies.append(_BatchCopy(tensor, copy, copy._version))
    return copy


def _settled(tree: Any, use: str) -> Any:
    packer = Packer(crosses=False)
    try:
        packer.describe(tree)
    except ValueError:  # objects of the user's own
        return tree
    if not any(is_remote(tensor) for tensor in packer.tensors):
        return tree
    return map_tensors(tree, lambda tensor: settled(tensor, use))


def _structure(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.dim(), batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, _structure(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return tuple(_structure(value) for value in batch)
    return type(batch)
