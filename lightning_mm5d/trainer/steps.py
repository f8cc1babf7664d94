"""One Lightning step as a pipeline step: split the batch, run the schedule, merge and share the results.

Phases of a step, on every rank:

1. Split the batch of each replica that this rank serves into microbatches, and weigh them.
2. Execute the schedule; calls of ``self.log`` are captured.
3. Merge results and logs over microbatches, on the ranks where the step ends.
4. Share them within each replica.
5. Log them on every rank, and return what one process would have returned.

It knows the LightningModule and nothing of the trainer. `user_step.py` refuses training steps without a loss, and
`batch_parts.py` first batches that are too small to be split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError, RemoteParameterError
from lightning_mm5d.data.joining import Sizes, merge
from lightning_mm5d.data.loader import split_replicas
from lightning_mm5d.data.microbatch import Microbatch, batch_samples, counted
from lightning_mm5d.engine.engine import Ending, Engine
from lightning_mm5d.gradients.gradients import Gradients, published, set_aside, skipped, unfrozen
from lightning_mm5d.gradients.reduction import REQUIRES_GRAD
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.data_accesses import refused_writes
from lightning_mm5d.sharded.remote_value import plain
from lightning_mm5d.source.loops import appended_by_data
from lightning_mm5d.stage import StageError
from lightning_mm5d.tensor_parallel.apply import explained
from lightning_mm5d.trainer.batch_parts import BatchParts
from lightning_mm5d.trainer.kept_values import KeptValues
from lightning_mm5d.trainer.logs import LogCapture, replay
from lightning_mm5d.trainer.metrics import MetricSync
from lightning_mm5d.trainer.optimization import Summing
from lightning_mm5d.trainer.turns import position
from lightning_mm5d.trainer.user_step import (
    BatchDraws,
    Context,
    OptimizerSettings,
    ResultChannel,
    StepResult,
    TrainingStep,
    UserStep,
    Watch,
    Weights,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

Parts = Mapping[int, list[Microbatch]]
_ROUNDED = 0.01  # how much a factor may differ from 1 by the dtype of a loss


@dataclasses.dataclass(frozen=True)
class Replica:
    """One replica of the loss modality, among the ranks that work for it.

    Attributes:
        src: the rank where its step ends; the first of several that share the last stage.
        ends_here: whether this rank is one of these.
        results: shares results among all its ranks.
    """

    src: int
    ends_here: bool
    results: ResultChannel


class Unscheduled(Protocol):
    """Runs steps that no schedule can run, of all ranks of a replica at once."""

    def walks(self, name: str) -> bool:
        """Whether no schedule can run the evaluation `name`, as far as it is known before it is tried."""

    def attempt(self, metrics: MetricSync, values: KeptValues) -> Callable[[], None]:
        """Return what undoes an evaluation that a schedule has tried."""

    def execute(self, step: UserStep, *, optimizes: bool = False) -> None:
        """Run all microbatches of a step, which may run backwards and optimizers itself."""


class Casting(Protocol):
    """Keeps copies of weights in another dtype over the microbatches of a training step."""

    def step(self) -> AbstractContextManager[None]:
        """Return what is entered around a step."""

    def entered(self, context: Context, way: Callable[[], Hashable]) -> AbstractContextManager[None]:
        """Return what enters `context` around a microbatch that takes the `way` through the model."""


class FirstBatch(NamedTuple):
    """The first batch of a run for a step, which has run on it.

    Attributes:
        name: of the step.
        batch: as the dataloader gave it.
        parts: its microbatches, of each replica that this rank serves.
        arguments: of the step after the batch.
        weights: of the microbatches.
        options: of `UserStep`.
        counts: whether a schedule ran it, and training did not skip the batch.
        is_gathered: whether parameters are gathered within a step.
    """

    name: str
    batch: Any
    parts: Parts
    arguments: Sequence[Any]
    weights: Weights
    options: dict[str, Any]
    counts: bool
    is_gathered: bool


class FirstWatch(Protocol):
    """Looks at the first batch of a run; all of it is collective."""

    def stepped(self, first: FirstBatch) -> None:
        """The step, of training or evaluation, has ended well on all ranks."""


class Steps:
    """Runs the steps of a LightningModule.

    Args:
        module: the user's module.
        plan: all stages.
        engine: executes schedules on this rank.
        gradients: of the parameters that this rank holds.
        replicas: those that this rank serves, by number.
        metrics: the module's metrics, which must not communicate inside a schedule.
        rank: global rank.
        device: where results are.
        loss_group: the ranks where steps end; None where there is one.
        loss_host: the same, with messages in host memory.
        batch_parts: splits batches, and weighs their parts.
        seed: for random state, the same on all ranks and in all stages; None leaves it alone.

    Attributes:
        writes: whether steps that end here write files for all ranks.
        unscheduled: runs steps that no schedule can run; None where nothing does.
        first: looks at the first batch of a run; None where nothing does.
        compares: whether ranks that share last layers compare what their steps give.
        casting: lets microbatches share copies of weights; None where each casts for itself.
        watch: returns for the name of a step and its microbatches what is entered around each run; None for nothing.
        batch_parts: splits batches, and weighs their parts.
    """

    def __init__(
        self,
        module: LightningModule,
        plan: Plan,
        engine: Engine,
        gradients: Gradients,
        replicas: Mapping[int, Replica],
        metrics: MetricSync,
        *,
        rank: int,
        device: torch.device,
        loss_group: dist.ProcessGroup | None,
        loss_host: dist.ProcessGroup | None,
        batch_parts: BatchParts,
        seed: int | None,
    ) -> None:
        self._module, self._plan, self._engine, self._gradients = module, plan, engine, gradients
        self._replicas, self._metrics, self._rank, self._device = replicas, metrics, rank, device
        self._loss_group, self._loss_host, self.batch_parts, self._seed = loss_group, loss_host, batch_parts, seed
        self.unscheduled: Unscheduled | None = None
        self.first: FirstWatch | None = None
        self.compares = True
        self._unchecked: Callable[[], None] | None = None  # the comparison of the step before
        self.casting: Casting | None = None
        self.watch: Callable[[str, Parts], Watch | None] | None = None
        self._several = dict[str, set[int]]()
        last = plan.topology.instances(plan.topology.last_stage)
        self._is_shared = any(len(ranks) > 1 for ranks in last)
        self._num_replicas = plan.layout.num_replicas
        self._capture = LogCapture(module)
        self._tokens: dict[str, bool] = {}  # whether they count, by step
        self._writing: dict[str, bool] = {}  # whether it writes to its batch in place, by step
        self._has_trained = self._is_second = False
        self._own_replica = next((number for number, replica in replicas.items() if replica.ends_here), None)
        self.writes = self._own_replica == 0 and replicas[0].src == rank
        self._evaluated = set[Hashable]()  # evaluation steps and dataloaders whose first batch was looked at
        self._joined = dict[str, set[str]]()  # by step whose results were joined: lists of samples in these
        self._named = list(module.named_parameters(remove_duplicate=False))
        self._parameters = [parameter for _, parameter in self._named]
        shared, ownership = plan.division.shared, plan.ownership
        parts = ((name, p) for name, p in self._named if name in shared or ownership.cp_degree(name, rank) > 1)
        self._partial = {id(parameter): name for name, parameter in parts}
        self._apart = appended_by_data(type(module))
        self._trainable: tuple[tuple[bool, ...], frozenset[str]] = ((), frozenset())

    def trainable(self) -> frozenset[str]:
        """Return the names of the parameters that require a gradient now."""
        with plain():
            flags = tuple(map(REQUIRES_GRAD, self._parameters))
        if flags != self._trainable[0]:
            names = (name for (name, _), flag in zip(self._named, flags, strict=True) if flag)
            self._trainable = flags, frozenset(names)
        return self._trainable[1]

    def train(
        self, arguments: Sequence[Any], context: Context, scale: Callable[[Tensor], Tensor], summing: Summing
    ) -> Any:
        """Run `training_step` and its backward; return its output with a loss whose backward publishes gradients.

        Args:
            arguments: of the step: the batch as the dataloader gave it, and what Lightning passes after it.
            context: entered around each microbatch's forward.
            scale: multiplies a loss as the precision plugin does before backward.
            summing: when gradients are summed over ranks.
        """
        is_gathered, plain_context = self._is_gathered(), context
        casting = None if is_gathered else self.casting

        def way() -> Hashable:
            return self._way(step)

        if casting is not None:
            context = partial(casting.entered, context, way)
        batch, *arguments = arguments
        # a resumed run may begin with the last batch of an epoch
        is_first = not self._has_trained and self._module.global_step == 0
        parts = self._split(batch, is_first=is_first)
        first = self.first if is_first or self._is_second else None
        self._has_trained, self._is_second = True, is_first
        share = summing.share or 1.0

        def scaled(loss: Tensor) -> Tensor:
            return scale(loss) if share == 1.0 else scale(loss) * share

        weights, options = self._weights(parts, "training_step"), self._options(context, "training_step", parts)
        step = TrainingStep(self._module, "training_step", arguments, parts, weights, scale=scaled, **options)
        older = None if summing.continues else self._gradients.take()
        self._gradients.lay()
        reduction = self._gradients.reduction(whole=summing.is_early, rows=True)
        rows: dict[int, Tensor] = {}
        step.kept_values = values = KeptValues(self._module, self._apart)
        try:
            shows_copies = is_gathered or self._plan.main_params is not None
            watched: AbstractContextManager[None] = refused_writes(self._named) if shows_copies else nullcontext()
            if not shows_copies and casting is not None:
                watched = casting.step()
            with set_aside(self._gradients.parameters), watched, step.backwards.refused(self._partial):
                trainable = self.trainable()
                self.run(step, trainable, reduction.ending)
                self._check_unfrozen(trainable)
            rows = self._gradients.finish(reduction)
        finally:
            self._gradients.leave()
            fresh = [
                rows.get(id(p), gradient)
                for p, gradient in zip(self._gradients.parameters, self._gradients.take(), strict=True)
            ]
            if older is not None:
                self._gradients.put(older)
        merged = None
        if self._own_replica is not None:
            loss, has_graph = self._mean_loss(step)
            of_batch = options["settings"].of_batch
            merged = dataclasses.replace(self._merged(step, loss, values), has_graph=has_graph, settings=of_batch)
        result = self._shown(self._share(parts, merged), values)
        self._check_written(result, step)
        if not result.has_graph:
            rule = "No microbatch's loss has a gradient, so that nothing would be trained"
            fix = "Return a loss that depends on a trainable parameter; frozen ones, `detach` and `no_grad` cut it off"
            raise ConfigError("training_step", "a loss that does not require grad", rule, fix)
        if first is not None:
            options |= {"watch": None, "context": plain_context}
            has_loss = result.loss is not None
            first.stepped(FirstBatch("training_step", batch, parts, arguments, weights, options, has_loss, is_gathered))
        options["settings"].apply(result.settings)
        factor = 1.0 / scaled(torch.ones((), device=self._device))

        def publish(gradient: Tensor, retains_graph: bool) -> None:
            summing.check(value := gradient * factor)
            # what is added may become a parameter's gradient
            copies = [new.clone() if retains_graph and new is not None else None for new in fresh]
            self._gradients.add(fresh, _factor(value, summing))
            fresh[:] = copies

        if result.loss is None:  # a skipped batch; what others of its accumulation gave is published
            return skipped(self._device, publish)
        loss = published(result.loss.to(self._device), publish)
        outputs = _by_name(result.outputs)
        return loss if outputs is None else {**outputs, "loss": loss}

    def _way(self, step: UserStep) -> Hashable:
        """Return what is equal for runs that take the same way through the model, as the one does that is beginning."""
        action = self._engine.action
        assert action is not None
        replica, index = divmod(action.microbatch, self._engine.count)
        return action.stage, step.structure(step.microbatches[replica][index].batch)

    def _check_written(self, result: StepResult, step: UserStep) -> None:
        """Refuse a step that wrote to what this rank holds where it ends, and here had ended before."""
        ownership = self._plan.ownership
        for name, count in result.weights_written.items():
            if count <= abs(step.weights_written.get(name, 0)):
                continue
            if name in self._plan.partition.owners and self._rank in ownership.ranks_holding(name):
                rule = "The step ends before that on a rank that holds it, with its layers"
                fix = f"Write in {step.hooks}_start or {step.hooks}_end, which all ranks run"
                raise ConfigError(step.name, f"a write to {name!r}", rule, fix)

    def _check_unfrozen(self, before: frozenset[str]) -> None:
        """Refuse a step that unfreezes parameters: stages run backwards for what is trained when a step begins."""
        new = self.trainable() - before if self._plan.topology.edges else ()
        for name in sorted(new)[:1]:
            raise unfrozen(name)

    def evaluate(self, name: str, arguments: Sequence[Any], context: Context) -> Any:
        """Run one of the other steps; return what it would have returned for the full batch, on every rank.

        Args:
            name: of the LightningModule's method.
            arguments: of the step, as for `train`.
            context: entered around each microbatch's forward.
        """
        batch, *arguments = arguments
        every = self._split(batch)
        parts = {number: part for number, part in every.items() if part}
        weights, options = self._weights(parts, name), self._options(context, name, parts)
        results: dict[int, StepResult] = {}
        walking, values = self._walking(name), KeptValues(self._module, self._apart)
        piped = {number: part for number, part in parts.items() if number not in walking}
        if piped:
            undo = None if self.unscheduled is None else self.unscheduled.attempt(self._metrics, values)
            step = UserStep(self._module, name, arguments, piped, weights, **options)
            step.kept_values = values
            step.forgives = (StageError, RemoteParameterError) if undo is not None and self._plan.topology.edges else ()
            self.run(step, frozenset())
            results = self._share(piped, self._merged(step, None, values) if self._own_replica in piped else None)
            failed = {number for number in piped if results[number].fails}
            for number in piped.keys() - failed:
                self._check_written(results[number], step)
            walking |= failed
            if undo is not None and failed and self._own_replica in (None, *failed):
                undo()
        walked = {number: part for number, part in parts.items() if number in walking}
        if walked:
            assert self.unscheduled is not None
            step = UserStep(self._module, name, arguments, walked, weights, **options)
            step.kept_values = values
            with self._capture.capture(), self._metrics.local(), self._engine.unscheduled(), step.counting():
                self.unscheduled.execute(step)
            results |= self._share(walked, self._merged(step, None, values) if self._own_replica in walked else None)
        outputs = self._shown(results, values).outputs
        # the number of its dataloader, and a sanity check, in which steps may do less
        kind = name, *arguments[1:], self._module.trainer.sanity_checking
        # replicas may have unequal numbers of batches to predict, and one of them none
        is_everywhere = name != "predict_step" or self._num_replicas == 1
        if self.first is not None and is_everywhere and kind not in self._evaluated:
            self._evaluated.add(kind)
            options |= {"watch": None}
            is_gathered = self._is_gathered()
            self.first.stepped(FirstBatch(name, batch, every, arguments, weights, options, not walking, is_gathered))
        return outputs

    def optimize(self, arguments: Sequence[Any], context: Context) -> Any:
        """Run a `training_step` with backwards and optimizers of its own, for the full batch; return its result.

        Args:
            arguments: of the step, as for `train`.
            context: entered around its forward.
        """
        if self.unscheduled is None:
            rule = "The step runs backwards of its own, and this installation comes without what runs them over ranks"
            raise ConfigError("automatic_optimization", False, rule, "Use automatic optimization, or the whole package")
        batch, *arguments = arguments
        parts = {number: [counted(batch, batch_samples(batch))] for number in self._replicas}
        weights = Weights() if self._own_replica is None else Weights((1.0,), float(self._num_replicas))
        values = KeptValues(self._module, self._apart)
        options = self._options(context, "training_step", parts)
        step = UserStep(self._module, "training_step", arguments, parts, weights, **options)
        with self._capture.capture(), self._metrics.local(), self._engine.unscheduled():
            self.unscheduled.execute(step, optimizes=True)
        merged = None if self._own_replica is None else self._merged(step, None, values)
        return self._shown(self._share(parts, merged), values).outputs

    # --- phase 1 ---

    def _is_gathered(self) -> bool:
        """Whether parameters are gathered within a step, and may be NaN where only shapes are asked for."""
        return any(shared.rests_own for shared in self._gradients.shared.all)

    def _split(self, batch: Any, *, is_first: bool = False) -> dict[int, list[Microbatch]]:
        batches = split_replicas(batch, len(self._replicas))
        return {
            number: [] if replica_batch is None else self.batch_parts.split(replica_batch, is_first=is_first)
            for number, replica_batch in zip(self._replicas, batches, strict=True)
        }

    def _weights(self, parts: Parts, name: str) -> Weights:
        """Weigh the microbatches of this rank's own replica for a step; a sum over all replicas gives the total.

        Predictions need no weights, and replicas may have unequal numbers of batches to predict.
        """
        if name == "predict_step":
            return Weights()
        deals = name == "training_step" and self.batch_parts.deals
        weighing, tokens = self.batch_parts.of_step(name), self._counts_tokens(parts, name)
        for microbatches in parts.values():
            weighing.check(microbatches, tokens=tokens, deals=deals)
        if self._own_replica is None or self._own_replica not in parts:
            return Weights()
        local = weighing.weights(parts[self._own_replica], tokens=tokens)
        if weighing.counts_samples and not tokens and not deals:
            return Weights(local, sum(local) * self._num_replicas)
        samples = sum(part.samples for part in parts[self._own_replica])
        totals = torch.tensor([sum(local), samples], dtype=torch.float64)  # the host waits for no device that computes
        if self._loss_host is not None:
            dist.all_reduce(totals, group=self._loss_host)
        total, everywhere = totals.tolist()
        return Weights(local, total, everywhere if deals else None)

    def _counts_tokens(self, parts: Parts, name: str) -> bool:
        """Whether label tokens weigh microbatches of a step, which its first batches tell all ranks where steps end."""
        weighing = self.batch_parts.of_step(name)
        if not weighing.is_auto:
            return not weighing.counts_samples
        if name not in self._tokens:
            sure = torch.tensor([all(map(weighing.has_labels, parts.values()))], device=self._device).int()
            if self._own_replica in parts and self._loss_group is not None:
                dist.all_reduce(sure, dist.ReduceOp.MIN, group=self._loss_group)
            self._tokens[name] = bool(sure)
        return self._tokens[name]

    # --- phase 2 ---

    def _options(self, context: Context, name: str, parts: Parts) -> dict[str, Any]:
        # counted by the loop, and so after a resume too: a step need not take the index, and accumulates at one
        # `global_step`
        index = position(self._module.trainer).get("batch", 0)
        apart = () if name == "training_step" else (name,)
        key = None if self._seed is None else (self._seed, self._module.current_epoch, index, *apart)
        options = {"context": context, "capture": self._capture, "metrics": self._metrics, "random_key": key}
        options["draws"] = BatchDraws(self._module, key)
        options["settings"] = OptimizerSettings(self._module, name)
        options |= {"watch": None if self.watch is None else self.watch(name, parts)}
        return {**options, "copies": self._writing.get(name, True)}

    def run(self, step: UserStep, trainable: frozenset[str], ending: Ending | None = None) -> None:
        """Run a step on its microbatches by the schedule; capture what it logs, and note whether it writes files.

        Args:
            step: whose results are kept by itself.
            trainable: names of modalities with parameters that train.
            ending: what ends the step's sums; None for steps without gradients.
        """
        with (
            self._capture.capture() as joined,
            self._metrics.local(joined if step.is_split else None, meets=self.batch_parts.is_whole),
            step.counting(),
        ):
            try:
                self._engine.execute(step, trainable, ending)
            except RuntimeError as error:
                shares = any(axes.tp * axes.cp > 1 for axes in self._plan.layout.axes.values())
                if (explanation := explained(error, self._module, self._plan.division, shares=shares)) is not None:
                    raise explanation from error
                raise
        step.write_back()
        self._writing[step.name] = self._writing.get(step.name, False) or step.writes

    def _walking(self, name: str) -> set[int]:
        """The replicas for which all ranks run an evaluation in lock step."""
        if name not in self._several:
            several = self.unscheduled is not None and self.unscheduled.walks(name)
            self._several[name] = set(self._replicas) if several else set()
        return self._several[name]

    # --- phases 3 to 5 ---

    def _mean_loss(self, step: TrainingStep) -> tuple[Tensor | None, bool]:
        """Return the mean loss of this rank's replica, and whether any replica's loss has a gradient.

        A replica of weight 0 has no mean of its own, and gets that of all replicas. None where all skip the batch.

        Raises:
            ConfigError: the step skipped some microbatches only.
        """
        losses, weights = [step.losses[index] for index in sorted(step.losses)], step.weights
        local, weight = weights.weighted_sum(losses), sum(weights.of_replica)
        counts = len(losses) - len(step.skipped), len(step.skipped)
        everywhere = torch.stack([local, *(local.new_full((), float(count)) for count in (step.has_graph, *counts))])
        if self._loss_group is not None:
            dist.all_reduce(everywhere, group=self._loss_group)
        total, with_graph, with_loss, without = everywhere
        if step.skipped:  # another rank with losses alone goes on, until this one ends the run
            if bool(with_loss):
                raise ConfigError(
                    "training_step",
                    f"None for {int(without)} microbatches and a loss for {int(with_loss)} in one step of all replicas",
                    "A batch is skipped as a whole, on all ranks",
                    "Return None by what all microbatches and replicas know (batch_idx), or zero times a loss",
                )
            return None, True
        has_graph = step.has_graph or bool(with_graph)  # a device is asked only where the answer is not known
        return (local / weight if weight else total / weights.total).to(losses[0].dtype), has_graph

    def _merged(self, step: UserStep, loss: Tensor | None, values: KeptValues) -> StepResult:
        """Merge this replica's results and logs over its microbatches."""
        assert self._own_replica is not None
        if step.fails:
            return StepResult(fails=True)
        samples = Sizes.of(step.microbatches[self._own_replica], step.weights.of_replica)
        results = [step.results[index] for index in sorted(step.results)]
        outputs: Any = results  # of parts with unknown numbers of samples
        if all(result is None for result in results):
            outputs = None
        elif len(results) == 1 or all(part.is_counted for part in step.microbatches[self._own_replica]):
            is_first = step.name not in self._joined
            outputs = merge(results, samples, reads=is_first, lists=self._joined.setdefault(step.name, set()))
        weight = sum(step.weights.of_replica)
        # replicas count by their samples in a synced mean, and the value must count by its weight
        total = step.weights.total
        factor = weight * self._num_replicas / total if total else 1.0
        logs = [
            log.weighted(sum(samples), factor, step.weights.samples) if log.batch_size == weight else log
            for log in self._capture.merge(step.name)
        ]
        if len(samples) > 1 and step.ended == [*range(len(samples))]:
            values.join(samples)
        stops, written = self._module.trainer.should_stop, dict(sorted(step.weights_written.items()))
        return StepResult(loss, outputs, logs, module_changes=values.changes(), stops=stops, weights_written=written)

    def _share(self, numbers: Iterable[int], merged: StepResult | None) -> dict[int, StepResult]:
        """Share results within each of some replicas; `merged` is that of this rank's own."""
        results: dict[int, StepResult] = {}
        for number in numbers:
            is_source = number == self._own_replica and self._replicas[number].src == self._rank
            results[number] = self._replicas[number].results.share(merged if is_source else None)
            if self.compares and merged is not None and number == self._own_replica and not is_source:
                check = merged.check_equal(results[number])
                before, self._unchecked = self._unchecked, check if self._device.type == "cuda" else None
                (before or check)()  # on a GPU that of the step before, for which the host does not wait
        return results

    def _shown(self, results: Mapping[int, StepResult], values: KeptValues) -> StepResult:
        """Log and return the result of the replica that this rank shows."""
        shown = self._own_replica if self._own_replica is not None else next(iter(results))
        if shown not in results:  # in prediction, where other replicas have one batch more
            values.restore()
            return StepResult()
        # where the step ended, too, where values were sharded over several ranks: only all of these could read them
        if self._own_replica is None or (results[shown].module_changes and self._is_shared):
            values.adopt(results[shown].module_changes)
            self._module.trainer.should_stop |= results[shown].stops  # `self.trainer.should_stop = True` in the step
        # only now: with sync_dist a log is collective over all ranks, and others wait for the next replica's result
        replay(self._module, results[shown].logs)
        return results[shown]


