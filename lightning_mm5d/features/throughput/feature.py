"""`ModalityThroughput`: throughput, MFU and HFU of a training run, for the whole of it and for each modality.

Phases of a run, on each rank:

1. A training step whose batch has shapes that none had before runs under a `FlopCount`, which sees all that this rank
   computes. Later steps with batches of these shapes count as much; each of them is counted anew now and then, since
   masks and routed tokens vary, and what counts is the mean.
2. Where a step is logged, all ranks add up what they counted since the step logged before; collective.
3. The sums, over time and ranks, are logged.

Counting takes time. Of batches that all have shapes of their own, the first are counted and then one in a hundred;
others count by their elements as much as those that were counted.

**Lightning's monitor.** `ThroughputMonitor` counts samples, items and flops of all replicas once. The monitor
multiplies what rank 0 saw by the number of ranks. Here all ranks of a replica see the same batch, so three stages would
count three times the samples. Figures of the whole are those of rank 0 times the replicas, and those of a device are
the whole divided by the ranks: ``samples_per_sec``, ``items_per_sec``, ``flops_per_sec`` and ``mfu``.
``device/batches_per_sec`` stays what the loop of rank 0 does. ``flops_per_batch`` of the module is what a batch of one
replica takes, in forwards and backwards of the whole model; with unlike pipelines of rank 0's replica, of which others
take the shares that the layout gives them.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ThroughputMonitor
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data.microbatch import batch_samples, leaves
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course, Moment, Recorder, moment, seconds_between
from lightning_mm5d.features.throughput.device_peaks import peaks_of
from lightning_mm5d.features.throughput.flop_count import Copies, FlopCount
from lightning_mm5d.partition import Partition
from lightning_mm5d.partition.parts import is_in
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.sharded.torch_internals import in_backward
from lightning_mm5d.trainer.feature import Attached, Feature, Running

_ALWAYS, _SELDOM = 32, 100  # batches of new shapes that are counted in any case; one in so many later ones
_TABLES = ("_thw", "_sizes", "_lengths")  # fields whose values are sizes


class ModalityThroughput(Callback):
    """Logs throughput, MFU and HFU of training steps, of the run as a whole and of each modality.

    The figures of a modality have its name in front, as ``vision/device/mfu``; figures under ``device/`` are those of
    one device: the sum over the ranks of the modality, or of all, by their number. Every ``log_every_n_steps`` steps
    it logs the means since the figures before. The first batch of a run does not count, nor does validation.

    ============================================== ==================================================================
    ``samples_per_sec``                            samples of all replicas
    ``tokens_per_sec``                             tokens, padding included, that enter the first layer of a modality
    ``flops_per_sec``                              flops of the model, forwards and backwards
    ``device/mfu``                                 these by the peak of a device
    ``device/hfu``                                 the same, with what is computed again, or by several ranks
    ``device/bubble_share``                        share of the last step in which ranks wait for others
    ``device/exposed_communication_share``         share after the last backward, until optimizers step
    ============================================== ==================================================================

    ``samples_per_sec``, ``tokens_per_sec`` and ``flops_per_sec`` are there under ``device/``, too.

    Args:
        available_flops: peak of one device in flops per second, in the precision that trains. None takes that of
            `device_peaks`, or what Lightning knows of the device; without any there is no MFU and no HFU.
        prog_bar: whether the progress bar shows ``tokens_per_sec`` and ``device/mfu``.

    Raises:
        ConfigError: the peak is no positive number; or, when training starts, another strategy trains.
    """

    def __init__(self, *, available_flops: float | None = None, prog_bar: bool = False) -> None:
        super().__init__()
        is_number = isinstance(available_flops, (int, float)) and not isinstance(available_flops, bool)
        if available_flops is not None and not (is_number and 0 < available_flops < math.inf):
            rule = "It is the peak of a device in flops per second, above 0"
            raise ConfigError("available_flops", available_flops, rule, "Use for instance 989e12")
        self.available_flops, self.prog_bar = available_flops, prog_bar
        self.figures: ThroughputFigures | None = None
        self._peak = available_flops

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and self.available_flops is None:
            self._peak = _peak(trainer, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.figures is None:
            rule = "It counts the steps of a MultimodalStrategy"
            fix = "Use strategy='mm5d', or Lightning's ThroughputMonitor"
            raise ConfigError("callbacks", type(self).__name__, rule, fix)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any) -> None:
        if self.figures is not None:
            self.figures.begin(batch)

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.figures is not None:
            self.figures.computed()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.figures is None:
            return
        self.figures.finish_batch()
        if not _is_logged(trainer) or private(trainer.fit_loop, "_should_accumulate")():
            return
        for name, value in self.figures.gathered(self._peak).items():
            shown = self.prog_bar and name in ("tokens_per_sec", "device/mfu")
            pl_module.log(name, value, prog_bar=shown, on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.figures is not None:
            self.figures.since = time.perf_counter()


class ThroughputFigures(Attached, AroundSteps, AroundStep):
    """Counts the steps of a fit on one rank, and adds them up over ranks.

    Attributes:
        since: when the time began that counts for the next batch.
    """

    def __init__(self, running: Running, callback: ModalityThroughput) -> None:
        self.since = 0.0
        self._running, self._layout, self._partition = running, running.plan.layout, running.plan.partition
        self._ranks = {name: set[int]() for name in self._layout.modalities}
        for rank in range(self._layout.size):
            for place in self._layout.places_of(rank):
                self._ranks[place.modality].add(rank)
        self._served = [name for name, ranks in self._ranks.items() if running.rank in ranks]
        self._owners = _owners(running.module, self._partition)
        self._copies = _copies(running.module, running.plan)
        self._recorder = None if running.is_plain else Recorder(running.device, running.num_microbatches)
        self._recording: AroundStep | None = None  # the recorder, in a step that is logged
        running.engine.around.append(self)
        self._keys: dict[Hashable, int] = {}
        self._key: int | None = None  # of the batch: stands for shapes and what trains; None until its step begins
        self._times: Counter[int] = Counter()
        self._records: dict[tuple[int, Hashable], Counter[_Name]] = {}  # by key and calls of cached encoders
        self._structures = set[Hashable]()
        self._batches = self._measured = self._samples = self._elements = 0
        self._sums: Counter[_Name] | None = None  # None before the end of the first batch
        self._batch: Any = None
        self._actions: Sequence[Action] = ()
        self._count: FlopCount | None = None
        self._undo = ExitStack()  # what takes hooks away that count the step that runs
        self._tokens, self._calls = Counter[str](), Counter[str]()
        self._moments: list[Moment] = []  # at the begin of the last schedule, at its end, and before optimizers step
        cached = [name for name in self._served if running.plan.modalities[name].memory.cache_features is not None]
        for name in cached:
            self._hook(self.changes, name, self._calls, each=True)
        self.put_attribute(callback, "figures", self)

    @override
    def remove(self) -> None:
        self._close()
        super().remove()

    # --- phase 1 ---

    def begin(self, batch: Any) -> None:
        """A training batch begins, as hooks see it on this rank."""
        self._batch, self._key = batch, None
        self._calls.clear()
        if self._running.is_plain:
            self._open((batch,), self._running.steps.trainable(), batch_samples(batch) or 1)

    @override
    def step(self, course: Course) -> AroundStep | None:
        if not course.step.trains or self._key is not None:  # of a batch the first step counts: others are checks
            return None
        parts, self._actions = course.step.microbatches, course.actions
        samples = sum(part.samples for number in parts if self._leads(number) for part in parts[number])
        batches = [part.batch for number in sorted(parts) for part in parts[number]]
        self._open(batches, course.trainable, samples, course.step.structure)
        self._moments = [moment(self._running.device)]
        assert self._recorder is not None
        self._recording = self._recorder.step(course) if _is_logged(self._running.trainer) else None
        return self

    @override
    @contextmanager
    def unscheduled(self) -> Generator[None, None, None]:
        if self._running.trainer.training and self._key is None:
            leads = self._leads(self._layout.replicas_of_rank(self._running.rank)[0])
            samples = (batch_samples(self._batch) or 1) if leads else 0
            self._open((self._batch,), self._running.steps.trainable(), samples)
        yield
        self._close()

    @override
    def before(self, numbers: range) -> None:
        if self._count is not None:
            self._count.at(self._actions[numbers.start].stage.modality)

    @override
    def starts(self) -> None:
        if self._recording is not None:
            self._recording.starts()

    @override
    def after(self, numbers: range) -> None:
        if self._recording is not None:
            self._recording.after(numbers)

    @override
    def end(self) -> None:
        if self._recording is not None:
            self._recording.end()
        self._moments.append(moment(self._running.device))
        self._close()

    def computed(self) -> None:
        """Forwards and backwards of a batch have run, and their gradients are there."""
        self._close()
        if len(self._moments) == 2:
            self._moments.append(moment(self._running.device))

    def finish_batch(self) -> None:
        """A training batch has ended: add what it took."""
        self.computed()
        now, before = time.perf_counter(), self.since
        self._batch, self.since, self._batches = None, now, self._batches + 1
        if self._sums is None or self._key is None:
            self._sums = Counter()
            return
        calls = _calls(self._calls)
        record = self._records.get((self._key, calls))
        if record is None:  # estimated, and counted when it comes again
            self._times[self._key] = 0
            like = [record for (_, others), record in self._records.items() if others == calls]
            record = sum(like or self._records.values(), Counter[_Name]())
            share = self._elements / record[_ELEMENTS] if record else 0.0
        else:
            share = 1 / record[_NUMBER]
        if record:
            self._sums.update({name: value * share for name, value in record.items()})
            self._sums.update({_SAMPLES: self._samples, _SECONDS: now - before})

    def _leads(self, replica: int) -> bool:
        return min(self._layout.replica_ranks(replica)) == self._running.rank

    def _open(
        self, batches: Any, trainable: Hashable, samples: int, structure: Callable[[Any], Hashable] | None = None
    ) -> None:
        """Begin a step with these batches; count its flops where this is due.

        The first step of each structure does not only compute: it finds out what a stage needs of others.
        """
        shapes, self._elements = _shapes(batches)
        key = self._key = self._keys.setdefault((shapes, trainable), len(self._keys))
        self._samples = samples
        is_due = self._times[key] % _SELDOM == 0 and self._measured < _ALWAYS + self._batches // _SELDOM
        self._times[key] += 1
        new = {structure(batch) for batch in batches} - self._structures if is_due and structure is not None else set()
        self._structures |= new
        if new:
            self._times[key] = 0
        if not is_due or new:
            return
        self._measured += 1
        self._tokens.clear()
        if (beside := self._running.engine.beside) is not None:
            # copies run in other threads, where nothing counts; ranks that share experts agree, and may not count
            applies = beside.applies
            self._undo.callback(put(beside, "applies", lambda *of, known: applies(*of, known=False)))
        for name in self._served:
            self._hook(self._undo, name, self._tokens, each=False)
        self._count = FlopCount(self._running.module, self._owners, self._copies, self._partition.loss_modality)
        self._count.begin()

    def _close(self) -> None:
        """Keep what was counted, if anything was."""
        count, self._count = self._count, None
        if count is None:
            return
        count.end()
        self._undo.close()
        assert self._key is not None
        record = self._records.setdefault((self._key, _calls(self._calls)), Counter())
        record.update({_NUMBER: 1, _ELEMENTS: self._elements})
        for kind, values in (("flops", count.flops), ("again", count.again), ("tokens", self._tokens)):
            record.update({(kind, name): value for name, value in values.items()})

    def _hook(self, until: ExitStack, name: str, into: Counter[str], *, each: bool) -> None:
        """Count calls of a modality's first layer, or the tokens that enter it, where this rank computes it."""
        stage = self._running.plan.topology.stage_of[self._partition.stages[name][0].name]
        paths, sizes = self._partition.parts[name].paths, self._layout.sizes(name)
        if not paths or self._running.rank not in self._running.plan.topology.ranks_of(stage):
            return

        def hook(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            if in_backward() or self._running.engine.stage() not in (None, stage):
                return
            given = [*args, *kwargs.values()]
            hidden = next((x for x in given if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1), None)
            if hidden is not None:  # of all tokens, on each of the ranks that share them
                into[name] += 1 if each else hidden.shape[:-1].numel() / (sizes.tp * sizes.cp)  # type: ignore[assignment]

        layer = self._running.module.get_submodule(paths[0])
        until.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)

    # --- phases 2 and 3 ---

    def gathered(self, peak: float | None) -> dict[str, float]:
        """Return the figures since the last call, of all ranks; collective.

        Args:
            peak: flops per second of a device; None where it is not known.
        """
        sums, self._sums = self._sums or Counter(), Counter()
        waits, names = self._shares(), list(self._ranks)
        local_sums = [sums[_SECONDS], sums[_SAMPLES], *waits]
        for name in names:
            local_sums += [sums[kind, name] for kind in ("flops", "again", "tokens")]
            local_sums += waits if name in self._served else (0.0, 0.0)
        table = torch.tensor(local_sums, dtype=torch.float64, device=message_device(self._running.device))
        dist.all_reduce(table)
        seconds, samples, *waited = table[:4].tolist()
        rows = table[4:].view(len(names), 5)
        size = self._layout.size
        seconds /= size
        if not samples:  # after the first batch, which does not count
            return {}
        figures = {"samples_per_sec": samples / seconds, "device/samples_per_sec": samples / seconds / size}
        groups = {"": (size, [*rows[:, :3].sum(dim=0).tolist(), *waited])}
        if len(names) > 1:
            groups |= {
                f"{name}/": (len(self._ranks[name]), row.tolist()) for name, row in zip(names, rows, strict=True)
            }
        for prefix, (number, (flops, again, tokens, idle, exposed)) in groups.items():
            device = f"{prefix}device/"
            for name, value in (("tokens_per_sec", tokens / seconds), ("flops_per_sec", flops / seconds)):
                figures |= {f"{prefix}{name}": value, f"{device}{name}": value / number}
            if peak is not None:
                whole = seconds * number * peak
                figures |= {f"{device}mfu": flops / whole, f"{device}hfu": (flops + again) / whole}
            if self._recorder is not None:
                exposed_name = f"{device}exposed_communication_share"
                figures |= {f"{device}bubble_share": idle / number, exposed_name: exposed / number}
        return figures

    def _shares(self) -> tuple[float, float]:
        """Which shares of the last step this rank waited, and was busy with sums after its last action."""
        if self._recorder is None or self._recorder.trainable is None or len(self._moments) < 3:
            return 0.0, 0.0
        idle = self._recorder.shares()[1]  # waits for the device
        computing, after = seconds_between(*self._moments[:2]), seconds_between(*self._moments[1:])
        return idle * computing / (computing + after), after / (computing + after)


