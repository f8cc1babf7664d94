"""Figures of all ranks for `DeviceStatsMonitor`: busy and idle shares, bytes sent, peak memory, loads of experts.

They stand beside the figures of Lightning's stock accelerators. They are gathered from all ranks once a step, because a
logger writes on one rank, and only with a `DeviceStatsMonitor`. Shares of time are those of the last whole training
step. On a GPU they come from events, which are read after the step: with the monitor the host waits there once a step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_mm5d.engine.engine import Engine
from lightning_mm5d.engine.ordered_transport import Wire
from lightning_mm5d.engine.recorder import Recorder
from lightning_mm5d.expert_parallel.loads import LoadFigures
from lightning_mm5d.expert_parallel.shared_experts import SharedExperts
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.backends import message_device

_NAMES = ("busy_share", "bubble_share", "bytes_sent", "peak_memory_bytes", *LoadFigures._fields)


class DeviceFigures:
    """Per-stage figures, added to what ``accelerator.get_device_stats`` returns.

    Args:
        engine: of this rank.
        transport: of this rank; None where nothing is sent.
        plan: all stages.
        device: of this rank.
        experts: that this rank shares; None without any.
    """

    def __init__(
        self,
        engine: Engine,
        transport: Wire | None,
        plan: Plan,
        device: torch.device,
        experts: SharedExperts | None,
    ) -> None:
        self._engine, self._transport, self._device, self._experts = engine, transport, device, experts
        self._stages = plan.topology.stage_names()
        self._wire = message_device(device)
        self._sent = 0
        self._figures: dict[str, float] = {}
        self._accelerator: Any = None

    def attach(self, accelerator: Any) -> None:
        """Add the figures to those of the accelerator, until `detach`."""
        self._engine.recorder = self._engine.recorder or Recorder(self._device)
        self._accelerator, original = accelerator, accelerator.get_device_stats
        accelerator.get_device_stats = lambda device: {**original(device), **self._figures}

    def detach(self) -> None:
        """Leave the accelerator as it was."""
        if self._accelerator is not None:
            del self._accelerator.get_device_stats
            self._accelerator = None

    def update(self) -> None:
        """Gather the figures of the last step from all ranks; collective."""
        if self._accelerator is None:
            return
        before, self._sent = self._sent, self._transport.bytes_sent if self._transport else 0
        busy, bubble = self._engine.recorder.shares() if self._engine.recorder else (1.0, 0.0)
        loads = LoadFigures.of(self._experts.loads().values()) if self._experts else LoadFigures()
        figures = [busy, bubble, self._sent - before, self._peak(), *loads]
        own = torch.tensor(figures, dtype=torch.float64, device=self._wire)
        gathered = [torch.empty_like(own) for _ in self._stages]
        dist.all_gather(gathered, own)
        self._figures = {
            f"mm5d/rank{rank}/{stage}/{name}": value
            for rank, (stage, values) in enumerate(zip(self._stages, gathered, strict=True))
            for name, value in zip(_NAMES, values.tolist(), strict=True)
            if value or name not in LoadFigures._fields  # ranks without experts have none
        }

    def _peak(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        try:
            import resource
        except ImportError:  # not on every system
            return 0.0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
