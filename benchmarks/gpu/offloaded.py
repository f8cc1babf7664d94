"""Copies between a GPU and the host: how fast they are, what `offload` costs, and whether they run beside kernels.

Overlap is read from a trace of torch's profiler, which stays in ``build/``: the share of the time of copies in which a
kernel runs, too. Dry, products and copies of the CPU stand for both.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.gpu import towers
from benchmarks.gpu.llama_1b import NEEDED_BYTES
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.one_process import WARMUP, Times, free
from benchmarks.gpu.rows import LackingError, Row
from benchmarks.gpu.supervisor import ROOT
from lightning_mm5d import Modality, MultimodalStrategy

LARGE = towers.Size(width=2048, heads=16, vision=4, language=8, patches=256, tokens=1792, vocabulary=8192)
SAMPLES, MICROBATCHES = 16, 4


def bandwidth(machine: Machine) -> Iterator[Row]:
    """Yield bytes a second from pinned memory to the GPU, back, and both at once on two streams."""
    count = machine.pick(2**30, 2**20)
    host = [torch.empty(count, dtype=torch.uint8, pin_memory=not machine.is_dry) for _ in range(2)]
    device = [torch.empty(count, dtype=torch.uint8, device=machine.device) for _ in range(2)]
    streams = [None, None] if machine.is_dry else [torch.cuda.Stream(), torch.cuda.Stream()]

    def there() -> None:
        device[0].copy_(host[0], non_blocking=True)

    def back() -> None:
        host[1].copy_(device[1], non_blocking=True)

    def both() -> None:
        for stream, copy in zip(streams, (there, back), strict=True):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                copy()
        for stream in streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)

    for name, copy, parts in (("to the GPU", there, 1), ("to the host", back, 1), ("both at once", both, 2)):
        rate = parts * count / machine.seconds(copy) / 1e9
        yield Row(name=f"pinned copies of 1 GiB, {name}", value=rate, unit="GB/s")


def steps(machine: Machine) -> Iterator[Row]:
    """Yield time and peak memory of a step with offloaded activations and states, and how copies overlap."""
    if machine.gpu_bytes < NEEDED_BYTES and not machine.is_dry:
        raise LackingError(f"needs a GPU with {NEEDED_BYTES // 2**30} GiB")
    size = machine.pick(LARGE, towers.SMALL)
    data = towers.batches(size, WARMUP + 6, SAMPLES)
    measured: dict[tuple[str, ...], tuple[float, int]] = {}
    for kinds in ((), ("activations",), ("optimizer",)):
        free(machine)
        times, traces = Times(machine), [Trace(machine, kind) for kind in kinds]
        towers.fit(
            towers.Towers(size), data, strategy(kinds), machine.accelerator, times, *traces, precision="bf16-mixed"
        )
        # the traced step is the last one
        measured[kinds] = statistics.median(times.seconds()[:-1]), machine.peak_bytes()
        if not kinds:
            continue
        (step, peak), (plain, whole) = measured[kinds], measured[()]
        name = f"offload: {kinds[0]}"
        yield Row(name=f"{name}: step / without", value=step / plain, note=f"{step * 1e3:.1f} / {plain * 1e3:.1f} ms")
        note = f"{peak / 2**30:.2f} / {whole / 2**30:.2f} GiB"
        yield Row(name=f"{name}: peak memory / without", value=peak / whole, at_most=1.0, note=note)
        yield Row(name=f"{name}: share of copies beside kernels", value=traces[0].overlap(), note=str(traces[0].path))


def strategy(kinds: Sequence[str]) -> MultimodalStrategy:
    """Both towers on one rank, whose memory is offloaded in some kinds."""
    memory: dict[str, Any] = {"memory": {"offload": list(kinds)}} if kinds else {}
    vision = Modality(module="encoder", boundary="encoder", colocate_with="language", **memory)
    return MultimodalStrategy(
        {"vision": vision, "language": Modality(**memory)},
        batching={"num_microbatches": MICROBATCHES},
        launch={"timeout": towers.TIMEOUT},
    )


class Trace(Callback):
    """A trace of the last step, as a file of Chrome's format."""

    def __init__(self, machine: Machine, name: str) -> None:
        folder = ROOT / "build" / "gpu_traces"
        folder.mkdir(parents=True, exist_ok=True)
        self.machine, self.path = machine, (folder / f"{name}.json").relative_to(ROOT)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        self.profiler = torch.profiler.profile(
            activities=kinds if machine.is_dry else [*kinds, torch.profiler.ProfilerActivity.CUDA]
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == trainer.num_training_batches - 1:
            self.machine.synchronize()
            self.profiler.start()

    def on_train_end(self, *_: Any) -> None:
        self.machine.synchronize()
        self.profiler.stop()
        self.profiler.export_chrome_trace(str(ROOT / self.path))

    def overlap(self) -> float:
        """Return the share of the time of copies in which a kernel runs."""
        events = json.loads((ROOT / self.path).read_text())["traceEvents"]
        spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for event in events:
            if (is_copy := self._is_copy(event)) is not None:
                spans[is_copy].append((event["ts"], event["ts"] + event["dur"]))
        return shared_time(spans[True], spans[False])

    def _is_copy(self, event: dict[str, Any]) -> bool | None:
        """Whether an event is a copy between GPU and host, or a kernel; None for others."""
        category, name = event.get("cat"), event.get("name", "")
        if self.machine.is_dry:
            return {"aten::copy_": True, "aten::mm": False, "aten::addmm": False}.get(name)
        if category == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            return True
        return False if category == "kernel" else None


def shared_time(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Return the share of the time of `spans` in which one of `others` runs; nan without any.

    Args:
        spans: starts and ends; where two overlap, the time counts once.
        others: the same.
    """
    edges = sorted(
        [(at, 0, step) for span in spans for at, step in zip(span, (1, -1), strict=True)]
        + [(at, 1, step) for span in others for at, step in zip(span, (1, -1), strict=True)]
    )
    running, taken, shared = [0, 0], 0.0, 0.0
    for (at, which, step), (following, *_) in itertools.pairwise(edges):
        running[which] += step
        if running[0]:
            taken += following - at
            shared += following - at if running[1] else 0.0
    return shared / taken if taken else float("nan")