_Name = tuple[str, str]
_NUMBER, _ELEMENTS, _SAMPLES, _SECONDS = (("", name) for name in ("number", "elements", "samples", "seconds"))


def _calls(calls: Counter[str]) -> Hashable:
    return tuple(sorted(calls.items()))


def _is_logged(trainer: pl.Trainer) -> bool:
    """Whether Lightning logs the step that the running batch belongs to; equal on all ranks."""
    stepped: int = private(trainer.fit_loop.epoch_loop, "_batches_that_stepped") + 1
    every: int = vars(trainer)["log_every_n_steps"]
    return every > 0 and stepped % every == 0


def _shapes(batches: Any) -> tuple[Hashable, int]:
    """What the flops of a step depend on: shapes, and values of tables of sizes that are on the host; and elements."""
    shapes: list[Hashable] = []
    elements = 0
    for path, value in leaves(batches):
        if isinstance(value, Tensor):
            elements += value.numel()
            is_table = value.is_cpu and str(path[-1]).endswith(_TABLES)
            shapes.append((path, tuple(value.shape), tuple(value.flatten().tolist()) if is_table else ()))
    return tuple(shapes), elements


def _owners(root: nn.Module, partition: Partition) -> dict[str, str]:
    """The modality of each module that belongs to one, without modules inside of these."""
    if not partition.encoders:
        return {}
    modalities: dict[str, set[str]] = defaultdict(set)
    for name, stages in partition.owners.items():
        while name:
            name = name.rpartition(".")[0]
            modalities[name] |= {stage.modality for stage in stages}
    owners: dict[str, str] = {}
    for path, _ in root.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in owners)
        if path and len(modalities[path]) == 1 and not is_inside:
            owners[path] = next(iter(modalities[path]))
    return owners


