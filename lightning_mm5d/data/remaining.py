"""What is left of an epoch that other layouts began: the samples that none of their replicas has consumed.

A *segment* is what one layout consumed: ``(replicas, batch size, batches of each replica)``. The order of the whole
epoch does not depend on the layout. So each segment is drawn again, without loading anything, and what its replicas
consumed is taken out of the order. The replicas that go on share the rest, as they would share a data set.

It refuses samplers whose draws it cannot repeat for another number of replicas.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.dealing import DealtBatches
from lightning_mm5d.data.samplers import MOVABLE, WRAPPERS, drawn, leaf_of, placed

Segment = tuple[int, int | None, int]


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
    seed: int,
    epoch: int,
    shares: Sequence[int] | None = None,
) -> list[Any]:
    """Return for each shard what yields its indices in the rest of the epoch.

    Args:
        loader: of the user.
        indices: its batch sampler, or its sampler where it does not batch.
        segments: what was consumed, in order.
        shards: those that this rank serves.
        num_shards: that share the rest.
        seed: of the order.
        epoch: of the order.
        shares: microbatches of each of these replicas, where they are unlike. Those of earlier ones do not matter:
            the samples of a step are the same (see `dealing`).

    Raises:
        ConfigError: the samplers cannot be drawn again for another layout.
    """
    leaf = leaf_of(indices)
    if not isinstance(leaf, DistributedSampler):
        return [_later(indices, segments) for _ in shards]
    if type(leaf) not in MOVABLE:
        raise _unrepeatable(indices, segments, num_shards, f"a sampler of class {type(leaf).__name__}")
    wrapped: Any = leaf.dataset if isinstance(leaf, WRAPPERS) else None
    whole = type(leaf)(
        leaf.dataset if wrapped is None else wrapped._sampler, 1, 0, leaf.shuffle, leaf.seed, drop_last=False
    )
    whole.set_epoch(epoch)
    items = list(whole)

    def share(count: int, shard: int, batch_size: int | None) -> Any:
        batches = placed(loader, indices, leaf, Rest(items, count, shard, leaf.drop_last))
        _set_batch_size(batches, batch_size)
        return batches

    for count, batch_size, batches in segments:
        consumed: Counter[Any] = Counter()
        for shard in range(count):
            for batch in itertools.islice(drawn(share(count, shard, batch_size), seed, epoch), batches):
                consumed.update([batch] if batch_size is None and indices is leaf else batch)
        items = _without(items, consumed)
    left = [share(num_shards, shard, batch_size_of(indices)) for shard in shards]
    if shares is None:
        return left
    whole = Rest(items, 1, 0, drop_last=False)
    return [DealtBatches(whole, left[0].batch_size, left[0].drop_last, shares, shard) for shard in shards]


def batch_size_of(indices: Any) -> int | None:
    """Return the batch size that a batch sampler states; None without one."""
    size = getattr(getattr(indices, "batches", indices), "batch_size", None)
    return size if isinstance(size, int) else None


def _set_batch_size(batches: Any, size: int | None) -> None:
    batches = getattr(batches, "batches", batches)
    if size is not None and batch_size_of(batches) is not None:
        batches.batch_size = size


def _later(indices: Any, segments: Sequence[Segment]) -> Any:
    """Return the rest of an order that every replica reads for itself."""
    sizes = {size for _, size, _ in segments}
    if type(indices) is BatchSampler:
        position = sum((size or 1) * batches for _, size, batches in segments)
        return BatchSampler(Later(indices.sampler, position), indices.batch_size, indices.drop_last)
    if sizes != {batch_size_of(indices)}:
        raise ConfigError(
            "batch_sampler",
            f"batch size {batch_size_of(indices)}, and before {sorted(map(str, sizes))}",
            "This epoch was begun with another batch size, and a batch sampler of one's own cannot be drawn again",
            "Keep the batch size, or go on from a checkpoint of the end of an epoch",
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


def _unrepeatable(indices: Any, segments: Sequence[Segment], num_shards: int, what: str) -> ConfigError:
    return ConfigError(
        "dataloader",
        f"{type(indices).__name__} with {num_shards} replicas, and before {segments[-1][0]}",
        f"This epoch was begun with another number of replicas or another batch size, and {what} cannot be drawn again "
        "to find what is left",
        "Keep both, or go on from a checkpoint of the end of an epoch",
    )
