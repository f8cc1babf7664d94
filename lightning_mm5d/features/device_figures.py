"""Figures of all ranks for `DeviceStatsMonitor`: busy and idle shares, bytes sent, peak memory, loads of experts.

They stand beside the figures of Lightning's stock accelerators. They are gathered from all ranks once a step, because a
logger writes on one rank, and only with a `DeviceStatsMonitor`. Shares of time are those of the last whole training
step. On a GPU they come from events, which are read after the step: with the monitor the host waits there once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor

from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course, Recorder
from lightning_mm5d.expert_parallel import Load
from lightning_mm5d.sharded.collectives import message_device, of_all_ranks
from lightning_mm5d.trainer.feature import Attached, Feature, Running


class LoadFigures(NamedTuple):
    """Rows of experts in one step, of all layers of one rank; all are 0 where no tokens travelled.

    Attributes:
        expert_tokens_mean: rows of an expert.
        expert_tokens_max_over_mean: rows of the expert that had most, over the mean of its layer; of the layer where it
            is largest.
        rank_tokens_mean: rows of the experts of a rank, in one layer.
        rank_tokens_max_over_mean: of ranks, as of experts.
    """

    expert_tokens_mean: float = 0.0
    expert_tokens_max_over_mean: float = 0.0
    rank_tokens_mean: float = 0.0
    rank_tokens_max_over_mean: float = 0.0

    @classmethod
    def of(cls, loads: Iterable[Load]) -> LoadFigures:
        """The figures of some layers."""
        used = [load for load in loads if sum(load.by_expert)]
        if not used:
            return cls()
        experts, ranks = [load.by_expert for load in used], [load.by_rank for load in used]
        return cls(_mean(experts), _worst(experts), _mean(ranks), _worst(ranks))


def _mean(layers: Sequence[Sequence[int]]) -> float:
    return sum(map(sum, layers)) / sum(map(len, layers))


def _worst(layers: Sequence[Sequence[int]]) -> float:
    return max(max(layer) * len(layer) / sum(layer) for layer in layers)


_NAMES = ("busy_share", "bubble_share", "bytes_sent", "peak_memory_bytes", *LoadFigures._fields)


class DeviceFigures(Feature):
    """Has no field: a `DeviceStatsMonitor` among the callbacks asks for it."""

    def attach(self, running: Running) -> Attached | None:
        """Add the figures to those of the accelerator."""
        callbacks = vars(running.trainer)["callbacks"]
        return _Figures(running) if any(isinstance(callback, DeviceStatsMonitor) for callback in callbacks) else None


class _Figures(Attached, AroundSteps, AroundStep):
    """Per-stage figures, added to what ``accelerator.get_device_stats`` returns."""

    def __init__(self, running: Running) -> None:
        self._transport, self._device, self._experts = running.transport, running.device, running.experts
        self._stages = running.plan.topology.stage_names()
        self._wire = message_device(running.device)
        self._sent = 0
        self._figures: dict[str, float] = {}
        self._recorder = Recorder(running.device, running.num_microbatches)
        running.engine.around += [self._recorder, self]
        accelerator: Any = running.trainer.accelerator
        original = accelerator.get_device_stats
        self.put_attribute(accelerator, "get_device_stats", lambda device: {**original(device), **self._figures})

    def step(self, course: Course) -> AroundStep | None:
        """Gather figures of training steps."""
        return self if course.step.trains else None

    def end(self) -> None:
        """Gather the figures of the step from all ranks; collective."""
        before, self._sent = self._sent, self._transport.bytes_sent if self._transport else 0
        loads = LoadFigures.of(self._experts.loads().values()) if self._experts else LoadFigures()
        figures = [*self._recorder.shares(), self._sent - before, self._peak(), *loads]
        local_figures = torch.tensor(figures, dtype=torch.float64, device=self._wire)
        self._figures = {
            f"mm5d/rank{rank}/{stage}/{name}": value
            for rank, (stage, values) in enumerate(zip(self._stages, of_all_ranks(local_figures).tolist(), strict=True))
            for name, value in zip(_NAMES, values, strict=True)
            if value or name not in LoadFigures._fields  # ranks without experts have none
        }

    def _peak(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        try:
            import resource
        except ImportError:  # not on every system
            return 0.0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


FEATURE = DeviceFigures
