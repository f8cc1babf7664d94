"""The job of `two_ranks.py` (CLIP + Llama) in five layouts of two, three and four ranks, against one process.

Each layout races one process of the same job, and the ratio is that of samples per second. Two replicas take twice the
samples a step, the same ones, so that losses stay comparable. With `--cpu` each layout runs alone, without a race. It
prints for each rank and step the seconds of CPU in all threads, those of the main thread, and the seconds that it
waited for payloads. CPU seconds are comparable on a machine that does other work too.

    python benchmarks/five_layouts.py [part of a layout's name ...] [--cpu]
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from turns import WARMUP, Side, Turns, fit, milliseconds, race, row, run
from two_ranks import BATCH, MICROBATCHES, STEPS, Accumulated, Llava, Samples

from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.engine.transport import Channel, Transport

_recv = Transport.recv


class Layout(NamedTuple):
    """Ranks of the encoder and of the language model, samples of a step over those of one process, and the aim."""

    vision: Modality
    language: Modality
    world: int
    samples: int
    aim: str


LAYOUTS = {
    "encoder | language": Layout(Modality(), Modality(), 2, 1, "1.38"),
    "two replicas of encoder | language": Layout(Modality(dp_size=2), Modality(dp_size=2), 4, 2, "1.84"),
    "encoder tp 2 | language tp 2": Layout(Modality(tp_size=2), Modality(tp_size=2), 4, 1, "1.06"),
    "encoder pp 2 | language pp 2": Layout(Modality(pp_size=2), Modality(pp_size=2), 4, 1, "1.68"),
    "encoder | language pp 2": Layout(Modality(), Modality(pp_size=2), 3, 1, "1.66"),
}


class Meter(Callback):
    """Notes of each step the seconds of CPU in all threads, those of the main thread, and those that it waited."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float]] = []
        self.waited = 0.0
        self._start = (0.0, 0.0)

    def on_train_batch_start(self, *_: Any) -> None:
        self.waited, self._start = 0.0, (time.process_time(), time.thread_time())

    def on_train_batch_end(self, *_: Any) -> None:
        everything, main = time.process_time() - self._start[0], time.thread_time() - self._start[1]
        self.steps.append((everything, main, self.waited))

    def recv(self, transport: Transport, channel: Channel) -> Any:
        """Stand in for `Transport.recv`."""
        before = transport.waited
        payload = _recv(transport, channel)
        self.waited += transport.waited - before
        return payload


def train(turns: Turns, layout: Layout | None, *others: Callback) -> list[float]:
    """Returns this rank's losses; without a layout those of the one process."""
    loader, callbacks = DataLoader(Samples(), batch_size=BATCH), [*others] or [turns]
    if layout is None:
        module: Llava = Accumulated()
        fit(module, loader, "auto", 1, *callbacks)
    else:
        module = Llava()
        modalities = {"vision": layout.vision, "language": layout.language}
        strategy = MultimodalStrategy(modalities, schedule="1f1b", batching={"num_microbatches": MICROBATCHES})
        fit(module, loader, strategy, layout.world, *callbacks)
    return module.losses


def metered(turns: Turns, layout: Layout | None) -> tuple[float, ...]:
    """Train without turns; return the medians of `Meter` over the steps."""
    meter = Meter()
    with patch.object(Transport, "recv", lambda transport, channel: meter.recv(transport, channel)):
        train(turns, layout, meter)
    return tuple(statistics.median(column) for column in zip(*meter.steps[WARMUP:], strict=True))


def compete(name: str, layout: Layout) -> None:
    """Race a layout with one process, and print the row."""
    single, ours = race(
        Side(1, lambda turns, rank: train(turns, None)),
        Side(layout.world, lambda turns, rank: train(turns, layout)),
        STEPS,
    )
    losses = (torch.tensor(side.results[0]) for side in (single, ours))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    pairs = zip(single.seconds, ours.seconds, strict=True)
    ratio = layout.samples * statistics.median(a / b for a, b in pairs)
    row(
        f"samples per second over one process, {name}",
        ratio,
        layout.aim,
        f"{milliseconds(single)} / {milliseconds(ours)}",
    )


def count(name: str, layout: Layout | None) -> None:
    """Print the CPU time of each rank."""
    world = 1 if layout is None else layout.world
    ranks = run(Side(world, lambda turns, rank: metered(turns, layout)))
    print(f"{name}: {sum(cpu for cpu, *_ in ranks):.3f} s of CPU a step")
    for rank, (cpu, main, waited) in enumerate(ranks):
        print(f"    rank {rank}: {cpu:.3f} s, main thread {main:.3f} s, waited {waited:.3f} s", flush=True)


def main(arguments: list[str]) -> None:
    names = [argument for argument in arguments if argument != "--cpu"]
    if "--cpu" in arguments and not names:
        count("one process", None)
    for name, layout in LAYOUTS.items():
        if not names or any(part in name for part in names):
            (count if "--cpu" in arguments else compete)(name, layout)


if __name__ == "__main__":
    main(sys.argv[1:])
