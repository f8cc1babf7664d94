"""The rest of an epoch between one replica, in the user's order, and several, in that of the distributed sampler."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.data.samplers import Epoch, drawn, order_of
from lightning_mm5d.features.elastic import rest_of_shards

COUNT = 40


def batches(sampler: Any) -> BatchSampler:
    return BatchSampler(sampler, 4, False)


def rest(own: Any, indices: Any, begun: Any, segments: Any, shards: Any, count: int, before: Any = None) -> list[Any]:
    loader = DataLoader(torch.arange(COUNT), 4, sampler=own)
    epoch = Epoch(number=1, seed=7, begun=begun, before=before or {})
    found = rest_of_shards(loader, indices, segments, shards, count, epoch=epoch)
    return [sample for one in found for batch in one for sample in batch]


def test_two_replicas_go_on_with_what_one_replica_has_left_of_its_own_order() -> None:
    for own in (RandomSampler(range(COUNT)), SequentialSampler(range(COUNT))):
        order = [sample for batch in drawn(batches(own), 7, 1) for sample in batch]
        shared = batches(DistributedSampler(range(COUNT), 2, 0, shuffle=True, seed=3))
        left = [rest(own, shared, order_of(batches(own)), [(1, 4, 3)], [shard], 2) for shard in range(2)]
        assert left == [order[12::2], order[13::2]]


def test_a_generator_of_a_sampler_is_put_back_before_its_order_is_drawn_again() -> None:
    own = RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(5))
    before = {"indices.sampler.generator": own.generator.get_state()}
    order = list(own)
    shared = batches(DistributedSampler(range(COUNT), 2, 0, shuffle=True, seed=3))
    assert sorted(rest(own, shared, order_of(batches(own)), [(1, 4, 3)], [0, 1], 2, before)) == sorted(order[12:])


def test_one_replica_goes_on_with_what_two_replicas_have_left_of_the_shared_order() -> None:
    own = RandomSampler(range(COUNT))
    whole = DistributedSampler(range(COUNT), 1, 0, shuffle=True, seed=3)
    whole.set_epoch(1)
    order = list(whole)
    assert rest(own, batches(own), {"seed": 3}, [(2, 4, 2)], [0], 1) == order[16:]
    assert rest(own, batches(own), {"seed": 3}, [(2, 4, 2), (1, 4, 1)], [0], 1) == order[20:]
