"""What is left of an epoch that other layouts began: the samples that none of their replicas has consumed.

A *segment* is what one layout consumed: ``(replicas, batch size, batches of each replica)``. The order of the whole
epoch is that of the layout that began it: of the distributed sampler that several replicas share, or, with one replica,
of the user's own sampler. So the order is drawn again, without loading anything. Then each segment is drawn, and what
its replicas consumed is taken out of the order. The replicas that go on share the rest, as they would share a data set.

It refuses samplers whose draws it cannot repeat for another number of replicas.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.config.features import part_of
from lightning_mm5d.data.samplers import (
    MOVABLE,
    RANDOM,
    SEED,
    WRAPPERS,
    Epoch,
    EpochOrder,
    Segment,
    ShardOrder,
    batch_size_of,
    drawing_from,
    drawn,
    leaf_of,
    placed,
    set_generator_states,
)


class Rest(DistributedSampler[Any]):
    """A replica's share of the samples that are left.

    Args:
        items: what is left, in order.
        num_replicas: that share it.
        rank: of this replica.
        drop_last: whether samples that do not fill all replicas are dropped instead of repeated.
    """

    def __init__(self, items: list[Any], num_replicas: int, rank: int, drop_last: bool) -> None:
        super().__init__(items, num_replicas, rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[position] for position in super().__iter__())


class Later(Sampler[Any]):
    """Another sampler's items from a position on."""

    def __init__(self, sampler: Any, position: int) -> None:
        self.sampler, self.position = sampler, position

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.sampler), self.position, None)

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.position)


def rest_of_shards(
    loader: DataLoader[Any],
    indices: Any,
    segments: Sequence[Segment],
    shards: Sequence[int],
    num_shards: int,
    *,
    epoch: Epoch,
    shares: Sequence[int] | None = None,
) -> list[Any]:
    """Return for each shard what yields its indices in the rest of the epoch.

    Args:
        loader: of the user.
        indices: its batch sampler, or its sampler where it does not batch.
        segments: what was consumed, in order.
        shards: those that this rank serves.
        num_shards: that share the rest.
        epoch: how its order was drawn.
        shares: microbatches of each of these replicas, where they are unlike. Those of earlier ones do not matter:
            the samples of a step are the same.

    Raises:
        ConfigError: the samplers cannot be drawn again for another layout.
    """
    leaf = leaf_of(indices)
    is_shared = isinstance(leaf, DistributedSampler)
    solo = list(itertools.takewhile(lambda segment: segment[0] == 1, segments)) if SEED not in epoch.begun else []
    if not is_shared and SEED not in epoch.begun and len(solo) in (0, len(segments)):
        return [_later(indices, segments) for _ in shards]
    if is_shared and type(leaf) not in MOVABLE:
        got = f"{type(indices).__name__} with {num_shards} replicas, and before {segments[-1][0]}"
        rule = (
            "This epoch was begun with another number of replicas or another batch size, and a sampler of class "
            f"{type(leaf).__name__} cannot be drawn again to find what is left"
        )
        raise ConfigError("dataloader", got, rule, "Keep both, or go on from a checkpoint of the end of an epoch")
    leaf = indices if leaf is None else leaf
    drop_last = getattr(leaf, "drop_last", False)
    items = _shared_order(loader, indices, leaf, epoch) if not solo else _own_order(loader, indices, leaf, solo, epoch)

    def share(count: int, shard: int, batch_size: int | None) -> Any:
        batches = placed(loader, indices, leaf, Rest(items, count, shard, drop_last))
        _set_batch_size(batches, batch_size)
        return batches

    for count, batch_size, batches in segments[len(solo) :]:
        consumed: Counter[Any] = Counter()
        for shard in range(count):
            order = drawn(share(count, shard, batch_size), epoch.seed, epoch.number)
            for batch in itertools.islice(order, batches):
                consumed.update([batch] if batch_size is None and indices is leaf else batch)
        items = _without(items, consumed)
    rests = [share(num_shards, shard, batch_size_of(indices)) for shard in shards]
    if shares is None:
        return rests
    whole = Rest(items, 1, 0, drop_last=False)
    return [part_of("dealing").dealt(rests[0], shares, shard, whole) for shard in shards]


