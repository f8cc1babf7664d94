"""What this rank reads of a batch: it loads these lazy items ahead, and leaves what it never reads in host memory.

A rank reads some microbatches of a field (an encoder's rank those that it encodes), all of them, or none (a rank of the
language model). Which ones is learned from each training step. So nothing depends on the guess but the time of a copy,
or when something is loaded.

**Lazy tensors.** Phases for each batch:

1. ahead: the loader shows a batch one step early; what this rank will read of it starts loading in threads;
2. the step reads it, and waits for what is not there yet;
3. learn: what was read is what is loaded of the next batch. Where everything was, workers of the loader load it, as
   they would without lazy tensors.

Where the precision gives a step another default dtype (``bf16-true``, ``64-true``), which threads would see, nothing is
loaded ahead.

**Unread tensors.** The stages of a rank hand pixel values to the call of an encoder that another rank computes. What
such a call was given in one step, as the batch had it, waits in the host memory of later steps. Whatever is read there
after all moves at that moment, and moves with the batch from then on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from lightning_mm5d.data.lazy import LazyTensor, Waiting
from lightning_mm5d.data.loader import per_replica, split_replicas
from lightning_mm5d.data.microbatch import Microbatch, counted, with_tensors
from lightning_mm5d.data.packed_images import Path
from lightning_mm5d.data.resumable import Resumable
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.engine.step import Step
from lightning_mm5d.trainer.feature import BEFORE_TRANSFER, Attached, Feature, Running

_MOST_THREADS = 8
Parts = Mapping[int, Sequence[Microbatch]]
Place = tuple[int, Path, int]
"""replica, path in the batch, and number of the microbatch"""


class OwnReads(Feature):
    """Has no field: it changes no number."""

    def attach(self, running: Running) -> Attached | None:
        """Learn from each training step what the next one reads."""
        attached = Attached()
        for part in (UnreadTensors(running), OwnItems(running)):
            attached.changes.callback(part.remove)
        return attached


class OwnItems(Attached, AroundSteps):
    """The lazy tensors of one rank."""

    def __init__(self, running: Running) -> None:
        self._trainer, self._parts = running.trainer, running.steps.batch_parts
        precision = str(running.trainer.precision)
        self._changes_default = precision.endswith("-true") and precision != "32-true"
        self._served = running.plan.layout.replicas_of_rank(running.rank)
        self._shown: Any = None  # the loaders that show batches ahead
        self._loaders: list[Resumable] = []
        self._wanted: set[Place] = set()
        self._pool: ThreadPoolExecutor | None = None
        running.engine.around.append(self)

    def step(self, course: Course) -> AroundStep | None:
        """Learn from a training step."""
        return _Learning(self.learn, course.step) if course.step.trains else None

    def learn(self, parts: Parts) -> None:
        """Note, after a training step, what was read of its microbatches."""
        reads = {place: tensor.is_read for place, tensor in _lazy(parts)}
        if not reads:
            return
        self._wanted = {self._seen(place) for place, is_read in reads.items() if is_read}
        if self._pool is None:
            threads = min(_MOST_THREADS, (os.cpu_count() or 1) // max(1, self._trainer.num_devices))
            self._pool = ThreadPoolExecutor(max(1, threads), "mm5d-own-items")
        if self._shown is not self._trainer.train_dataloader:
            self._shown = self._trainer.train_dataloader
            self._loaders = [leaf for leaf in CombinedLoader(self._shown).flattened if isinstance(leaf, Resumable)]
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        # a stream that keeps its place between epochs gives no batch that no step takes
        is_followed = batches + 1 < self._trainer.num_training_batches
        for loader in self._loaders:
            loader.ahead = self._begin if is_followed else None
            switch = getattr(loader, "stays_lazy", None)
            if switch is not None:
                switch.set(not all(reads.values()))

    def _seen(self, place: Place) -> Place:
        """Return the place where `_begin` sees a tensor: in the whole batch, unless the strategy splits that."""
        number, path, index = place
        return number, path, index if self._parts.splits else 0

    def _begin(self, batch: Any) -> None:
        """Begin to load what this rank will read of a batch."""
        if self._pool is None or self._changes_default:
            return
        with suppress(Exception):  # hooks may make of it what can be split; else the step raises it again
            batches = split_replicas(batch, len(self._served))
            parts = {
                number: self._parts.split(replica_batch) if self._parts.splits else [counted(replica_batch, None)]
                for number, replica_batch in zip(self._served, batches, strict=True)
                if replica_batch is not None
            }
            for place, tensor in _lazy(parts):
                if place in self._wanted:
                    tensor.start(self._pool)

    def remove(self) -> None:
        """Stop its threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        for loader in self._loaders:
            loader.ahead = None
        super().remove()


class _Learning(AroundStep):
    """Of one training step: what was read of its microbatches, whose tensors are those that it was given."""

    def __init__(self, learn: Callable[[Parts], None], step: Step) -> None:
        self._learn, self._step = learn, step

    def end(self) -> None:
        """Learn."""
        self._learn(self._step.microbatches)


def _lazy(parts: Parts) -> Iterator[tuple[Place, LazyTensor]]:
    """Yield the lazy tensors of microbatches."""
    for number, microbatches in parts.items():
        for index, part in enumerate(microbatches):
            lazy: list[tuple[Path, LazyTensor]] = []

            def note(path: Path, tensor: Tensor, lazy: list[tuple[Path, LazyTensor]] = lazy) -> Tensor:
                if isinstance(tensor, LazyTensor):
                    lazy.append((path, tensor))
                return tensor

            with_tensors(part.batch, note)
            for path, tensor in lazy:
                yield (number, path, index), tensor


class UnreadTensors(Attached, AroundSteps):
    """The tensors that one rank never reads, by their paths in a batch of one replica."""

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
        return _Learning(self.learn, course.step) if course.step.trains else None

    def learn(self, parts: Parts) -> None:
        """Note, after a training step, what its microbatches had for calls of other ranks alone."""

        def note(path: Path, tensor: Tensor) -> Tensor:
            if id(tensor) in self._handed and path not in self._read:
                self._unread.add(path)
            return tensor

        if self._handed:
            for part in chain.from_iterable(parts.values()):
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


FEATURE = OwnReads
