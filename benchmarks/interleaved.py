"""How much of tensor parallel communication hides behind computation where microbatches are computed side by side.

Two ranks share a Llama. Their collectives end as late as a link of a stated bandwidth would let them: each waits until
all bytes before it, and its own, would have passed (`Link`). Nobody computes for that, so the ranks' cores are free.

Computation is the fastest step without the link, communication the time that the link is busy in a step. The bandwidth
is the one at which both are equal, where most is to be hidden. Steps are timed from one batch to the next.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from turns import WARMUP, Side, Turns, fit, row, run

from lightning_mm5d import Modality, MultimodalStrategy
from tensor_parallel import Llama, Size, loader

RANKS, MICROBATCHES, STEPS = 2, 4, 10 + WARMUP
SIZE = Size(width=512, hidden=1376, layers=6, vocabulary=256, batch=MICROBATCHES, tokens=128)
COLLECTIVES = ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single")


class Link:
    """Lets the collectives of layers end when a link would have carried them.

    Args:
        bytes_per_second: of a rank; None lets them end when they do.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bandwidth, self._free = bytes_per_second, 0.0
        self.sent = 0.0
        for name in COLLECTIVES:
            setattr(dist, name, self._slowed(getattr(dist, name)))  # for good: the process ends with the training

    def _slowed(self, original: Any) -> Any:
        def start(*args: Any, **kwargs: Any) -> Any:
            work = original(*args, **kwargs)
            if not kwargs.get("async_op"):
                return work
            self.sent += max(one.nbytes for one in args if isinstance(one, torch.Tensor))  # 2 (R - 1) / R of it, R = 2
            if self._bandwidth is None:
                return work
            nbytes = max(one.nbytes for one in args if isinstance(one, torch.Tensor))
            self._free = max(self._free, time.perf_counter()) + nbytes / self._bandwidth
            return Delayed(work, self._free)

        return start


class Delayed:
    """A collective that ends no sooner than `until`."""

    def __init__(self, work: Any, until: float) -> None:
        self._work, self._until = work, until

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        time.sleep(max(0.0, self._until - time.perf_counter()))
        return result

    def is_completed(self) -> bool:
        return self._work.is_completed() and time.perf_counter() >= self._until


class Clock(Callback):
    """When each batch began, and what had been sent by then."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.starts: list[float] = []
        self.sent: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        dist.barrier()
        self.starts.append(time.perf_counter())
        self.sent.append(self._link.sent)


def measure(together: int, bandwidth: float | None) -> tuple[float, float]:
    """Return the seconds of the fastest step, and the bytes of a step."""

    def train(_: Turns, rank: int) -> tuple[list[float], list[float]]:
        clock = Clock(Link(bandwidth))
        module: L.LightningModule = Llama(SIZE)
        chosen = MultimodalStrategy(
            {"language": Modality(tp_size=RANKS, interleaved_microbatches=together)}, num_microbatches=MICROBATCHES
        )
        fit(module, loader(STEPS, SIZE), chosen, RANKS, clock)
        return clock.starts, clock.sent

    starts, sent = run(Side(RANKS, train))[0]
    return min(end - start for start, end in pairwise(starts[WARMUP:])), sent[-1] - sent[-2]


def main() -> None:
    computation, nbytes = measure(1, None)
    bandwidth = nbytes / computation
    after, _ = measure(1, bandwidth)
    beside, _ = measure(2, bandwidth)
    communication = nbytes / bandwidth
    most = max(computation, communication)
    link = f"link of {bandwidth / 1e6:.0f} MB/s, computation {computation * 1e3:.0f} ms"
    row("tp 2, one microbatch after another: step / max(computation, communication)", after / most, "", link)
    row("tp 2, two side by side: step / max(computation, communication)", beside / most, "1.15", link)


if __name__ == "__main__":
    main()
