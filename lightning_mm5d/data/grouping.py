"""``microbatching="loader"``: each microbatch is one batch of the dataloader, and a step takes several of them.

An epoch that ends with fewer batches than microbatches ends with a step of as many as are left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_mm5d.data.loader import Batches, ReplicaBatches


class LoaderBatches(Batches):
    """The dataloader's batches that are the microbatches of one step."""


def group_batches(dataloader: Any, count: int) -> Any:
    """Return a loader like `dataloader` that yields `LoaderBatches` of `count` batches.

    Args:
        dataloader: what the user's hook returned, prepared for this rank; its class and attributes are kept.
        count: batches per step.
    """
    if not isinstance(dataloader, DataLoader):
        return _Grouped(dataloader, count)
    cls = type(dataloader)
    loader: Any = object.__new__(type(cls.__name__, (_GroupedIteration, cls), {"__module__": cls.__module__}))
    vars(loader).update(vars(dataloader))
    loader.batches_per_step = count
    return loader


class _GroupedIteration:
    """Put before the user's DataLoader class."""

    batches_per_step: int

    def __iter__(self) -> Iterator[Any]:
        return _groups(super().__iter__(), self.batches_per_step)  # type: ignore[misc]

    def __len__(self) -> int:
        return -(-super().__len__() // self.batches_per_step)  # type: ignore[misc]


class _Grouped:
    """Any other iterable."""

    def __init__(self, iterable: Any, count: int) -> None:
        self.iterable, self.count = iterable, count

    def __iter__(self) -> Iterator[Any]:
        return _groups(iter(self.iterable), self.count)

    def __len__(self) -> int:
        return -(-len(self.iterable) // self.count)


def _groups(batches: Iterator[Any], count: int) -> Iterator[Any]:
    while group := list(itertools.islice(batches, count)):
        if isinstance(group[0], ReplicaBatches):
            replicas = itertools.zip_longest(*group)
            yield ReplicaBatches(LoaderBatches(b for b in one if b is not None) for one in replicas)
        else:
            yield LoaderBatches(group)
