"""Which batches a rank loads, so that all ranks of one replica load the same ones.

The replicas of the loss modality define the samples (a replica's share of the data set is a *shard*). Every rank loads
the batches of the replicas that it serves: usually one; an encoder with fewer replicas than the loss modality serves
several, and then gets a `ReplicaBatches` for each step. Two ranks that load the same shard must see the same samples in
the same order with the same augmentation, or an image meets another sample's text without any error. So everything
random about loading is a function of (seed, epoch, step, shard), keeps the rank's own random state as it is, and is
seeded where it arises:

- a sampler or batch sampler that draws: reseeded for each draw (`samplers`);
- augmentation: reseeded for each batch, in the main process and in workers, so that it is the same with any
  number of workers; a stream without batches (``batch_size=None``) has its workers seeded once an epoch.

A training loader knows its position and goes on from a saved one (`resumable`).

`shard_loader` keeps the user's DataLoader class and every argument. For k shards it draws the indices of k batches a
step and starts k times the workers, so that worker k*w + j loads only shard j, just as worker w does on a rank that
serves that shard alone. `group_batches` serves ``microbatching="loader"``: each microbatch is one batch of the
dataloader.

While a shard's batches are read, the data set sees its number as rank, and how many shards there are as world size
(`replica_view`). So an iterable data set that shards itself yields each shard; for several shards it is iterated once
for each, by a loader of its own, in place of one loader with k times the workers.

It refuses, for several shards: the samplers that `samplers` refuses, iterable data sets whose loader has a state of its
own, and objects that are no DataLoader. What a data set draws from a generator of its own, or has read of ranks before,
is not seen here: the proof of samples compares the batches.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, IterableDataset

from lightning_mm5d.config.features import part_of
from lightning_mm5d.data.lazy import StaysLazy, keep_in_worker
from lightning_mm5d.data.random_state import seed_all, seed_of, seeded
from lightning_mm5d.data.replica_view import as_replica, become_replica
from lightning_mm5d.data.resumable import Position, Progress, Resumable, TrainerProgress
from lightning_mm5d.data.samplers import (
    ShardOrder,
    for_predictions,
    samplers_of_shards,
    unservable,
)

_Loader = TypeVar("_Loader")
_BASES = "_mm5d_bases"  # of a class that is made here
_KNOW_REPLICAS = ("lightning.", "pytorch_lightning.", "lightning_mm5d.")


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


def shard_loader(
    dataloader: _Loader,
    *,
    shards: Sequence[int],
    num_shards: int,
    seed: int,
    unshared: bool = False,
    trainer: TrainerProgress | None = None,
    shares: Sequence[int] | None = None,
    shared_objects: Iterable[object] = (),
) -> _Loader:
    """Return the loader of a rank that serves the replicas `shards` out of `num_shards`.

    Call it in `Strategy.process_dataloader`: Lightning has put in its distributed sampler by then, by
    `distributed_sampler_kwargs` = ``{"num_replicas": num_shards, "rank": shards[0]}``, and the shuffling,
    the seed and ``drop_last`` of that sampler are kept. A `DistributedSampler` of the user's own is placed
    on the shards.

    Args:
        dataloader: what the user's hook returned, after Lightning prepared it.
        shards: ascending indices of the served replicas.
        num_shards: number of replicas that share the data set.
        seed: an integer that all ranks agree on.
        unshared: whether no other rank loads the same shards.
        trainer: how far it is, for a loader whose position can be saved; None for one that always begins at its
            beginning.
        shares: microbatches of each replica, by which the feature that has ``dealing`` deals samples out; None for
            replicas that draw their own.
        shared_objects: what a data set may hold, and copies of it share: the trainer, modules. With these, code of
            users that loops over the loader gets the batches of the first shard.

    Returns:
        A loader of the same class. It yields batches for one shard, `ReplicaBatches` for several.

    Raises:
        ConfigError: the loader cannot serve these shards.
    """
    assert list(shards) == sorted(set(shards)), shards
    assert set(shards) <= set(range(num_shards)), (shards, num_shards)
    count = len(shards)
    if shares is not None and not part_of("dealing").deals(dataloader, shares):
        shares = None
    progress = Progress(trainer, tuple(shards), num_shards, shares=None if shares is None else tuple(shares))
    if not isinstance(dataloader, DataLoader):
        if count > 1:
            raise unservable(dataloader, "it must be a torch DataLoader", "Return a DataLoader")
        return ResumableIterable(dataloader, progress, seed)  # type: ignore[return-value]
    if count > 1 and isinstance(dataloader.dataset, IterableDataset):
        if hasattr(dataloader, "state_dict"):
            rule = "A loader of an IterableDataset with a state of its own cannot be read for each"
            raise unservable(dataloader, rule, "Use a DataLoader, or a map-style data set")
        by_shard = (replace(progress, shards=(shard,)) for shard in shards)
        first, *others = (_stream(dataloader, of_shard, seed, [*shared_objects]) for of_shard in by_shard)
        first.others, first.is_of_trainer = others, bool(shared_objects)
        return first  # type: ignore[return-value]
    loader = _served(_copied(dataloader, _ShardIteration), progress, seed, unshared)
    loader.is_of_trainer = bool(shared_objects)
    return loader


def _stream(dataloader: DataLoader[Any], progress: Progress, seed: int, shared: Sequence[object]) -> _StreamIteration:
    """Return a loader of one shard with a data set of its own, as another process would have."""
    loader = _copied(dataloader, _StreamIteration)
    with suppress(TypeError, NotImplementedError):  # one that holds a file: its shards are compared anyway
        object.__setattr__(loader, "dataset", copy.deepcopy(dataloader.dataset, {id(held): held for held in shared}))
    return _served(loader, progress, seed, unshared=True)


def _served(loader: Any, progress: Progress, seed: int, unshared: bool) -> Any:
    """Let a copy of the user's loader serve the shards of `progress`."""
    shards, num_shards, shares = progress.shards, progress.num_shards, progress.shares
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    indices = getattr(loader, name)
    samplers = samplers_of_shards(loader, indices, shards, num_shards, seed, unshared=unshared)
    if shares is not None:
        samplers = [
            part_of("dealing").dealt(sampler, shares, shard) for sampler, shard in zip(samplers, shards, strict=True)
        ]
    of_batches = name == "batch_sampler"
    order = ShardOrder(samplers, seed, shards, seeds_workers=loader.num_workers > 0, of_batches=of_batches)
    if loader.num_workers and name == "sampler" and not isinstance(loader.dataset, IterableDataset):
        order.wraps_items = True
    object.__setattr__(loader, name, for_predictions(indices, order))  # DataLoader forbids plain assignment

    if loader.generator is None:
        loader.generator = torch.Generator()
        loader.reseeds_generator = True
    loader.stays_lazy = StaysLazy() if loader.num_workers else None
    init_fn = loader.worker_init_fn
    loader.worker_init_fn = _SeedWorker(shards, num_shards, loader.num_workers, init_fn, loader.stays_lazy)
    loader.num_workers *= len(shards)
    if hasattr(loader, "in_order"):
        loader.in_order = True  # the order of arrival would differ between ranks
    loader.served_order, loader.served_indices, loader.progress = order, indices, progress
    loader.take_order_seed()
    return loader


