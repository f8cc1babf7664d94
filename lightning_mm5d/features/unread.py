"""Finds the tensors of training batches that this rank never reads, and leaves them in host memory.

The stages of a rank hand pixel values to the call of an encoder that another rank computes. What such a call was given
in one step, as the batch had it, waits in the host memory of later steps. Whatever is read there after all moves at
that moment, and moves with the batch from then on. So nothing depends on the guess but the time of a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_mm5d.data.batches import per_replica
from lightning_mm5d.data.lazy import Waiting
from lightning_mm5d.data.microbatch import Microbatch, with_tensors
from lightning_mm5d.data.packed_images import Path
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.engine.step import Step
from lightning_mm5d.trainer.feature import BEFORE_TRANSFER, Attached, Feature, Running


class Unread(Feature):
    """Has no field: it changes no number."""

    def attach(self, running: Running) -> Attached | None:
        """Learn from each training step, and hold back tensors of the batches of later ones."""
        return UnreadTensors(running)


class UnreadTensors(Attached, AroundSteps):
    """Those of one rank, by their paths in a batch of one replica."""

    def __init__(self, running: Running) -> None:
        self._device, self._trainer = running.device, running.trainer
        self._handed = running.runtime.handed = set[int]()
        self._unread: set[Path] = set()
        self._read: set[Path] = set()
        running.engine.around.append(self)
        before_transfer = getattr(running.module, BEFORE_TRANSFER)  # the last thing before a batch moves
        hold = per_replica(self._hold)

        def prepared(batch: Any, dataloader_idx: int = 0) -> Any:
            batch = before_transfer(batch, dataloader_idx)
            return hold(batch) if self._unread and self._trainer.training else batch

        self.put_attribute(running.module, BEFORE_TRANSFER, prepared)

    def step(self, course: Course) -> AroundStep | None:
        """Learn from a training step."""
        return _Learning(self, course.step) if course.step.trains else None

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

    def _hold(self, batch: Any) -> Any:
        """Return a batch that is about to move with its unread tensors waiting."""
        return with_tensors(batch, lambda path, tensor: self._held(path, tensor) if path in self._unread else tensor)

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


class _Learning(AroundStep):
    """Of one training step."""

    def __init__(self, tensors: UnreadTensors, step: Step) -> None:
        self._tensors, self._step = tensors, step

    def end(self) -> None:
        """Learn from its microbatches, whose tensors are still those that calls were given."""
        self._tensors.learn(part for parts in self._step.microbatches.values() for part in parts)


FEATURE = Unread