def _copies(root: nn.Module, plan: Plan) -> dict[str, Copies]:
    """Modules that tensor parallel ranks compute in full, where none shares a part of it, or of which some share rows.

    Ranks compute equal rows where they need the same heads of keys and values.
    """
    tp = {name: plan.layout.sizes(name).tp for name, config in plan.modalities.items() if config.tensor.tp_mode == "1d"}
    in_parts = {*plan.division.shards, *plan.division.shared}
    by_path: dict[str, Copies] = {}
    for path, module in root.named_modules() if max(tp.values(), default=1) > 1 else ():
        names = [f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters()]
        ranks = {tp.get(stage.modality, 1) for name in names for stage in plan.partition.owners.get(name, ())}
        is_shared = not in_parts.isdisjoint(names) or any(is_in(layer, path) for layer in plan.experts)
        shard = plan.division.shards.get(f"{path}.weight")
        if path and len(ranks) == 1 and ranks != {1} and shard is not None:
            by_path[path] = Copies(sum(shard.lengths) / shard.size, in_shards=True)
        elif path and len(ranks) == 1 and not is_shared:
            by_path[path] = Copies(ranks.pop())
    return {path: copies for path, copies in by_path.items() if copies.number > 1}


def _peak(trainer: pl.Trainer, module: pl.LightningModule) -> float | None:
    """Flops per second of a device in the precision that trains; None where nobody knows."""
    device = trainer.strategy.root_device
    in_16_bit = device.type == "cuda" and "16" in str(trainer.precision)
    if in_16_bit and (peaks := peaks_of(torch.cuda.get_device_name(device))):
        return peaks.flops
    monitor = ThroughputMonitor(batch_size_fn=len)
    monitor.setup(trainer, module, "fit")
    return monitor.available_flops


