"""Checkpoints in the memory of hosts, after each step: what they add to a step of two replicas of vision | language.

All four ranks train in turns with and without them, some steps each, as one job. What threads write while a step
computes is in its time, so that sides do not alternate step by step as in other benchmarks.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from typing import Any

import turns
from lightning.pytorch.callbacks import Callback
from model import LANGUAGE, VISION, VisionLanguage, loader
from turns import Side, Turns, fit, row, run

from lightning_mm5d import MultimodalStrategy
from lightning_mm5d.features.sharded_checkpoints.in_memory import SHARED_MEMORY

WORLD, ROUNDS, STEPS, WARMUP, BATCH, MICROBATCHES = 4, 3, 8, 2, 64, 4
VISION_LAYERS, LANGUAGE_LAYERS = 4, 4


class Clock(Callback):
    """When steps begin."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def seconds(self) -> float:
        """The median step after the warm-up."""
        return statistics.median(b - a for a, b in zip(self.times[WARMUP:], self.times[WARMUP + 1 :], strict=False))


def _train(_: Turns, rank: int) -> tuple[list[tuple[float, float]], int]:
    pairs, size = [], 0
    for _ in range(ROUNDS):
        pair = []
        for every in (None, 1):
            clock, module = Clock(), VisionLanguage(VISION_LAYERS, LANGUAGE_LAYERS)
            size = sum(parameter.numel() * 12 for parameter in module.parameters())
            strategy = MultimodalStrategy(
                {"vision": VISION, "language": LANGUAGE},
                batching={"num_microbatches": MICROBATCHES},
                checkpoint={"in_memory_every_n_steps": every},
            )
            fit(module, loader(STEPS, BATCH), strategy, WORLD, clock)
            pair.append(clock.seconds())
        pairs.append((pair[0], pair[1]))
    return pairs, size


def main() -> None:
    turns.LIMIT_S = 900  # a rank says nothing before its last fit is over
    pairs, size = run(Side(WORLD, _train))[0]
    for folder in SHARED_MEMORY.glob(f"mm5d-{os.getuid()}-{os.getpid()}-*"):  # its ranks end without a word
        shutil.rmtree(folder)
    without, in_memory = (statistics.median(side) for side in zip(*pairs, strict=True))
    row(
        f"two replicas of vision, language, {size / 2**20:.0f} MiB of weights and states in memory after each step: "
        "time of a step, with / without",
        statistics.median(b / a for a, b in pairs),
        "1.02",
        f"{1e3 * in_memory:.0f} / {1e3 * without:.0f} ms",
    )


if __name__ == "__main__":
    main()
