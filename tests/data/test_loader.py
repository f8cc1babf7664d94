"""What each rank reads: shards, order and augmentation, without any process group.

Two loaders that stand for two ranks are made apart from each other, with the global random state moved on in
between, as it would be on ranks that hold different parts of a model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.data.loader import ReplicaBatches, per_replica, shard_loader, split_replicas
from lightning_mm5d.data.random_state import seeded
from loader_cases import Augmented


class ShuffledBatches(BatchSampler):
    """Shuffles its batches, and each batch when its turn comes, with the global random state."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        random.shuffle(batches)
        for batch in batches:
            yield random.sample(batch, len(batch))


class UsersLoader(DataLoader[Any]):
    """A user's class whose __init__ could not be called again."""

    def __init__(self, size: int, **kwargs: Any) -> None:
        super().__init__(Augmented(size), **kwargs)


class Buckets:
    """A batch sampler of a user's own, which knows its epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([self.epoch, at] for at in range(3))

    def __len__(self) -> int:
        return 3

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


MakeLoader = Callable[[int, int], "DataLoader[Any]"]


def make_plain(shard: int, num_shards: int) -> DataLoader[Any]:
    data = Augmented(22)
    sampler = DistributedSampler(data, num_replicas=num_shards, rank=shard, shuffle=True, seed=3)
    return DataLoader(data, batch_size=2, sampler=sampler)


def make_workers(shard: int, num_shards: int) -> DataLoader[Any]:
    data = Augmented(22)
    sampler = DistributedSampler(data, num_replicas=num_shards, rank=shard)
    return DataLoader(data, batch_size=2, sampler=sampler, num_workers=2, persistent_workers=True)


def make_weighted(shard: int, num_shards: int) -> DataLoader[Any]:
    weighted = WeightedRandomSampler([1.0] * 22, 22)
    sampler = DistributedSamplerWrapper(weighted, num_replicas=num_shards, rank=shard)
    return DataLoader(Augmented(22), batch_size=2, sampler=sampler)


def make_own_generator(shard: int, num_shards: int) -> DataLoader[Any]:
    shuffled = RandomSampler(range(22), generator=torch.Generator().manual_seed(1))
    sampler = DistributedSamplerWrapper(shuffled, num_replicas=num_shards, rank=shard)
    return DataLoader(Augmented(22), batch_size=2, sampler=sampler)


def make_shuffled_batches(shard: int, num_shards: int) -> DataLoader[Any]:
    data = Augmented(22)
    sampler = DistributedSampler(data, num_replicas=num_shards, rank=shard)
    return DataLoader(data, batch_sampler=ShuffledBatches(sampler, 2, False))


def make_unbatched(shard: int, num_shards: int) -> DataLoader[Any]:
    data = Augmented(22)
    sampler = DistributedSampler(data, num_replicas=num_shards, rank=shard)
    return DataLoader(data, batch_size=None, sampler=sampler)


MAKERS = [make_plain, make_workers, make_weighted, make_own_generator, make_shuffled_batches, make_unbatched]
workers_on_few_cores = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:.*multi-threaded, use of fork:DeprecationWarning"
)


def read(make: MakeLoader, shards: Sequence[int], num_shards: int, epochs: int = 2) -> list[Any]:
    """All steps of the epochs as one rank reads them, in a state of its own."""
    random.seed()
    np.random.seed()
    torch.seed()
    loader = shard_loader(make(shards[0], num_shards), shards=shards, num_shards=num_shards, seed=7)
    steps: list[Any] = []
    for epoch in range(epochs):
        set_epoch(loader, epoch)
        read_now = list(loader)
        assert len(read_now) == len(loader)
        steps += read_now
    return steps


def set_epoch(loader: Any, epoch: int) -> None:
    """The two places where Lightning looks for a sampler."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


@workers_on_few_cores
@pytest.mark.parametrize("make", MAKERS)
def test_peers_of_one_replica_read_equal_batches_and_augmentation(make: MakeLoader) -> None:
    for one, other in zip(read(make, [1], 2), read(make, [1], 2), strict=True):
        assert torch.equal(one, other)


@workers_on_few_cores
@pytest.mark.parametrize("make", MAKERS)
def test_an_encoder_serving_two_replicas_reads_what_each_of_them_reads(make: MakeLoader) -> None:
    both = read(make, [1, 2], 3)
    assert all(isinstance(step, ReplicaBatches) for step in both)
    for position, shard in enumerate([1, 2]):
        for step, alone in zip(both, read(make, [shard], 3), strict=True):
            assert torch.equal(step[position], alone)


@workers_on_few_cores
@pytest.mark.parametrize("make", MAKERS)
def test_augmentation_differs_between_epochs_steps_and_replicas(make: MakeLoader) -> None:
    drawn = [step.reshape(-1, 4)[:, 1:] for shard in range(2) for step in read(make, [shard], 2)]
    numbers = torch.cat(drawn).flatten().tolist()
    assert len(set(numbers)) == len(numbers)


@workers_on_few_cores
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_read_depends_on_seed_and_epoch_not_on_what_was_read_before(num_workers: int) -> None:
    def read_epochs(seed: int, *epochs: int) -> list[float]:
        loader = DataLoader(Augmented(6), 2, sampler=DistributedSampler(range(6), 1, 0), num_workers=num_workers)
        sharded = shard_loader(loader, shards=[0], num_shards=1, seed=seed)
        for epoch in epochs:
            set_epoch(sharded, epoch)
            last = torch.cat(list(sharded)).flatten().tolist()
        return last

    assert read_epochs(7, 1) == read_epochs(7, 0, 1)
    assert read_epochs(7, 1) != read_epochs(8, 1)
    assert read_epochs(7, 1) != read_epochs(7, 0)


