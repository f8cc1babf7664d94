"""One Lightning step as a pipeline step: the batch split, the user's step run as a schedule, its results put together.

Phases of a step, on every rank: (1) split the batch of each replica that this rank serves into microbatches;
(2) execute the schedule, with what the step logs captured; (3) merge results and logs of the microbatches where the
step ran to its end; (4) share them within each replica; (5) log them, on every rank, and return what one process
would have returned.

It knows the LightningModule and nothing of the trainer. It refuses training steps without a loss and batches that are
too small to be split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.grouping import LoaderBatches
from lightning_mm5d.data.loader import split_replicas
from lightning_mm5d.data.microbatch import Microbatch, batch_samples, merge, split
from lightning_mm5d.data.packed_images import PackedTokens, describe
from lightning_mm5d.engine.engine import Engine, Step
from lightning_mm5d.engine.exchange import broadcast_tree
from lightning_mm5d.gradients.gradients import Gradients, published
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.stage.payload import map_tensors, unsharded
from lightning_mm5d.trainer.logs import LogCapture, LogExchange, LogOptions, MergedLog, replay
from lightning_mm5d.trainer.metrics import MetricSync

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_LOSS = "loss of the step"
_OUTPUTS = "outputs of the step"
Context = Callable[[], AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Replica:
    """One replica of the loss modality, among the ranks that work for it.

    Attributes:
        src: the rank where its step runs to its end; the first of several that share the last stage.
        ends_here: whether this rank is one of these.
        group: all its ranks.
        exchange: shares logs within them.
    """

    src: int
    ends_here: bool
    group: dist.ProcessGroup | None
    exchange: LogExchange


def microbatches(module: LightningModule, batch: Any, count: int, packed: PackedTokens) -> list[Microbatch]:
    """Return the microbatches of one replica's batch: as the module splits it, else as `split` does.

    Args:
        module: may have `split_batch`.
        batch: of the dataloader, or several of them.
        count: M.
        packed: what `describe` says of the module.
    """
    override = getattr(module, "split_batch", None)
    if isinstance(batch, LoaderBatches):
        return [Microbatch(part, batch_samples(part) or 1) for part in batch]
    if callable(override):
        return [Microbatch(part, batch_samples(part) or 1) for part in override(batch, count)]
    return split(batch, count, image_tokens=packed)


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
        loss_group: the ranks where steps run to their end; None where there is one.
        num_microbatches: M.
        loss_weight: whether microbatches weigh as many samples or as many label tokens as they hold.
        seed: for random state, the same on all ranks; None leaves it alone.
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
        num_microbatches: int,
        loss_weight: Literal["samples", "tokens"],
        seed: int | None,
    ) -> None:
        self._module, self._plan, self._engine, self._gradients = module, plan, engine, gradients
        self._replicas, self._metrics, self._rank, self._device = replicas, metrics, rank, device
        self._terminal_group, self._num_microbatches = loss_group, num_microbatches
        self._loss_weight, self._seed = loss_weight, seed
        self._capture = LogCapture(module)
        self._packed = describe(module)
        self._own = next((number for number, replica in replicas.items() if replica.ends_here), None)
        named = module.named_parameters(remove_duplicate=False)
        self._named = [(name, parameter) for name, parameter in named]
        self._trainable: tuple[tuple[bool, ...], frozenset[str]] = ((), frozenset())

    def trainable(self) -> frozenset[str]:
        """Return the names of the parameters that require a gradient now."""
        flags = tuple(parameter.requires_grad for _, parameter in self._named)
        if flags != self._trainable[0]:
            names = (name for (name, _), flag in zip(self._named, flags, strict=True) if flag)
            self._trainable = flags, frozenset(names)
        return self._trainable[1]

    def train(
        self,
        batch: Any,
        rest: Sequence[Any],
        context: Context,
        scale: Callable[[Tensor], Tensor],
        number: tuple[int, ...],
    ) -> Any:
        """Run `training_step` and its backward; return its output with a loss whose backward publishes gradients.

        Args:
            batch: as the dataloader gave it.
            rest: the other arguments of the step.
            context: entered around each microbatch's forward.
            scale: multiplies a loss as the precision plugin does before backward.
            number: of the step, for random state.
        """
        parts = self._split(batch, rest)
        weights = self._weights(parts)
        losses: dict[int, Tensor] = {}

        def loss_of(result: Any, index: int) -> tuple[Tensor, Any]:
            loss = result.get("loss") if isinstance(result, Mapping) else result
            if not isinstance(loss, Tensor):
                raise ConfigError(
                    "training_step",
                    type(loss).__name__,
                    "every rank needs a loss to run the same number of steps",
                    "Return a tensor, or a dict with a tensor under 'loss'; multiply by zero what is to be skipped",
                )
            losses[index] = loss.detach()
            share = weights[index] / weights["total"]
            kept = {k: _detached(v) for k, v in result.items() if k != "loss"} if isinstance(result, Mapping) else None
            return scale(loss * share), kept

        kept_gradients = self._gradients.take()
        step = self._step("training_step", parts, rest, context, number, weights)
        step.loss = loss_of
        try:
            self._run(step)
        finally:
            fresh = self._gradients.take()
            self._gradients.put(kept_gradients)
        merged: list[MergedLog] | None = None
        outputs = None
        if self._own is not None:
            whole = torch.stack([losses[index].double() * weights[index] for index in losses]).sum()
            loss = (whole / sum(weights[index] for index in losses)).to(losses[0].dtype)
            outputs = self._merged(step, parts)
            merged = self._logs(parts, weights, loss, outputs is not None)
        loss_value, outputs = self._shared(merged, outputs)
        assert loss_value is not None
        factor = 1.0 / scale(torch.ones((), device=self._device))

        def publish(gradient: Tensor) -> None:
            value = gradient * factor
            self._gradients.add(fresh, 1.0 if value.is_cpu and float(value) == 1.0 else value)
            fresh[:] = [None] * len(fresh)

        result = published(loss_value.to(self._device), publish)
        return {**outputs, "loss": result} if isinstance(outputs, Mapping) else result

    def evaluate(self, name: str, batch: Any, rest: Sequence[Any], context: Context, number: tuple[int, ...]) -> Any:
        """Run one of the other steps; return what it would have returned for the whole batch, on every rank.

        Args:
            name: of the LightningModule's method.
            batch: as the dataloader gave it.
            rest: the other arguments of the step.
            context: entered around each microbatch's forward.
            number: of the step, for random state.
        """
        parts = self._split(batch, rest)
        weights = self._weights(parts)
        step = self._step(name, parts, rest, context, number, weights)
        self._run(step)
        outputs, merged = None, None
        if self._own is not None:
            outputs = self._merged(step, parts)
            merged = self._logs(parts, weights, None, outputs is not None)
        return self._shared(merged, outputs)[1]

    def _split(self, batch: Any, rest: Sequence[Any]) -> dict[int, list[Microbatch]]:
        batches = split_replicas(batch, len(self._replicas))
        parts = {}
        for number, one in zip(self._replicas, batches, strict=True):
            parts[number] = [] if one is None else self._split_one(one)
        if self._module.training and rest and rest[0] == 0:
            for found in parts.values():
                if 0 < len(found) < self._num_microbatches:
                    samples = sum(part.samples for part in found)
                    raise ConfigError(
                        "num_microbatches",
                        self._num_microbatches,
                        f"a batch of {samples} samples gives at most {len(found)} microbatches",
                        f"Use {len(found)} or fewer, or larger batches",
                    )
        return parts

    def _split_one(self, batch: Any) -> list[Microbatch]:
        return microbatches(self._module, batch, self._num_microbatches, self._packed)

    def _weights(self, parts: Mapping[int, list[Microbatch]]) -> dict[Any, float]:
        """Weight of each microbatch of this rank's own replica, and their total over all replicas."""
        if self._own is None:
            return {"total": 1.0}
        own = parts[self._own]
        override = getattr(self._module, "loss_weight", None)
        if callable(override):
            weights = [float(override(part.batch)) for part in own]
        elif self._loss_weight == "tokens":
            weights = [float(self._label_tokens(part.batch)) for part in own]
        else:
            weights = [float(part.samples) for part in own]
        replicas = self._plan.layout.num_replicas
        if self._loss_weight == "samples" and not callable(override):
            return {**dict(enumerate(weights)), "total": sum(weights) * replicas}
        total = torch.tensor([sum(weights)], dtype=torch.float64, device=self._device)
        if self._terminal_group is not None:
            dist.all_reduce(total, group=self._terminal_group)
        return {**dict(enumerate(weights)), "total": float(total)}

    def _label_tokens(self, batch: Any) -> int:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor):
            raise ConfigError(
                "loss_weight",
                "tokens",
                "label tokens are counted in batch['labels'], and this batch has none",
                "Define `loss_weight(batch)` on the LightningModule: the number of tokens of a microbatch",
            )
        configs = (getattr(module, "config", None) for module in self._module.modules())
        shifts = not any(getattr(config, "is_encoder_decoder", False) for config in configs)
        return int((labels[..., 1:] if shifts and labels.dim() > 1 else labels).ne(-100).sum())

    def _step(
        self,
        name: str,
        parts: Mapping[int, list[Microbatch]],
        rest: Sequence[Any],
        context: Context,
        number: tuple[int, ...],
        weights: Mapping[Any, float],
    ) -> Step:
        method = getattr(self._module, name)

        def begin(part: Microbatch, index: int) -> None:
            self._capture.begin_microbatch(index, weights.get(index, part.samples))

        return Step(
            run=lambda batch: unsharded(method(batch, *rest)),
            microbatches=parts,
            structure=lambda batch: (name, self._module.training, _structure(batch)),
            number=None if self._seed is None else (self._seed, *number),
            context=context,
            begin=begin,
        )

    def _run(self, step: Step) -> None:
        with self._capture.capture(), self._metrics.local():
            self._engine.execute(step, self.trainable() if step.loss is not None else frozenset(), self._metrics)

    def _merged(self, step: Step, parts: Mapping[int, list[Microbatch]]) -> Any:
        assert self._own is not None
        results = [step.results[index] for index in sorted(step.results)]
        if all(result is None for result in results):
            return None
        return merge([_detached(result) for result in results], [part.samples for part in parts[self._own]])

    def _logs(
        self, parts: Mapping[int, list[Microbatch]], weights: Mapping[Any, float], loss: Tensor | None, more: bool
    ) -> list[MergedLog]:
        assert self._own is not None
        samples = sum(part.samples for part in parts[self._own])
        weight = sum(value for key, value in weights.items() if key != "total")
        logs = [
            dataclasses.replace(log, batch_size=samples if log.batch_size == weight else log.batch_size)
            for log in self._capture.merge()
        ]
        # the loss travels with the logs: one message less
        first = [MergedLog(options=LogOptions(name=_LOSS), value=loss, batch_size=samples)] if loss is not None else []
        return [*first, *([MergedLog(options=LogOptions(name=_OUTPUTS), value=None, batch_size=0)] * more), *logs]

    def _shared(self, merged: list[MergedLog] | None, outputs: Any) -> tuple[Tensor | None, Any]:
        """Share and replay the logs; return this rank's loss and outputs."""
        loss: Tensor | None = None
        found: dict[int, Any] = {}
        shown = self._own if self._own is not None else next(iter(self._replicas))
        repeated: list[MergedLog] = []
        for number, replica in self._replicas.items():
            own = number == self._own and replica.src == self._rank
            logs = replica.exchange.broadcast(merged if own else None)
            if any(log.options.name == _OUTPUTS for log in logs):
                found[number] = broadcast_tree(outputs if own else None, replica.src, replica.group, self._device)
            if number == shown:
                loss = next((log.value for log in logs if log.options.name == _LOSS), None)
                repeated = [log for log in logs if log.options.name not in (_LOSS, _OUTPUTS)]
        # behind the loop: with sync_dist it is collective over all ranks, and others wait for the next replica's logs
        replay(self._module, repeated)
        return loss, found.get(shown)


def _detached(tree: Any) -> Any:
    try:
        return map_tensors(tree, Tensor.detach)
    except ValueError:  # objects of the user's own stay as they are, and on this rank
        return tree


def _structure(batch: Any) -> Any:
    """A key that is equal for batches which take the same way through the model, whatever their sizes."""
    if isinstance(batch, Tensor):
        return batch.dim(), batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, _structure(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return tuple(_structure(value) for value in batch)
    return type(batch)
