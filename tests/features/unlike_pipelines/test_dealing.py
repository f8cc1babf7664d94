"""Replicas of unlike speeds take unlike parts of the same samples, each sample once, also in a resumed epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.loader import shard_loader
from lightning_mm5d.data.samplers import Epoch
from lightning_mm5d.features.elastic import rest_of_shards


def batches(count: int, shares: tuple[int, ...], *, drop_last: bool = False, shuffle: bool = True) -> list[Any]:
    """For each replica its batches, with a batch size of 4 on average."""
    found = []
    for shard in range(len(shares)):
        sampler = DistributedSampler(range(count), len(shares), shard, shuffle=shuffle)
        loader = DataLoader(torch.arange(count), 4, sampler=sampler, drop_last=drop_last)
        made = shard_loader(loader, shards=[shard], num_shards=len(shares), seed=0, shares=shares)
        found.append([batch.tolist() for batch in made])
        assert len(found[-1]) == len(made)
    return found


def test_a_step_takes_the_next_samples_and_deals_them_out_in_stretches() -> None:
    assert batches(16, (6, 2), shuffle=False) == [
        [[0, 1, 2, 3, 4, 5], [8, 9, 10, 11, 12, 13]],
        [[6, 7], [14, 15]],
    ]


@pytest.mark.parametrize("shares", [(6, 2), (1, 1), (5, 3), (1, 7, 4)])
@pytest.mark.parametrize("count", [24, 25, 26, 31])
def test_an_epoch_holds_each_sample_once(count: int, shares: tuple[int, ...]) -> None:
    replicas = batches(count, shares)
    assert len({len(one) for one in replicas}) == 1
    assert all(batch for one in replicas for batch in one)
    left = count % (4 * len(shares))
    if left == 0 or left >= len(shares):  # fewer samples than replicas are repeated, so that each has one
        assert sorted(sample for one in replicas for batch in one for sample in batch) == list(range(count))
    dropped = [sample for one in batches(count, shares, drop_last=True) for batch in one for sample in batch]
    assert len(dropped) == len(set(dropped)) == count - left


def test_steps_hold_the_same_samples_whatever_the_shares() -> None:
    def steps(shares: tuple[int, ...]) -> list[set[int]]:
        return [{sample for batch in step for sample in batch} for step in zip(*batches(24, shares), strict=True)]

    assert steps((6, 2)) == steps((1, 1)) == steps((1, 3))


def test_the_rest_of_an_epoch_is_dealt_out_to_other_replicas() -> None:
    """Three replicas took two steps of 12 samples; two replicas with the shares 5 and 3 take what is left."""
    sampler = DistributedSampler(range(40), 2, 0, shuffle=True, seed=3)
    indices = BatchSampler(sampler, 4, False)
    loader = DataLoader(torch.arange(40), batch_sampler=indices)
    first = [BatchSampler(DistributedSampler(range(40), 3, shard, seed=3), 4, False) for shard in range(3)]
    consumed = [sample for one in first for batch in list(one)[:2] for sample in batch]
    epoch = Epoch(number=0, seed=0, begun={"seed": 0}, before={})
    rest = rest_of_shards(loader, indices, [(3, 4, 2)], (0, 1), 2, epoch=epoch, shares=(5, 3))
    found = [list(one) for one in rest]
    assert [[len(batch) for batch in one] for one in found] == [[5, 5], [3, 3]]
    assert sorted([*consumed, *(sample for one in found for batch in one for sample in batch)]) == list(range(40))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(8))


def test_what_cannot_be_dealt_out_is_refused_where_shares_are_unlike_and_left_alone_where_not() -> None:
    for loader in (DataLoader(Stream(), 2), DataLoader(torch.arange(8), 2), [1, 2]):
        with pytest.raises(ConfigError, match=r"dataloader: .*speeds=\[1, 1\]"):
            shard_loader(loader, shards=[0], num_shards=2, seed=0, shares=(3, 1))
        made = shard_loader(loader, shards=[0], num_shards=2, seed=0, shares=(2, 2))
        assert len(list(made)) == len(list(loader))
