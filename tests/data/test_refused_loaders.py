"""Loaders that cannot be sharded, or whose names in Lightning have moved, are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides import distributed
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.loader import shard_loader


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class Stateful(DataLoader[Any]):
    """Has a state, as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class FixedBatches(BatchSampler):
    """Fixes its batches when it is made."""

    def __init__(self, sampler: Sampler[int], batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.batches = list(super().__iter__())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class OwnSampler(DistributedSampler[Any]):
    """A distributed sampler of the user's own class."""


def test_an_iterable_data_set_whose_loader_has_a_state_is_refused_for_two_replicas() -> None:
    loader = Stateful(Stream(), batch_size=3)
    alone = shard_loader(loader, shards=[1], num_shards=2, seed=0)
    assert [batch.tolist() for batch in alone] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigError, match="a state of its own cannot be read for each"):
        shard_loader(loader, shards=[0, 1], num_shards=2, seed=0)


def test_batches_fixed_before_sharding_are_refused_not_paired_wrongly() -> None:
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    loader = DataLoader(range(8), batch_sampler=FixedBatches(sampler, 2, False))
    sharded = shard_loader(loader, shards=[0, 1], num_shards=2, seed=0)
    with pytest.raises(ConfigError, match="Build the batches in its __iter__"):
        list(sharded)


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        (DataLoader(range(8)), "must draw from a DistributedSampler"),
        ([1, 2, 3], "must be a torch DataLoader"),
        (DataLoader(range(8), sampler=OwnSampler(range(8), 2, 0)), "num_replicas=2 and rank=0"),
    ],
)
def test_what_cannot_serve_two_replicas_is_refused(loader: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        shard_loader(loader, shards=[0, 1], num_shards=2, seed=0)


def test_a_sampler_of_the_users_own_class_is_kept_where_it_fits_and_refused_where_not() -> None:
    loader = DataLoader(range(4), 2, sampler=OwnSampler(range(4), 2, 1, shuffle=False))
    assert [batch.tolist() for batch in shard_loader(loader, shards=[1], num_shards=2, seed=0)] == [[1, 3]]
    with pytest.raises(ConfigError, match="serves replicas"):
        shard_loader(loader, shards=[0], num_shards=2, seed=0)


@pytest.mark.parametrize("name", ["_IndexBatchSamplerWrapper", "_sampler"])
def test_a_name_of_lightnings_that_has_moved_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sampler = DistributedSamplerWrapper(RandomSampler(range(8)), num_replicas=2, rank=0)
    loader = DataLoader(range(8), batch_size=2, sampler=sampler)
    shard_loader(loader, shards=[0, 1], num_shards=2, seed=7)
    monkeypatch.delattr(distributed if name.startswith("_Index") else sampler.dataset, name)
    with pytest.raises(ImportError, match=f"lightning 2.* has no .*{name}"):
        shard_loader(loader, shards=[0, 1], num_shards=2, seed=7)
