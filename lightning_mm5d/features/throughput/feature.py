"""Has `ThroughputMonitor` count samples, items and flops of all replicas once.

The monitor multiplies what rank 0 saw by the number of ranks. Here all ranks of a replica see the same batch, so three
stages would count three times the samples. Figures of the whole are those of rank 0 times the replicas, and those of a
device are the whole divided by the ranks: ``samples_per_sec``, ``items_per_sec``, ``flops_per_sec`` and ``mfu``.
``device/batches_per_sec`` stays what the loop of rank 0 does. ``flops_per_batch`` of the module is what a batch of one
replica takes, in forwards and backwards of the whole model. With unlike pipelines rank 0's counts for each.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ThroughputMonitor

from lightning_mm5d.config.errors import private
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.trainer.feature import Attached, Feature, Running


class ReplicaThroughput(Feature):
    """Has no field: a `ThroughputMonitor` among the callbacks asks for it."""

    def attach(self, running: Running) -> Attached | None:
        """Correct what the monitors of this run compute."""
        layout, callbacks = running.plan.layout, vars(running.trainer)["callbacks"]
        monitors = [one for one in callbacks if isinstance(one, ThroughputMonitor)]
        if layout.num_replicas == layout.size or not monitors:
            return None
        counted = [one for monitor in monitors for one in private(monitor, "_throughputs").values()]
        return _Counted(counted, layout.num_replicas / layout.size)


class _Counted(Attached):
    """Figures of monitors, times the share of ranks that are replicas."""

    def __init__(self, counted: list[Throughput], share: float) -> None:
        self._take_away = [put(one, "compute", _scaled(one.compute, share, one.separator)) for one in counted]

    def remove(self) -> None:
        """Leave the monitors as they were."""
        for take_away in reversed(self._take_away):
            take_away()


def _scaled(compute: Callable[[], dict[str, float]], share: float, separator: str) -> Callable[[], dict[str, float]]:
    stays = f"device{separator}batches_per_sec"

    def scaled() -> dict[str, float]:
        return {
            name: value * share if name.endswith(("_per_sec", "mfu")) and name != stays else value
            for name, value in compute().items()
        }

    return scaled


FEATURE = ReplicaThroughput
"""Throughput of Lightning's `ThroughputMonitor`."""