def _by_name(outputs: Any) -> dict[str, Any] | None:
    """Return what training steps return beside the loss; None where that is the loss alone.

    What microbatches returned and cannot be joined has a list with one value for each of them.
    """
    if isinstance(outputs, list):
        by_microbatch = [output if isinstance(output, Mapping) else {} for output in outputs]
        names = dict.fromkeys(name for output in by_microbatch for name in output)
        outputs = {name: [output.get(name) for output in by_microbatch] for name in names}
    return dict(outputs) if isinstance(outputs, Mapping) else None


def _factor(value: Tensor, summing: Summing) -> Tensor | float:
    """Return what gradients are multiplied by at the backward.

    Args:
        value: what the backward gives, without what losses were multiplied by in the schedule.
        summing: says whether that should be all.

    Raises:
        ConfigError: it is not all, and gradients of earlier batches cannot be told apart any more.
    """
    if not value.is_cpu:  # a device is not waited for: what is not all shows as NaN
        other = torch.full_like(value, float("nan")) if summing.continues else value
        return value if summing.share is None else torch.where((value - 1.0).abs() < _ROUNDED, 1.0, other)
    if float(value) == 1.0 or (summing.share is not None and abs(float(value) - 1.0) < _ROUNDED):
        return 1.0
    if not summing.continues:
        return value
    rule = "Batches of one accumulation add their gradients in one place, so that Lightning's is the only factor"
    raise ConfigError("backward", f"a factor of the loss of {float(value)}", rule, "Scale the loss in training_step")
