"""Which GPU each rank of a trainer computes on, where several share one."""

from __future__ import annotations

import torch
from lightning.pytorch.accelerators import CUDAAccelerator


class SharedGPU(CUDAAccelerator):
    """All ranks compute on the first GPU: ``Trainer(accelerator=SharedGPU(), devices=ranks)``."""

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        return [0] * int(devices)  # type: ignore[arg-type]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", index) for index in devices]
