"""How much of the communication of gradients a step waits for: sums at the end of a backward, and sums beside it.

Two plain replicas. Steps of three kinds take turns within one run: gradients are summed at the end, beside the
backward, and not at all. Exposed communication is the time of a backward over that of one without sums. All
communication is the time of the same sums when nothing else runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from model import VisionLanguage, loader
from turns import WARMUP, Side, Turns, fit, row, run

from lightning_mm5d import MultimodalStrategy
from lightning_mm5d.gradients.gradients import Gradients
from lightning_mm5d.trainer.optimization import Optimization

STEPS, BATCH, WORLD, BUCKET_BYTES = 3 * 24, 4, 2, 2 * 2**20
KINDS = ("none", "end", "beside")
_reduction, _synced = Gradients.reduction, Optimization.synced


class Timed(VisionLanguage):
    """Notes how long each kind of backward took, and how long its sums take alone."""

    def __init__(self) -> None:
        super().__init__(vision_layers=3, language_layers=3)
        self.kind = KINDS[0]
        self.seconds: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "alone")}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kind = KINDS[batch_idx % 3]

    def on_before_backward(self, loss: Any) -> None:
        dist.barrier()
        self.start = time.perf_counter()

    def on_after_backward(self) -> None:
        self.seconds[self.kind].append(time.perf_counter() - self.start)


@contextmanager
def _by_kind(self: Optimization) -> Iterator[None]:
    kind = self._module.kind
    if kind == "none":
        with self._laid():
            yield
        dist.barrier()
        start = time.perf_counter()
        self._gradients.reduce(0.5)
        self._module.seconds["alone"].append(time.perf_counter() - start)
        return
    with (
        patch.object(Gradients, "reduction", lambda gradients, **how: _reduction(gradients, is_early=kind == "beside")),
        _synced(self),
    ):
        yield


def train(_: Turns, rank: int) -> dict[str, list[float]]:
    """Returns the seconds of this rank by kind."""
    module = Timed()
    with patch.object(Optimization, "synced", _by_kind):
        fit(module, loader(STEPS, BATCH, seed=rank), MultimodalStrategy(launch={"bucket_bytes": BUCKET_BYTES}), WORLD)
    return module.seconds


def main() -> None:
    per_rank = run(Side(WORLD, train))
    median = {
        kind: statistics.median(max(times) for times in zip(*(rank[kind][WARMUP:] for rank in per_rank), strict=True))
        for kind in per_rank[0]
    }
    # a backward without sums is followed by them alone
    without, sums = median["none"] - median["alone"], median["alone"]
    for kind, words, aim in (("end", "at its end", "-"), ("beside", "beside it", "< at its end")):
        exposed = median[kind] - without
        measured = f"{exposed * 1e3:.2f} / {sums * 1e3:.2f} ms, backward alone {without * 1e3:.1f} ms"
        row(f"two replicas, sums of a backward {words}: exposed / all communication", exposed / sums, aim, measured)


if __name__ == "__main__":
    main()
