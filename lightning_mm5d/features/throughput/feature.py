"""Has `ThroughputMonitor` count samples, items and flops of all replicas once.

The monitor multiplies what rank 0 saw by the number of ranks. Here all ranks of a replica see the same batch, so three
stages would count three times the samples. Figures of the whole are those of rank 0 times the replicas, and those of a
device are the whole divided by the ranks: ``samples_per_sec``, ``items_per_sec``, ``flops_per_sec`` and ``mfu``.
``device/batches_per_sec`` stays what the loop of rank 0 does. ``flops_per_batch`` of the module is what a batch of one
replica takes, in forwards and backwards of the whole model; with unlike pipelines of rank 0's replica, of which others
take the shares that the layout gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import TrainerFn

from lightning_mm5d.config.errors import private
from lightning_mm5d.features.throughput.modality_throughput import ModalityThroughput, ThroughputFigures
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.trainer.feature import Attached, Feature, Running


class ReplicaThroughput(Feature):
    """Has no field: a `ThroughputMonitor` or a `ModalityThroughput` among the callbacks asks for it."""

    def attach(self, running: Running) -> Attached | None:
        """Correct what the monitors of this run compute, and count for a `ModalityThroughput`."""
        layout, callbacks = running.plan.layout, vars(running.trainer)["callbacks"]
        monitors = [one for one in callbacks if isinstance(one, ThroughputMonitor)]
        counted = [one for monitor in monitors for one in private(monitor, "_throughputs").values()]
        is_fit = running.trainer.state.fn == TrainerFn.FITTING
        others = [one for one in callbacks if isinstance(one, ModalityThroughput) and is_fit]
        strategy: Any = running.trainer.strategy
        shares = layout.microbatches(strategy.num_microbatches or 1)
        share = sum(shares) / shares[layout.replicas_of_rank(0)[0]] / layout.size
        batches = layout.num_replicas / layout.size
        if share == batches == 1.0:
            counted = []
        corrections = [put(one, "compute", _scaled(one.compute, share, batches, one.separator)) for one in counted]
        figures = [ThroughputFigures(running, one) for one in others]
        return _Counted(corrections, figures) if corrections or figures else None


class _Counted(Attached):
    """Monitors whose figures are corrected, and figures of our own."""

    def __init__(self, corrections: Sequence[Callable[[], None]], figures: Sequence[ThroughputFigures]) -> None:
        self._corrections, self._figures = corrections, figures

    def remove(self) -> None:
        """Leave the monitors as they were."""
        for one in self._figures:
            one.remove()
        for take_away in reversed(self._corrections):
            take_away()


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
