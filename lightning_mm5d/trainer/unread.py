"""Finds the tensors of training batches that this rank never reads, and leaves them in host memory.

The stages of a rank hand pixel values to the call of an encoder that another rank computes. What such a call was given
in one step, as the batch had it, waits in the host memory of later steps. Whatever is read there after all moves at
that moment, and moves with the batch from then on. So nothing depends on the guess but the time of a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.data.microbatch import Microbatch, with_tensors
from lightning_mm5d.data.packed_images import Path
from lightning_mm5d.data.waiting import Waiting


class UnreadTensors:
    """Those of one rank, by their paths in a batch of one replica.

    Args:
        handed: ids of the tensors that the step under way gave to calls which other ranks compute.
        device: where this rank computes.
    """

    def __init__(self, handed: set[int], device: torch.device) -> None:
        self._handed, self._device = handed, device
        self._unread: set[Path] = set()
        self._read: set[Path] = set()

    def hold(self, batch: Any) -> Any:
        """Return a batch that is about to move with its unread tensors waiting."""
        if not self._unread:
            return batch
        return with_tensors(batch, lambda path, tensor: self._held(path, tensor) if path in self._unread else tensor)

    def learn(self, microbatches: Iterable[Microbatch]) -> None:
        """Note, after a training step, what its microbatches had for calls of other ranks alone."""

        def note(path: Path, tensor: Tensor) -> Tensor:
            if id(tensor) in self._handed and path not in self._read:
                self._unread.add(path)
            return tensor

        if self._handed:
            for part in microbatches:
                with_tensors(part.batch, note)
            self._handed.clear()

    def _held(self, path: Path, tensor: Tensor) -> Tensor:
        if not self._must_move(tensor):
            return tensor

        def move() -> Tensor:
            self._read.add(path)
            self._unread.discard(path)
            return tensor.to(self._device, non_blocking=True)

        return Waiting(tensor, self._device, move)

    def _must_move(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor and tensor.device != self._device and not tensor.requires_grad
