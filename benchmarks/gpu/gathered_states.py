"""Peak memory of a GPU while a checkpoint of stages is saved, and while a run ends: what training left, and one tensor.

vision: rank 0; language: rank 1. Both share the first GPU. Rank 0 gets the weights and the states of both.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import Row
from benchmarks.gpu.towers import Size, Towers, batches, fit
from lightning_mm5d import Modality, MultimodalStrategy

TESTS = str(Path(__file__).parents[2] / "tests")
if TESTS not in sys.path:
    sys.path.append(TESTS)

from ranks import run_ranks  # noqa: E402

LARGE = Size(width=1024, heads=16, vision=2, language=24, patches=16, tokens=32, vocabulary=4096)
TINY = Size(width=32, heads=2, vision=2, language=4, patches=4, tokens=8, vocabulary=64)
SLACK = 8 * 2**20
"""of the allocator, which rounds blocks up"""


class Peaks(Callback):
    """Bytes that the GPU held at most while a checkpoint was saved, and the end of training, over what it held before.

    Args:
        machine: whose memory is looked at.
        path: of the checkpoint.
    """

    def __init__(self, machine: Machine, path: str) -> None:
        self.machine, self.path = machine, path
        self.saving = self.held = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.begin()
            trainer.save_checkpoint(self.path)
            self.saving = self.machine.peak_bytes() - self.held

    def on_train_end(self, *_: Any) -> None:
        self.begin()

    def begin(self) -> None:
        self.machine.reset_peak()
        self.held = self.machine.allocated_bytes()


def run(machine: Machine) -> Iterator[Row]:
    """Yield the peaks of rank 0, which gathers."""
    with tempfile.TemporaryDirectory() as folder:
        size = machine.pick(LARGE, TINY)
        saving, ending, most = run_ranks(2, _trained, machine, size, f"{folder}/saved.ckpt", limit=200)[0]
    limit = None if machine.is_dry else (most + SLACK) / 2**20
    for name, value in (("a checkpoint is saved", saving), ("a run ends", ending)):
        note = f"the model has a largest tensor of {most / 2**20:.0f} MiB"
        title = f"2 ranks, vision | language: what rank 0 takes on the GPU while {name}"
        yield Row(name=title, value=value / 2**20, unit="MiB", at_most=limit, note=note)


def _trained(rank: int, machine: Machine, size: Size, path: str) -> tuple[int, int, int]:
    module, peaks = Towers(size), Peaks(machine, path)
    largest = max(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    modalities = {
        "vision": Modality(module="encoder", boundary="encoder"),
        "language": Modality(module="decoder"),
    }
    strategy = MultimodalStrategy(modalities, num_microbatches=2, process_group_backend="gloo")
    fit(module, batches(size, steps=2, samples=4), strategy, machine.shared, peaks, devices=2)
    return peaks.saving, machine.peak_bytes() - peaks.held, largest
