"""Batches of unlike sizes for replicas of unlike speeds.

Equal replicas draw every k-th sample of an order. Here a step takes the next samples of the whole order, as many as
equal replicas would take together, and deals them out in stretches: with a batch size of 6 and microbatches ``(8, 4)``
of 6 on average, the next 12 samples go to replica 0, the first 8 of them, and to replica 1. So the samples of a step
depend neither on the speeds nor on which replica takes how many, and an epoch can go on under other ones.

It refuses loaders whose order is not drawn by a `BatchSampler` from a `DistributedSampler` of the trainer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data.samplers import MOVABLE, WRAPPERS
from lightning_mm5d.layout.layout import shared_out


class DealtBatches(BatchSampler):
    """The batches of one replica.

    Args:
        sampler: yields the samples of all replicas, in order.
        batch_size: samples of a replica's batch on average.
        drop_last: whether a step that not all samples are left for is dropped.
        shares: microbatches of each replica.
        shard: number of this replica.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, shares: Sequence[int], shard: int) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.sampler: DistributedSampler[Any] = sampler
        self.shares, self.shard = tuple(shares), shard

    def __iter__(self) -> Iterator[list[Any]]:
        return (step[self.shard] for step in self.of_all_replicas())

    def of_all_replicas(self) -> Iterator[list[list[Any]]]:
        """Yield the batches of all replicas, step by step."""
        samples, whole = iter(self.sampler), self.batch_size * len(self.shares)
        while step := list(itertools.islice(samples, whole)):
            if len(step) < whole and self.drop_last:
                return
            yield self._dealt(step, whole)

    def __len__(self) -> int:
        whole, count = self.batch_size * len(self.shares), len(self.sampler)
        return count // whole if self.drop_last else -(-count // whole)

    def _dealt(self, step: list[Any], whole: int) -> list[list[Any]]:
        """The replicas' stretches; of a last step each takes its part of what is left, one sample at least."""
        step = (step * len(self.shares))[: max(len(step), len(self.shares))]
        total = sum(self.shares)
        ends = [whole * end // total for end in itertools.accumulate(self.shares, initial=0)]
        if len(step) < whole:
            ends = [0, *itertools.accumulate(shared_out(len(step), self.shares))]
        return [step[begin:end] for begin, end in itertools.pairwise(ends)]


def deals(dataloader: object, shares: Sequence[int]) -> bool:
    """Whether a loader's samples are dealt out; not where replicas take equal shares and draw in another way.

    Args:
        dataloader: what Lightning prepared.
        shares: microbatches of each replica.

    Raises:
        ConfigError: shares are unlike, and its samples cannot be dealt out.
    """
    batches = getattr(dataloader, "batch_sampler", None)
    leaf: object = getattr(batches, "sampler", None)
    if isinstance(dataloader, DataLoader) and type(batches) is BatchSampler and type(leaf) in MOVABLE:
        return True
    if len(set(shares)) == 1:
        return False
    raise ConfigError(
        "dataloader",
        type(dataloader).__name__,
        f"Replicas of unlike speeds take {', '.join(map(str, shares))} microbatches of a step, and only the trainer's "
        "own sampler deals samples out to them",
        "Return a DataLoader of a map-style data set with a batch_size, keep use_distributed_sampler=True, or give "
        f"replicas equal speeds, speeds={[1] * len(shares)}",
    )


def dealt(batches: BatchSampler, shares: Sequence[int], shard: int, whole: Any = None) -> DealtBatches:
    """Return what yields the batches of one replica.

    Args:
        batches: the batch sampler of equal replicas, of a loader that `deals`.
        shares: microbatches of each replica.
        shard: number of the replica.
        whole: yields the samples of all replicas, where an epoch goes on; by default all that `batches` draw from.
    """
    leaf: Any = batches.sampler
    return DealtBatches(_whole(leaf) if whole is None else whole, batches.batch_size, batches.drop_last, shares, shard)


def _whole(leaf: DistributedSampler[Any]) -> DistributedSampler[Any]:
    """A sampler that draws for all replicas what `leaf` draws for one of them."""
    source: Any = private(leaf.dataset, "_sampler") if isinstance(leaf, WRAPPERS) else leaf.dataset
    moved = type(leaf)(source, 1, 0, leaf.shuffle, leaf.seed, drop_last=False)
    moved.set_epoch(leaf.epoch)
    return moved
