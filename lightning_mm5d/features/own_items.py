"""Loads the items of lazy tensors that this rank reads while the step before runs.

A rank reads some microbatches of a field (an encoder's rank those that it encodes), all of them, or none (a rank of the
language model). Which ones is learned from each training step. Phases for each batch:

1. ahead: the loader shows a batch one step early; what this rank will read of it starts loading in threads;
2. the step reads it, and waits for what is not there yet;
3. learn: what was read is what is loaded of the next batch. Where everything was, workers of the loader load it, as
   they would without lazy tensors.

So nothing depends on the guess but when something is loaded. Where the precision gives a step another default dtype
(``bf16-true``, ``64-true``), which threads would see, nothing is loaded ahead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from lightning_mm5d.data.batches import split_replicas
from lightning_mm5d.data.lazy import LazyTensor
from lightning_mm5d.data.microbatch import Microbatch, counted, with_tensors
from lightning_mm5d.data.packed_images import Path
from lightning_mm5d.data.resumable import Resumable
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course
from lightning_mm5d.engine.step import Step
from lightning_mm5d.trainer.feature import Attached, Feature, Running

_MOST_THREADS = 8
Parts = Mapping[int, Sequence[Microbatch]]
Place = tuple[int, Path, int]
"""replica, path in the batch, and number of the microbatch"""


class OwnItems(Feature):
    """Has no field: it is there where a batch has lazy tensors."""

    def attach(self, running: Running) -> Attached | None:
        """Learn from each training step."""
        return _OwnItems(running)


class _OwnItems(Attached, AroundSteps):
    """Those of one rank."""

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
        return _Learning(self, course.step) if course.step.trains else None

    def learn(self, parts: Parts) -> None:
        """Note, after a training step, what was read of its microbatches."""
        found = {place: tensor.is_read for place, tensor in _lazy(parts)}
        if not found:
            return
        self._wanted = {self._seen(place) for place, is_read in found.items() if is_read}
        if self._pool is None:
            threads = min(_MOST_THREADS, (os.cpu_count() or 1) // max(1, self._trainer.num_devices))
            self._pool = ThreadPoolExecutor(max(1, threads), "mm5d-own-items")
        if self._shown is not self._trainer.train_dataloader:
            self._shown = self._trainer.train_dataloader
            self._loaders = [one for one in CombinedLoader(self._shown).flattened if isinstance(one, Resumable)]
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        # a stream that keeps its place between epochs gives no batch that no step takes
        is_followed = batches + 1 < self._trainer.num_training_batches
        for loader in self._loaders:
            loader.ahead = self._begin if is_followed else None
            kept = getattr(loader, "kept", None)
            if kept is not None:
                kept.set(not all(found.values()))

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
                number: self._parts.split(one) if self._parts.splits else [counted(one, None)]
                for number, one in zip(self._served, batches, strict=True)
                if one is not None
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
    """Of one training step."""

    def __init__(self, items: _OwnItems, step: Step) -> None:
        self._items, self._step = items, step

    def end(self) -> None:
        """Learn from its microbatches, whose tensors are those that were read."""
        self._items.learn(self._step.microbatches)


def _lazy(parts: Parts) -> Iterator[tuple[Place, LazyTensor]]:
    """Yield the lazy tensors of microbatches."""
    for number, microbatches in parts.items():
        for index, part in enumerate(microbatches):
            found: list[tuple[Path, LazyTensor]] = []

            def note(path: Path, tensor: Tensor, found: list[tuple[Path, LazyTensor]] = found) -> Tensor:
                if isinstance(tensor, LazyTensor):
                    found.append((path, tensor))
                return tensor

            with_tensors(part.batch, note)
            for path, tensor in found:
                yield (number, path, index), tensor


FEATURE = OwnItems