class ReplicaThroughput(Feature):
    """Has no field: a `ThroughputMonitor` or a `ModalityThroughput` among the callbacks asks for it."""

    def attach(self, running: Running) -> Attached:
        """Correct what the monitors of this run compute, and count for a `ModalityThroughput`."""
        layout, callbacks = running.plan.layout, vars(running.trainer)["callbacks"]
        monitors = [callback for callback in callbacks if isinstance(callback, ThroughputMonitor)]
        counted = [meter for monitor in monitors for meter in private(monitor, "_throughputs").values()]
        is_fit = running.trainer.state.fn == TrainerFn.FITTING
        others = [callback for callback in callbacks if isinstance(callback, ModalityThroughput) and is_fit]
        strategy: Any = running.trainer.strategy
        shares = layout.microbatches(strategy.num_microbatches or 1)
        share = sum(shares) / shares[layout.replicas_of_rank(0)[0]] / layout.size
        batches = layout.num_replicas / layout.size
        if share == batches == 1.0:
            counted = []
        attached = Attached()
        for meter in counted:
            attached.put_attribute(meter, "compute", _scaled(meter.compute, share, batches, meter.separator))
        for callback in others:
            attached.changes.callback(ThroughputFigures(running, callback).remove)
        return attached


def _scaled(
    compute: Callable[[], dict[str, float]], share: float, batches: float, separator: str
) -> Callable[[], dict[str, float]]:
    factors = {f"device{separator}batches_per_sec": 1.0, "batches_per_sec": batches}

    def scaled() -> dict[str, float]:
        return {
            name: value * factors.get(name, share) if name.endswith(("_per_sec", "mfu")) else value
            for name, value in compute().items()
        }

    return scaled


FEATURE = ReplicaThroughput
"""Throughput of Lightning's `ThroughputMonitor`."""