def test_shards_cover_the_data_set_and_reshuffle_each_epoch() -> None:
    steps = read(make_plain, [0, 1], 2)
    first, second = ([int(i) for step in half for b in step for i in b[:, 0]] for half in (steps[:6], steps[6:]))
    assert sorted(first) == sorted(second) == list(range(22))
    assert first != second


@workers_on_few_cores
@pytest.mark.parametrize("make", MAKERS)
def test_loading_leaves_the_random_state_of_the_rank_alone(make: MakeLoader) -> None:
    loader = shard_loader(make(0, 2), shards=[0, 1], num_shards=2, seed=7)
    states = random.getstate(), torch.get_rng_state()
    numpy_state = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    for _ in loader:
        pass
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.random.get_state()[1].tolist() == numpy_state  # type: ignore[union-attr]


def test_a_loader_class_with_arguments_of_its_own_stays_that_class() -> None:
    data = UsersLoader(8, batch_size=4, sampler=DistributedSampler(range(8), num_replicas=2, rank=0))
    loader = shard_loader(data, shards=[0, 1], num_shards=2, seed=0)
    assert isinstance(loader, UsersLoader)
    assert type(loader).__name__ == "UsersLoader"
    assert (len(data), len(loader)) == (1, 1)
    assert not isinstance(next(iter(data)), ReplicaBatches)


def test_a_users_distributed_sampler_over_all_ranks_is_placed_on_the_replica() -> None:
    data = range(8)
    sampler = DistributedSampler(data, num_replicas=4, rank=3, shuffle=False)
    loader = shard_loader(DataLoader(data, 2, sampler=sampler), shards=[1], num_shards=2, seed=0)
    assert [batch.tolist() for batch in loader] == [[1, 3], [5, 7]]


def test_prediction_repeats_no_sample_and_gives_a_short_last_step() -> None:
    sampler = UnrepeatedDistributedSamplerWrapper(SequentialSampler(range(5)), num_replicas=2, rank=0, shuffle=False)
    loader = DataLoader(range(5), batch_size=1, sampler=sampler)
    steps = list(shard_loader(loader, shards=[0, 1], num_shards=2, seed=0))
    assert [[batch.item() for batch in step] for step in steps] == [[0, 1], [2, 3], [4]]
    assert split_replicas(steps[-1], 2) == [torch.tensor([4]), None]


def tell_worker(worker_id: int) -> None:
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    dataset.worker = worker_id


class Told(Augmented):
    worker = -1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.worker])


@workers_on_few_cores
def test_a_users_worker_init_fn_counts_the_workers_of_one_replica() -> None:
    def make(shard: int, num_shards: int) -> DataLoader[Any]:
        sampler = DistributedSampler(range(22), num_replicas=num_shards, rank=shard)
        return DataLoader(Told(22), 2, sampler=sampler, num_workers=2, worker_init_fn=tell_worker)

    steps = read(make, [0, 1], 2, epochs=1)[:2]
    assert [[int(batch[0]) for batch in step] for step in steps] == [[0, 0], [1, 1]]


@workers_on_few_cores
def test_augmentation_is_the_same_with_any_number_of_workers() -> None:
    def reads(num_workers: int) -> list[Any]:
        def make(shard: int, num_shards: int) -> DataLoader[Any]:
            sampler = DistributedSampler(range(10), num_replicas=num_shards, rank=shard)
            return DataLoader(Augmented(10), 2, sampler=sampler, num_workers=num_workers)

        return read(make, [1], 2)

    assert_equal = torch.testing.assert_close
    assert_equal(reads(0), reads(1), rtol=0, atol=0)
    assert_equal(reads(0), reads(2), rtol=0, atol=0)


@workers_on_few_cores
def test_lightnings_seeding_by_global_rank_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn

    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    firsts = []
    for rank in range(2):
        loader = shard_loader(make_workers(0, 1), shards=[0], num_shards=1, seed=7)
        _auto_add_worker_init_fn(loader, rank)
        firsts.append(next(iter(loader)))
    assert torch.equal(*firsts)


def test_split_and_map_reach_into_a_collection_of_loaders() -> None:
    batch = {"a": ReplicaBatches(([1], [2])), "b": ReplicaBatches(([3], [4]))}
    assert split_replicas(batch, 2) == [{"a": [1], "b": [3]}, {"a": [2], "b": [4]}]
    assert split_replicas([1], 1) == [[1]]
    assert per_replica(len)(batch["a"]) == ReplicaBatches((1, 1))
    assert per_replica(len)([5, 6]) == 2


def test_seeded_is_a_function_of_its_key_and_restores_the_state() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with seeded("a", 1):
        inside = torch.rand(1), random.random(), np.random.rand()
    assert torch.equal(torch.rand(2), expected)
    with seeded("a", 1):
        assert (torch.rand(1), random.random(), np.random.rand()) == inside
    with seeded("a", 2):
        assert random.random() != inside[1]


def test_a_batch_sampler_is_told_its_epoch_by_its_user_as_lightning_tells_samplers_alone() -> None:
    plain = DataLoader(Augmented(6), batch_sampler=Buckets())
    loader = shard_loader(plain, shards=[0], num_shards=1, seed=7)
    for place in (plain, loader):
        _set_sampler_epoch(place, 2)
        assert next(iter(place.batch_sampler))[0] == 0
    loader.batch_sampler.set_epoch(2)
    assert next(iter(loader.batch_sampler))[0] == 2
