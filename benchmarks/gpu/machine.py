"""The machine that checks run on: its GPUs, or in the dry mode a CPU that stands for them.

Every call that only CUDA knows goes through a method of `Machine`. The process that makes a `Machine` does not
initialise CUDA, so that it may fork ranks: the GPUs are described by another process (`probe`).
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a check runs on.

    Args:
        is_dry: whether a CPU stands for the GPUs, with small sizes.
        probed: what `probe` found.
    """

    is_dry: bool
    probed: dict[str, Any]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs; two in the dry mode."""
        return 2 if self.is_dry else len(self.probed["gpus"])

    @property
    def gpu_bytes(self) -> int:
        """Return the memory of the first GPU."""
        return 2**30 if self.is_dry else self.probed["gpus"][0]["bytes"]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.is_dry else torch.device("cuda", 0)

    @property
    def backend(self) -> str:
        """Return the backend whose messages live on the GPUs."""
        return "gloo" if self.is_dry else "nccl"

    @property
    def shared(self) -> Any:
        """Return the accelerator of ranks that share the first GPU."""
        if self.is_dry:
            return "cpu"
        from benchmarks.gpu.accelerators import SharedGPU  # imports Lightning

        return SharedGPU()

    @property
    def accelerator(self) -> str:
        """Return the accelerator of ranks that have a GPU each."""
        return self.pick("gpu", "cpu")

    def pick(self, gpu: Any, dry: Any) -> Any:
        """Return a size for GPUs, or the small one of the dry mode."""
        return dry if self.is_dry else gpu

    def synchronize(self) -> None:
        """Wait for the GPU of this process."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        """Begin a new peak of memory."""
        if not self.is_dry:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Return the most bytes of tensors that were alive on the GPU since `reset_peak`; dry: resident memory."""
        if self.is_dry:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return torch.cuda.max_memory_allocated()

    def allocated_bytes(self) -> int:
        """Return the bytes of tensors that are alive on the GPU; dry: resident memory."""
        return self.peak_bytes() if self.is_dry else torch.cuda.memory_allocated()

    def seconds(self, call: Callable[[], Any], calls: int = 10) -> float:
        """Return the median time of a call on the device, after two that are not counted."""
        for _ in range(2):
            call()
        self.synchronize()
        marks = [self.mark()]
        for _ in range(self.pick(calls, 1)):
            call()
            marks.append(self.mark())
        self.synchronize()
        return statistics.median(self.between(*pair) for pair in pairwise(marks))

    def mark(self) -> Any:
        """Return a moment on the device, which is reached when all work before it is done."""
        if self.is_dry:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments that were reached."""
        return end - start if self.is_dry else start.elapsed_time(end) / 1e3

    @contextmanager
    def watched_syncs(self) -> Iterator[list[warnings.WarningMessage]]:
        """Collect a warning for each call that waits for the GPU; on the CPU none comes.

        torch says that calls of torch.distributed are not covered.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not self.is_dry:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield caught
            finally:
                if not self.is_dry:
                    torch.cuda.set_sync_debug_mode("default")


def probe() -> dict[str, Any]:
    """Return a description of this machine's GPUs and software; initialises CUDA."""
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        has = torch.cuda.get_device_properties(index)
        gpus.append({"name": has.name, "bytes": has.total_memory, "capability": [has.major, has.minor]})
    return {
        "gpus": gpus,
        "driver": _driver() if gpus else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else "",
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.split("\n")[0].strip()
