"""Which batches a rank loads, and that all ranks of one replica load the same ones.

The replicas of the language model define the samples (a replica's share of the data set is a *shard*).
Every rank loads the batches of the replicas that it serves: usually one; an encoder with fewer replicas
than the language model serves several, and then gets a `ReplicaBatches` for each step. Two ranks that load
the same shard must see the same samples in the same order with the same augmentation, or an image meets
another sample's text without any error. So everything random about loading is a function of (seed, epoch,
step, shard), none of it touches the rank's own random state, and each source of randomness is pinned where
it arises:

- a sampler or batch sampler that draws: reseeded for each draw;
- a worker process: seeded by (seed, epoch, shard, worker), also under ``seed_everything(workers=True)``;
- augmentation in the main process (``num_workers=0``): reseeded for each batch.

`shard_loader` keeps the user's DataLoader class and every argument. For k shards it draws the indices of k
batches a step and starts k times the workers, so that worker k*w + j loads only shard j, just as worker w
does on a rank that serves that shard alone.

It refuses, for several shards: iterable data sets, samplers that it cannot place on another shard, batch
samplers that fixed their batches before, and objects that are no DataLoader. What it cannot see: a data set
that picks its samples by global rank (peers would then disagree), and a random generator inside the data
set (with ``num_workers=0`` and several shards its draws are shared by the shards).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning
import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import ConfigError


def _moved(what: str) -> ImportError:
    return ImportError(
        f"lightning {lightning.__version__} has no {what} any more. lightning_mm5d builds on it; "
        "install a version within lightning>=2.6,<2.7"
    )


try:
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
except ImportError as error:
    raise _moved("_IndexBatchSamplerWrapper") from error

_Loader = TypeVar("_Loader")
_WRAPPERS = (DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper)
_MOVABLE = (DistributedSampler, UnrepeatedDistributedSampler, *_WRAPPERS)


class Batches(tuple[Any, ...]):
    """Several batches where Lightning expects one."""


class ReplicaBatches(Batches):
    """The batches of one step, one for each shard that the rank serves, in the order of its shards.

    In prediction, where no sample is repeated, the last step may have batches for the first shards only.
    """


def split_replicas(batch: Any, count: int) -> list[Any]:
    """What each of the `count` served replicas is given: its batch, or its collection of batches.

    `batch` is a `ReplicaBatches`, or a collection that holds one for each of several dataloaders, or (for
    ``count == 1``) a plain batch. A replica without a batch in this step gets None in its place.
    """
    if count == 1:
        return [batch]

    def of_replica(batches: ReplicaBatches, index: int) -> Any:
        return batches[index] if index < len(batches) else None

    return [apply_to_collection(batch, ReplicaBatches, of_replica, index) for index in range(count)]


def per_replica(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook(batch, ...)`, applied to each of the batches where several come at once, at any depth."""

    @functools.wraps(hook)
    def mapped(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(batch, Batches):
            return type(batch)(mapped(one, *args, **kwargs) for one in batch)
        return hook(batch, *args, **kwargs)

    return mapped


@contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seeds Python's, numpy's and torch's CPU generators from `key`; puts their states back at the end."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _seed(*key)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def shard_loader(dataloader: _Loader, *, shards: Sequence[int], num_shards: int, seed: int) -> _Loader:
    """The loader that a rank reads which serves the replicas `shards` out of `num_shards`.

    Call it in `Strategy.process_dataloader`: Lightning has put in its distributed sampler by then, by
    `distributed_sampler_kwargs` = ``{"num_replicas": num_shards, "rank": shards[0]}``, and the shuffling,
    the seed and ``drop_last`` of that sampler are kept. A `DistributedSampler` of the user's own is placed
    on the shards.

    Args:
        dataloader: what the user's hook returned, after Lightning prepared it.
        shards: ascending indices of the served replicas.
        num_shards: replicas that the data set is divided over.
        seed: an integer that all ranks agree on.

    Returns:
        A loader of the same class. It yields batches for one shard, `ReplicaBatches` for several.

    Raises:
        ConfigError: the loader cannot serve these shards.
    """
    assert list(shards) == sorted(set(shards)), shards
    assert set(shards) <= set(range(num_shards)), (shards, num_shards)
    count = len(shards)
    if not isinstance(dataloader, DataLoader):
        if count > 1:
            raise _unservable(dataloader, "it must be a torch DataLoader", "Return a DataLoader")
        return dataloader
    if count > 1 and isinstance(dataloader.dataset, IterableDataset):
        raise _unservable(dataloader, "an IterableDataset cannot be sharded", "Use a map-style data set")

    cls = type(dataloader)
    loader: Any = object.__new__(type(cls.__name__, (_ShardIteration, cls), {"__module__": cls.__module__}))
    vars(loader).update(vars(dataloader))
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    indices = getattr(loader, name)
    order = _Order(_samplers_of_shards(loader, indices, shards, num_shards, seed), seed)
    replaced: Any = order
    if isinstance(indices, _IndexBatchSamplerWrapper):  # Lightning reads the indices of predictions from it
        replaced = _IndexBatchSamplerWrapper(order)
    object.__setattr__(loader, name, replaced)  # DataLoader forbids plain assignment after its __init__

    if loader.generator is None:
        loader.generator = torch.Generator()
        loader.reseeds_generator = True
    loader.worker_init_fn = _SeedWorker(tuple(shards), loader.worker_init_fn)
    loader.num_workers *= count
    if hasattr(loader, "in_order"):
        loader.in_order = True  # the order of arrival would differ between ranks
    loader.served_shards, loader.served_order = tuple(shards), order
    return loader


class _ShardIteration:
    """Put before the user's DataLoader class: seeds each step, and groups the batches of a step."""

    served_shards: tuple[int, ...]
    served_order: _Order
    generator: torch.Generator
    reseeds_generator = False

    def __iter__(self) -> Iterator[Any]:
        if self.reseeds_generator:  # DataLoader draws the base seed of its workers from it
            self.generator.manual_seed(_digest(self.served_order.seed, "workers", self.served_order.epoch))
        with seeded(self.served_order.seed, "start", self.served_order.epoch):
            batches = super().__iter__()  # type: ignore[misc]
        return self._steps(batches, self.served_order.epoch)

    def __len__(self) -> int:
        return -(-super().__len__() // len(self.served_shards))  # type: ignore[misc]

    def _steps(self, batches: Iterator[Any], epoch: int) -> Iterator[Any]:
        end = object()
        for step in itertools.count():
            group = []
            for shard in self.served_shards:
                with seeded(self.served_order.seed, "batch", epoch, step, shard):
                    batch = next(batches, end)
                if batch is end:
                    break
                group.append(batch)
            if not group:
                return
            yield group[0] if len(self.served_shards) == 1 else ReplicaBatches(group)


class _Order(Sampler[Any]):
    """The indices of all served shards: one item of each for every step. Leaves random state alone."""

    def __init__(self, samplers: list[Any], seed: int) -> None:
        self.samplers = samplers
        self.seed = seed
        self.epoch = 0
        self.sampler = self  # where Lightning looks for `set_epoch` when this stands as the batch sampler

    def __iter__(self) -> Iterator[Any]:
        end = object()
        streams = [self._drawn(sampler, self.epoch) for sampler in self.samplers]
        for group in itertools.zip_longest(*streams, fillvalue=end):
            yield from (item for item in group if item is not end)

    def __len__(self) -> int:
        return sum(len(sampler) for sampler in self.samplers)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        for sampler in self.samplers:
            for target in (sampler, getattr(sampler, "sampler", None)):
                if callable(forward := getattr(target, "set_epoch", None)):
                    forward(epoch)

    def _drawn(self, sampler: Any, epoch: int) -> Iterator[Any]:
        end = object()
        with seeded(self.seed, "order", epoch):
            items = iter(sampler)
        for step in itertools.count():
            with seeded(self.seed, "order", epoch, step):
                item = next(items, end)
            if item is end:
                return
            yield item


class _EpochOrder(Sampler[Any]):
    """A sampler of the user's, drawn once an epoch: the same order for every shard, on every rank."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0
        self.drawn: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.drawn is None:
            with seeded(self.seed, "order", self.epoch):
                self.drawn = list(self.sampler)
        return iter(self.drawn)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.drawn = epoch, None
        if callable(forward := getattr(self.sampler, "set_epoch", None)):
            forward(epoch)


class _CheckedBatches:
    """A copy of the user's batch sampler, refused when it yields samples that are not of its shard."""

    def __init__(self, batches: Any, sampler: DistributedSampler[Any]) -> None:
        self.batches = batches
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        allowed = set(self.sampler)
        return (self._checked(batch, allowed) for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def _checked(self, batch: Any, allowed: set[int]) -> Any:
        if not allowed.issuperset(batch):
            raise _unservable(
                self.batches,
                "a batch sampler must take its samples from the sampler it is given, when it is iterated",
                "Build the batches in its __iter__, not in its __init__",
            )
        return batch


@dataclass(frozen=True)
class _SeedWorker:
    """worker_init_fn: seeds by shard instead of by global rank, then calls the user's own."""

    shards: tuple[int, ...]
    init_fn: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        worker, position = divmod(worker_id, len(self.shards))
        base_seed = torch.initial_seed() - worker_id
        _seed(base_seed, "worker", worker, self.shards[position])
        if self.init_fn is not None:
            self.init_fn(worker)


def _samplers_of_shards(
    loader: DataLoader[Any], indices: Any, shards: Sequence[int], num_shards: int, seed: int
) -> list[Any]:
    """What yields the indices (of batches, or of single items without automatic batching) of each shard."""
    leaf = indices if isinstance(indices, DistributedSampler) else getattr(indices, "sampler", None)
    if not isinstance(leaf, DistributedSampler):
        if len(shards) > 1:
            raise _unservable(
                type(indices).__name__,
                "it must draw from a DistributedSampler",
                "Keep use_distributed_sampler=True",
            )
        return [indices]
    wrapped = leaf.dataset if isinstance(leaf, _WRAPPERS) else None
    if wrapped is not None:
        if not hasattr(wrapped, "_sampler"):
            raise _moved("DistributedSamplerWrapper.dataset._sampler")
        if not isinstance(wrapped._sampler, _EpochOrder):
            wrapped._sampler = _EpochOrder(wrapped._sampler, seed)
    if (leaf.num_replicas, [leaf.rank]) == (num_shards, list(shards)):
        return [indices]
    if type(leaf) not in _MOVABLE:
        raise ConfigError(
            f"{type(leaf).__name__}(num_replicas, rank)",
            (leaf.num_replicas, leaf.rank),
            f"This rank serves replicas {list(shards)} of {num_shards}, and a DistributedSampler of a class of "
            "one's own cannot be placed on them",
            f"Pass num_replicas={num_shards} and rank={shards[0]} (trainer.distributed_sampler_kwargs), or a "
            "plain sampler, or give every modality the same dp_size",
        )
    source: Any = leaf.dataset if wrapped is None else wrapped._sampler
    return [_placed(loader, indices, leaf, source, shard, num_shards) for shard in shards]


def _placed(
    loader: DataLoader[Any],
    indices: Any,
    leaf: DistributedSampler[Any],
    source: Any,
    shard: int,
    num_shards: int,
) -> Any:
    """A copy of `indices` that draws from a copy of `leaf` on another shard; the data set is not copied."""
    moved = type(leaf)(
        source,
        num_replicas=num_shards,
        rank=shard,
        shuffle=leaf.shuffle,
        seed=leaf.seed,
        drop_last=leaf.drop_last,
    )
    if indices is leaf:
        return moved
    keep = {id(leaf): moved, id(source): source, id(loader.dataset): loader.dataset}
    try:
        batches = copy.deepcopy(indices, keep)
    except (TypeError, NotImplementedError) as error:
        raise _unservable(indices, f"it must be possible to copy it ({error})", "Use a BatchSampler") from error
    return batches if type(indices) is BatchSampler else _CheckedBatches(batches, moved)


def _unservable(got: Any, rule: str, fix: str) -> ConfigError:
    return ConfigError(
        "dataloader",
        got,
        f"This rank loads for several replicas of the language model, for which {rule}",
        f"{fix}, or give every modality the same dp_size",
    )


def _digest(*key: int | str) -> int:
    """63 bits that depend on all of `key`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def _seed(*key: int | str) -> None:
    value = _digest(*key)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)  # `torch.manual_seed` would seed the devices as well
