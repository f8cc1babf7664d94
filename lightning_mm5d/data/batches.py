"""Several batches where Lightning expects one: those of the replicas that a rank serves, and those of one step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection


class Batches(tuple[Any, ...]):
    """Several batches where Lightning expects one."""


class ReplicaBatches(Batches):
    """The batches of one step, one for each shard that the rank serves, in the order of its shards.

    In prediction, where no sample is repeated, the last step may have batches for the first shards only.
    """


class LoaderBatches(Batches):
    """The dataloader's batches that are the microbatches of one step."""


class VaryingCollator:
    """A collator that packs or drops samples, so that batches may have fewer rows than the `batch_size`."""

    @property
    def varies(self) -> bool:
        """Whether batches may have fewer rows than samples were drawn for them."""
        return True


def split_replicas(batch: Any, count: int) -> list[Any]:
    """Return for each of the `count` served replicas its batch, or its collection of batches.

    `batch` is a `ReplicaBatches`, or a collection that holds one for each of several dataloaders, or (for
    ``count == 1``) a plain batch. A replica without a batch in this step gets None in its place.
    """
    if count == 1:
        return [batch]
    return [apply_to_collection(batch, ReplicaBatches, _of_replica, index) for index in range(count)]


def _of_replica(batches: ReplicaBatches, index: int) -> Any:
    return batches[index] if index < len(batches) else None


class Shown:
    """Shows hooks one batch where a rank has one for each of several replicas: that of the first of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._all: Any = None
        self._first: Any = None

    def show(self, batch: Any) -> Any:
        """Return what Lightning is to pass on of a batch that has moved to its device."""
        if self._count == 1:
            return batch
        self._all, self._first = batch, apply_to_collection(batch, ReplicaBatches, _of_replica, 0)
        return self._first

    def all(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of a step, with the batches of all replicas in place of the one that was shown.

        Raises:
            ValueError: it is another batch, as a hook may pass that calls the strategy's step.
        """
        if self._count == 1:
            return arguments
        if arguments[0] is not self._first:
            raise ValueError(
                f"this rank works for {self._count} replicas, and takes the batch that Lightning moved last"
            )
        return [self._all, *arguments[1:]]


def per_replica(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return `hook(batch, ...)` as a function that is applied to each of several batches, at any depth."""

    @functools.wraps(hook)
    def mapped(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(batch, Batches):
            return type(batch)(mapped(inner, *args, **kwargs) for inner in batch)
        return hook(batch, *args, **kwargs)

    return mapped