def _shared_order(loader: DataLoader[Any], indices: Any, leaf: Any, epoch: Epoch) -> list[Any]:
    """Return the samples of an epoch in the order of the distributed sampler that several replicas share."""
    if isinstance(leaf, DistributedSampler):
        source: Any = private(leaf.dataset, "_sampler") if isinstance(leaf, WRAPPERS) else leaf.dataset
        whole: Any = type(leaf)(source, 1, 0, leaf.shuffle, leaf.seed, drop_last=False)
    else:  # what Lightning puts in for a sampler like this one
        sampler = indices if isinstance(loader.sampler, ShardOrder) else loader.sampler
        seed = epoch.begun[SEED]
        if isinstance(sampler, RandomSampler | SequentialSampler):
            whole = DistributedSampler(loader.dataset, 1, 0, shuffle=True, seed=seed)
        else:
            whole = DistributedSamplerWrapper(EpochOrder(sampler, epoch.seed), 1, 0, shuffle=True, seed=seed)
    whole.set_epoch(epoch.number)
    return list(whole)


def _own_order(
    loader: DataLoader[Any], indices: Any, leaf: Any, segments: Sequence[Segment], epoch: Epoch
) -> list[Any]:
    """Return what is left of an epoch in the order of the user's own sampler, after what one replica has consumed."""
    sampler: Any = leaf
    if isinstance(leaf, WRAPPERS):
        sampler = private(leaf.dataset, "_sampler").sampler
    elif isinstance(leaf, DistributedSampler):
        sampler = _own_sampler(leaf.dataset, epoch.begun.get(RANDOM))
    batches = drawing_from(sampler, loader, indices, leaf)
    if hasattr(batches, "drop_last"):
        batches.drop_last = False
    generator = getattr(sampler, "generator", None)
    is_the_loaders = generator is not None and "indices.sampler.generator" not in epoch.before
    set_generator_states(epoch.before, {"generator": generator if is_the_loaders else None, "indices": batches})
    if is_the_loaders:  # from which a DataLoader draws the seed of its workers first
        torch.empty((), dtype=torch.int64).random_(generator=generator)
    _set_batch_size(batches, segments[-1][1])
    order = drawn(_later(batches, segments), epoch.seed, epoch.number, epoch.drawing)
    return list(itertools.chain.from_iterable(order)) if batches is not sampler else list(order)


def _own_sampler(dataset: Any, arguments: dict[str, Any] | None) -> Sampler[Any]:
    """Return a sampler of the user's that Lightning replaces without a wrapper."""
    if arguments is None:
        return SequentialSampler(dataset)
    has_generator = arguments["generator"]
    return RandomSampler(dataset, **{**arguments, "generator": torch.Generator() if has_generator else None})


def _set_batch_size(batches: Any, size: int | None) -> None:
    if size is not None and batch_size_of(batches) is not None:
        batches.batch_size = size


def _later(indices: Any, segments: Sequence[Segment]) -> Any:
    """Return the rest of an order that every replica reads for itself."""
    sizes = {size for _, size, _ in segments}
    if type(indices) is BatchSampler:
        position = sum((size or 1) * batches for _, size, batches in segments)
        return BatchSampler(Later(indices.sampler, position), indices.batch_size, indices.drop_last)
    if sizes != {batch_size_of(indices)}:
        rule = "This epoch was begun with another batch size, and a batch sampler of one's own cannot be drawn again"
        fix = "Keep the batch size, or go on from a checkpoint of the end of an epoch"
        raise ConfigError(
            "batch_sampler", f"batch size {batch_size_of(indices)}, and before {sorted(map(str, sizes))}", rule, fix
        )
    return Later(indices, sum(batches for _, _, batches in segments))


def _without(items: list[Any], consumed: Counter[Any]) -> list[Any]:
    """Return `items` less the first occurrences of those that were consumed."""
    left = []
    for item in items:
        if consumed[item] > 0:
            consumed[item] -= 1
        else:
            left.append(item)
    return left
