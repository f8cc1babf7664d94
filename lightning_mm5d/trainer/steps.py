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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.batches import split_replicas
from lightning_mm5d.data.microbatch import Microbatch, merge
from lightning_mm5d.engine.engine import Ending, Engine
from lightning_mm5d.engine.kept_casts import CastingOnce
from lightning_mm5d.engine.lock_step import LockStep
from lightning_mm5d.gradients.gradients import Gradients
from lightning_mm5d.gradients.parameter_hooks import set_aside
from lightning_mm5d.gradients.publish import published
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.data_accesses import refused_writes
from lightning_mm5d.sharded.remote_value import plain
from lightning_mm5d.trainer.batch_parts import BatchParts
from lightning_mm5d.trainer.logs import LogCapture, replay
from lightning_mm5d.trainer.metrics import MetricSync
from lightning_mm5d.trainer.optimization import Summing
from lightning_mm5d.trainer.several_passes import Attempt, passes_several_times
from lightning_mm5d.trainer.step_result import ResultChannel, StepResult, Weights
from lightning_mm5d.trainer.unread import UnreadTensors
from lightning_mm5d.trainer.user_step import Context, TrainingStep, UserStep

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


class Steps:
    """Runs the steps of a LightningModule.

    Args:
        module: the user's module.
        plan: all stages.
        engine: executes schedules on this rank.
        lock_step: runs evaluations that pass several times through the model; None with one stage.
        gradients: of the parameters that this rank holds.
        replicas: those that this rank serves, by number.
        metrics: the module's metrics, which must not communicate inside a schedule.
        rank: global rank.
        device: where results are.
        loss_group: the ranks where steps end; None where there is one.
        batch_parts: splits batches, and weighs their parts.
        seed: for random state, the same on all ranks and in all stages; None leaves it alone.
        unread: learns which tensors of batches this rank does not read.
    """

    def __init__(
        self,
        module: LightningModule,
        plan: Plan,
        engine: Engine,
        lock_step: LockStep | None,
        gradients: Gradients,
        replicas: Mapping[int, Replica],
        metrics: MetricSync,
        *,
        rank: int,
        device: torch.device,
        loss_group: dist.ProcessGroup | None,
        batch_parts: BatchParts,
        seed: int | None,
        unread: UnreadTensors,
    ) -> None:
        self._module, self._plan, self._engine, self._gradients = module, plan, engine, gradients
        self._replicas, self._metrics, self._rank, self._device = replicas, metrics, rank, device
        self._loss_group, self._batch_parts, self._seed, self._unread = loss_group, batch_parts, seed, unread
        self._lock_step, self._several = lock_step, dict[str, set[int]]()
        self._capture = LogCapture(module)
        self._casting_once = CastingOnce(module, device)
        self._own = next((number for number, replica in replicas.items() if replica.ends_here), None)
        self._named = list(module.named_parameters(remove_duplicate=False))
        self._trainable: tuple[tuple[bool, ...], frozenset[str]] = ((), frozenset())

    def trainable(self) -> frozenset[str]:
        """Return the names of the parameters that require a gradient now."""
        with plain():
            flags = tuple(parameter.requires_grad for _, parameter in self._named)
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
        # parameters that are gathered in a step may be NaN where only shapes are asked for
        is_gathered = any(one.rests_own for one in self._gradients.shared.all)
        if not is_gathered:
            context = partial(self._casting_once.entered, context, self._engine.stage)
        batch, *arguments = arguments
        parts = self._split(batch, arguments)
        share = summing.share or 1.0

        def scaled(loss: Tensor) -> Tensor:
            return scale(loss) if share == 1.0 else scale(loss) * share

        step = TrainingStep(
            self._module,
            "training_step",
            arguments,
            parts,
            self._weights(parts, "training_step"),
            scale=scaled,
            **self._options(context, arguments, "training_step", parts),
        )
        older = None if summing.continues else self._gradients.take()
        self._gradients.lay()
        reduction = self._gradients.reduction(whole=summing.is_early, rows=True)
        rows: dict[int, Tensor] = {}
        try:
            shows_copies = is_gathered or self._plan.main_params is not None
            watched = refused_writes(self._named) if shows_copies else self._casting_once.step()
            with set_aside(self._gradients.parameters), watched:
                self._run(step, self.trainable(), reduction.ending)
            rows = self._gradients.finish(reduction)
            self._unread.learn(part for found in parts.values() for part in found)
        finally:
            self._gradients.leave()
            fresh = [
                rows.get(id(p), gradient)
                for p, gradient in zip(self._gradients.parameters, self._gradients.take(), strict=True)
            ]
            if older is not None:
                self._gradients.put(older)
        merged = None
        if self._own is not None:
            loss, has_graph = self._mean_loss(step)
            merged = dataclasses.replace(self._merged(step, loss), has_graph=has_graph)
        result = self._shown(self._share(parts, merged))
        assert result.loss is not None
        if not result.has_graph:
            raise ConfigError(
                "training_step",
                "a loss that does not require grad",
                "No microbatch's loss has a gradient, so that nothing would be trained",
                "Return a loss that depends on a trainable parameter; frozen ones, `detach` and `no_grad` cut it off",
            )
        factor = 1.0 / scaled(torch.ones((), device=self._device))

        def publish(gradient: Tensor) -> None:
            value = gradient * factor
            summing.check(value)
            self._gradients.add(fresh, _factor(value, summing))
            fresh[:] = [None] * len(fresh)

        loss = published(result.loss.to(self._device), publish)
        outputs = _by_name(result.outputs)
        return loss if outputs is None else {**outputs, "loss": loss}

    def evaluate(self, name: str, arguments: Sequence[Any], context: Context) -> Any:
        """Run one of the other steps; return what it would have returned for the full batch, on every rank.

        Args:
            name: of the LightningModule's method.
            arguments: of the step, as for `train`.
            context: entered around each microbatch's forward.
        """
        batch, *arguments = arguments
        parts = {number: part for number, part in self._split(batch, arguments).items() if part}
        weights, options = self._weights(parts, name), self._options(context, arguments, name, parts)
        results: dict[int, StepResult] = {}
        walking = self._walking(name)
        piped = {number: part for number, part in parts.items() if number not in walking}
        if piped:
            before = None if self._lock_step is None else Attempt(self._module, self._metrics)
            step = UserStep(self._module, name, arguments, piped, weights, **options)
            self._run(step, frozenset())
            results = self._share(piped, self._merged(step, None) if self._own in piped else None)
            failed = {number for number in piped if results[number].fails}
            walking |= failed
            if before is not None and failed and self._own in (None, *failed):
                before.undo()
        walked = {number: part for number, part in parts.items() if number in walking}
        if walked:
            assert self._lock_step is not None
            step = UserStep(self._module, name, arguments, walked, weights, **options)
            with self._capture.capture(), self._metrics.local(), self._engine.offload.present():
                self._lock_step.execute(step)
            results |= self._share(walked, self._merged(step, None) if self._own in walked else None)
        return self._shown(results).outputs

    # --- phase 1 ---

    def _split(self, batch: Any, arguments: Sequence[Any]) -> dict[int, list[Microbatch]]:
        batches = split_replicas(batch, len(self._replicas))
        module = self._module
        started = module.current_epoch, module.global_step, *arguments[:1]
        is_first = module.training and started == (0, 0, 0)
        return {
            number: [] if one is None else self._batch_parts.split(one, is_first=is_first)
            for number, one in zip(self._replicas, batches, strict=True)
        }

    def _weights(self, parts: Parts, name: str) -> Weights:
        """Weigh the microbatches of this rank's own replica for a step; a sum over all replicas gives the total.

        Predictions need no weights, and replicas may have unequal numbers of batches to predict.
        """
        if name == "predict_step":
            return Weights()
        deals = name == "training_step" and self._batch_parts.deals
        for found in parts.values():
            self._batch_parts.check(found, deals=deals)
        if self._own is None or self._own not in parts:
            return Weights()
        own = self._batch_parts.weights(parts[self._own])
        if self._batch_parts.counts_samples and not deals:
            return Weights(own, sum(own) * self._plan.layout.num_replicas)
        samples = sum(part.samples for part in parts[self._own])
        totals = torch.tensor([sum(own), samples], dtype=torch.float64, device=self._device)
        if self._loss_group is not None:
            dist.all_reduce(totals, group=self._loss_group)
        total, everywhere = totals.tolist()
        return Weights(own, total, everywhere if deals else None)

    # --- phase 2 ---

    def _options(self, context: Context, arguments: Sequence[Any], name: str, parts: Parts) -> dict[str, Any]:
        module = self._module
        index = arguments[0] if arguments and isinstance(arguments[0], int) else module.global_step
        key = None if self._seed is None else (self._seed, module.current_epoch, index)
        options = {"context": context, "capture": self._capture, "metrics": self._metrics, "random_key": key}
        return {**options, "watches": self._batch_parts.watches(name, parts.values())}

    def _run(self, step: UserStep, trainable: frozenset[str], ending: Ending | None = None) -> None:
        with self._capture.capture(), self._metrics.local():
            self._engine.execute(step, trainable, ending)

    def _walking(self, name: str) -> set[int]:
        """The replicas for which all ranks run an evaluation in lock step."""
        if name not in self._several:
            several = self._lock_step is not None and passes_several_times(self._module, name)
            self._several[name] = set(self._replicas) if several else set()
        return self._several[name]

    # --- phases 3 to 5 ---

    def _mean_loss(self, step: TrainingStep) -> tuple[Tensor, bool]:
        """Return the mean loss of this rank's replica, and whether any replica's loss has a gradient.

        A replica of weight 0 has no mean of its own, and gets that of all replicas.
        """
        losses, weights = [step.losses[index] for index in sorted(step.losses)], step.weights
        own, weight = weights.weighted_sum(losses), sum(weights.own)
        everywhere = torch.stack([own, own.new_full((), float(step.has_graph))])
        if self._loss_group is not None:
            dist.all_reduce(everywhere, group=self._loss_group)
        total, with_graph = everywhere
        has_graph = step.has_graph or bool(with_graph)  # a device is asked only where the answer is not known
        return (own / weight if weight else total / weights.total).to(losses[0].dtype), has_graph

    def _merged(self, step: UserStep, loss: Tensor | None) -> StepResult:
        """Merge this replica's results and logs over its microbatches."""
        assert self._own is not None
        if step.fails:
            return StepResult(fails=True)
        samples = [part.samples for part in step.microbatches[self._own]]
        results = [step.results[index] for index in sorted(step.results)]
        outputs: Any = results  # of parts with unknown numbers of samples
        if all(result is None for result in results):
            outputs = None
        elif len(results) == 1 or all(part.is_counted for part in step.microbatches[self._own]):
            outputs = merge(results, samples)
        weight = sum(step.weights.own)
        # replicas count by their samples in a synced mean, and the value must count by its weight
        total = step.weights.total
        factor = weight * self._plan.layout.num_replicas / total if total else 1.0
        logs = [
            log.weighted(sum(samples), factor, step.weights.samples) if log.batch_size == weight else log
            for log in self._capture.merge()
        ]
        return StepResult(loss, outputs, logs)

    def _share(self, numbers: Iterable[int], merged: StepResult | None) -> dict[int, StepResult]:
        """Share results within each of some replicas; `merged` is that of this rank's own."""
        found: dict[int, StepResult] = {}
        for number in numbers:
            is_source = number == self._own and self._replicas[number].src == self._rank
            found[number] = self._replicas[number].results.share(merged if is_source else None)
            if merged is not None and number == self._own and not is_source:
                merged.check_equal(found[number])
        return found

    def _shown(self, found: Mapping[int, StepResult]) -> StepResult:
        """Log and return the result of the replica that this rank shows."""
        shown = self._own if self._own is not None else next(iter(found))
        if shown not in found:  # in prediction, where other replicas have one batch more
            return StepResult()
        # only now: with sync_dist a log is collective over all ranks, and others wait for the next replica's result
        replay(self._module, found[shown].logs)
        return found[shown]


def _by_name(outputs: Any) -> dict[str, Any] | None:
    """Return what training steps return beside the loss; None where that is the loss alone.

    What microbatches returned and cannot be joined has a list with one value for each of them.
    """
    if isinstance(outputs, list):
        found = [one if isinstance(one, Mapping) else {} for one in outputs]
        names = dict.fromkeys(name for one in found for name in one)
        outputs = {name: [one.get(name) for one in found] for name in names}
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
    raise ConfigError(
        "backward",
        f"a factor of the loss of {float(value)}",
        "Batches of one accumulation add their gradients in one place, so that Lightning's is the only factor",
        "Scale the loss in training_step",
    )