def group_batches(dataloader: Any, count: int) -> Any:
    """Return a loader like `dataloader` that yields `LoaderBatches` of `count` batches.

    An epoch that ends with fewer batches than `count` ends with a step of as many as are left.

    Args:
        dataloader: from `shard_loader`; its class and attributes are kept.
        count: batches per step.
    """
    loader = _copied(dataloader, _GroupedIteration)
    loader.progress = replace(loader.progress, batches_per_step=count)
    return loader


def _copied(dataloader: Any, iteration: type) -> Any:
    """Return a copy with all arguments and attributes, of a class with `iteration` before the user's own."""
    cls = type(dataloader)
    loader = _empty_loader(iteration, *vars(cls).get(_BASES, (cls,)))
    vars(loader).update(vars(dataloader))
    return loader


def _empty_loader(*bases: type) -> Any:
    """Return a loader without attributes, of a class that is pickled as what it is made of: the user's comes last."""
    user_class = bases[-1]
    reduced = {"__reduce__": lambda loader: (_empty_loader, bases, loader.__getstate__()), _BASES: bases}
    return object.__new__(type(user_class.__name__, bases, {"__module__": user_class.__module__, **reduced}))


class _ShardIteration(Resumable):
    """Seeds each batch and groups those of its shards. It draws nothing before its first batch is asked for."""

    served_indices: Any
    generator: torch.Generator
    reseeds_generator = False
    stays_lazy: StaysLazy | None = None
    """by workers; None without any"""
    is_of_trainer = False

    def __len__(self) -> int:
        return -(-super().__len__() // len(self.progress.shards))  # type: ignore[misc]

    def __iter__(self) -> Iterator[Any]:
        batches = self.batches()
        return _firsts(batches) if _is_for_user(self, sys._getframe(1)) else batches

    def batches(self) -> Iterator[Any]:
        """Yield the batches of a pass."""
        # an epoch's number is known when its first batch is asked for, and not always before
        order, shards = self.served_order, self.progress.shards
        first, dropped = self.begin_pass()
        seed, epoch = order.seed, order.epoch
        if self.reseeds_generator:  # DataLoader draws the base seed of its workers from it
            self.generator.manual_seed(seed_of(seed, "workers", epoch))
        with seeded(seed, "start", epoch), as_replica(shards[0], self.progress.num_shards):
            batches = super().__iter__()  # type: ignore[misc]
        groups = self.groups(batches, first, dropped, *([shard] for shard in shards))
        yield from self.read_ahead(group[0] if len(shards) == 1 else ReplicaBatches(group) for group in groups)


class _StreamIteration(_ShardIteration):
    """Groups the batches of streams, of which each serves one shard; ends with the first stream that ends."""

    others: Sequence[_StreamIteration] = ()

    def resume(self, position: Position, seed: int, epoch: int, *, is_left: bool = False) -> None:
        super().resume(position, seed, epoch, is_left=is_left)
        for other in self.others:
            other.resume(position, seed, epoch, is_left=is_left)

    def batches(self) -> Iterator[Any]:
        if not self.others:
            yield from super().batches()
            return
        order = self.served_order
        for other in self.others:
            other.progress = replace(self.progress, shards=other.progress.shards)
            other.served_order.reseed(order.seed)
            other.served_order.begin_epoch(order.epoch)
        end = object()
        streams = [super().batches(), *(other.batches() for other in self.others)]
        while True:
            group = list(itertools.takewhile(lambda batch: batch is not end, (next(stream, end) for stream in streams)))
            if not group:
                return
            yield ReplicaBatches(group)


class ResumableIterable(Resumable):
    """An iterable that is no DataLoader, with a position; it shows the iterable's own attributes.

    Args:
        iterable: of the user.
        progress: of this rank.
        seed: of random draws.
    """

    def __init__(self, iterable: Any, progress: Progress, seed: int) -> None:
        self.iterable, self.progress = iterable, progress
        samplers = [iterable.sampler] if getattr(iterable, "sampler", None) is not None else []
        self.sampler = self.served_order = ShardOrder(samplers, seed, progress.shards, seeds_workers=False)

    def __len__(self) -> int:
        return len(self.iterable)

    def __getattr__(self, name: str) -> Any:
        if name == "iterable":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.iterable, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("iterable", "sampler") or name in Resumable.__annotations__ or hasattr(Resumable, name):
            super().__setattr__(name, value)
        else:
            setattr(self.iterable, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what `isinstance` sees beside the class itself
        return type(self.iterable)

    def own_loader(self) -> Any:
        iterable = self.iterable
        return iterable if hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict") else None

    def __iter__(self) -> Iterator[Any]:
        first, dropped = self.begin_pass()
        epoch = self.served_order.epoch
        shard, count = self.progress.shards[0], self.progress.num_shards
        with seeded(self.served_order.seed, "start", epoch), as_replica(shard, count):
            batches = iter(self.iterable)
        for group in self.groups(batches, first, dropped, self.progress.shards):
            yield group[0]


@dataclass(frozen=True)
class _SeedWorker:
    """worker_init_fn: shows the shard as rank and seeds by it instead of by global rank, then calls the user's own."""

    shards: tuple[int, ...]
    num_shards: int
    workers: int  # of each shard
    init_fn: Callable[[int], None] | None
    stays_lazy: StaysLazy | None

    def __call__(self, worker_id: int) -> None:
        worker, position = divmod(worker_id, len(self.shards))
        base_seed = torch.initial_seed() - worker_id
        become_replica(self.shards[position], self.num_shards, worker, self.workers)
        seed_all(seed_of(base_seed, "worker", worker, self.shards[position]))
        if self.stays_lazy is not None:
            keep_in_worker(self.stays_lazy)
        if self.init_fn is not None:
            self.init_fn(worker)


class _GroupedIteration:
    """Groups the batches of a step."""

    progress: Progress

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()  # type: ignore[misc]
        if _is_for_user(self, sys._getframe(1)):
            return _firsts(batches)
        return _groups(batches, self.progress.batches_per_step)

    def __len__(self) -> int:
        return -(-super().__len__() // self.progress.batches_per_step)  # type: ignore[misc]


def _is_for_user(loader: Any, caller: FrameType) -> bool:
    """Whether `caller` is a loop of a user's own, which knows of one batch at a time."""
    is_ours = str(caller.f_globals.get("__name__")).startswith(_KNOW_REPLICAS)
    return bool(getattr(loader, "is_of_trainer", False)) and not is_ours


def _firsts(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield in place of the batches of several replicas those of the first one."""
    return (batch[0] if isinstance(batch, ReplicaBatches) else batch for batch in batches)


def _groups(batches: Iterator[Any], count: int) -> Iterator[Any]:
    while group := list(itertools.islice(batches, count)):
        if isinstance(group[0], ReplicaBatches):
            replicas = itertools.zip_longest(*group)
            yield ReplicaBatches(LoaderBatches(batch for batch in replica if batch is not None) for replica in replicas)
        else:
            yield LoaderBatches(group)
