"""CPU time of an encoder's rank with one call for each microbatch, and with one call for four of them.

A small LLaVA, its CLIP tower on rank 0 and its language model on rank 1; 8 microbatches of one image. The
sides take turns step by step.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset
from turns import WARMUP, Side, Turns, fit, race, row
from two_ranks import Llava, Samples

from lightning_mm5d import Modality, MultimodalStrategy

STEPS, MICROBATCHES = 10 + WARMUP, 8


class Timed(Llava):
    """Notes the processor's time of each step on its rank."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began = time.process_time()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses[-1] = time.process_time() - self.began


def train(turns: Turns, rank: int, size: int, width: int) -> list[float]:
    torch.set_num_threads(1)
    vision = Modality(pipeline={"microbatches_per_call": size})
    strategy = MultimodalStrategy(
        modalities={"vision": vision, "language": Modality()}, batching={"num_microbatches": MICROBATCHES}
    )
    module = Timed(width)
    fit(module, DataLoader(Subset(Samples(), range(STEPS * MICROBATCHES)), batch_size=MICROBATCHES), strategy, 2, turns)
    return module.losses[WARMUP:]


def main() -> None:
    width = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    one_call, four_calls = race(
        Side(2, lambda turns, rank: train(turns, rank, 1, width)),
        Side(2, lambda turns, rank: train(turns, rank, 4, width)),
        STEPS,
    )
    apart, joined = (statistics.median(side.results[0]) for side in (one_call, four_calls))
    row(
        f"encoder of width {width}: CPU time of a step, calls of four / of one",
        joined / apart,
        "0.90",
        f"{1e3 * joined:.0f} / {1e3 * apart:.0f} ms",
    )


if __name__ == "__main__":
    main()
