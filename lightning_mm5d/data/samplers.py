"""Samplers that yield the indices of the shards that a rank serves, equal on all ranks that serve them.

A sampler or batch sampler that draws is reseeded for each draw, so the order is a function of (seed, epoch, shard).

They refuse, for several shards: samplers that cannot be placed on another shard, and batch samplers that fixed their
batches before.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides import distributed
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler, UnrepeatedDistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data.random_state import seeded

_WRAPPERS = (DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper)
_MOVABLE = (DistributedSampler, UnrepeatedDistributedSampler, *_WRAPPERS)


class ShardOrder(Sampler[Any]):
    """The indices of all served shards: one item of each for every step. It keeps random state as it is."""

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
            raise unservable(
                self.batches,
                "a batch sampler must take its samples from the sampler it is given, when it is iterated",
                "Build the batches in its __iter__, not in its __init__",
            )
        return batch


def samplers_of_shards(
    loader: DataLoader[Any], indices: Any, shards: Sequence[int], num_shards: int, seed: int
) -> list[Any]:
    """Return for each shard what yields its indices: of batches, or of single items without automatic batching."""
    leaf = indices if isinstance(indices, DistributedSampler) else getattr(indices, "sampler", None)
    if not isinstance(leaf, DistributedSampler):
        if len(shards) > 1:
            raise unservable(
                type(indices).__name__,
                "it must draw from a DistributedSampler",
                "Keep use_distributed_sampler=True",
            )
        return [indices]
    wrapped: Any = leaf.dataset if isinstance(leaf, _WRAPPERS) else None
    if wrapped is not None:
        inner = private(wrapped, "_sampler")
        if not isinstance(inner, _EpochOrder):
            wrapped._sampler = _EpochOrder(inner, seed)
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
    """Return a copy of `indices` that draws from a copy of `leaf` on another shard; the data set is not copied."""
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
        raise unservable(indices, f"it must be possible to copy it ({error})", "Use a BatchSampler") from error
    return batches if type(indices) is BatchSampler else _CheckedBatches(batches, moved)


def for_predictions(indices: Any, order: ShardOrder) -> Any:
    """Return `order`, wrapped where `indices` is: Lightning reads the indices of predictions from the wrapper."""
    wrapper = private(distributed, "_IndexBatchSamplerWrapper")
    return wrapper(order) if isinstance(indices, wrapper) else order


def unservable(got: Any, rule: str, fix: str) -> ConfigError:
    """The error for a loader that cannot serve several replicas."""
    return ConfigError(
        "dataloader",
        got,
        f"This rank loads for several replicas of the language model, for which {rule}",
        f"{fix}, or give every modality the same dp_size",
    )
