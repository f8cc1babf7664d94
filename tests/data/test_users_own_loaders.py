"""What a user's own code sees of a loader, its sampler and its data set: as if they were not prepared for a rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, cast

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.overrides import distributed
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_mm5d.data.loader import group_batches, shard_loader
from lightning_mm5d.data.samplers import batch_size_of, placed
from lightning_mm5d.trainer.resume import Resume


class Noisy(Dataset[torch.Tensor]):
    """Draws for a whole batch before it looks at the indices; `offset` is the user's to change."""

    offset = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(()) + self.offset

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        noise = torch.rand(len(indices))
        assert type(indices) is list
        return [*noise]


class Buckets(BatchSampler):
    widest = 7


class Stream:
    rate = 1

    def __iter__(self) -> Any:
        return iter(range(self.rate))


def _alone(loader: Any, **options: Any) -> Any:
    return shard_loader(loader, shards=[0], num_shards=1, seed=1, unshared=True, **options)


def test_a_batch_sampler_shows_its_attributes_and_takes_new_values() -> None:
    loader = _alone(DataLoader(range(8), batch_sampler=Buckets(SequentialSampler(range(8)), 2, False)))
    assert (loader.batch_sampler.widest, loader.batch_sampler.drop_last) == (7, False)
    loader.batch_sampler.batch_size = 4
    assert [len(batch) for batch in loader] == [4, 4]


class Listing(BatchSampler):
    """Keeps what it calls batches, and is told the epoch."""

    def __iter__(self) -> Any:
        return iter(self.batches)

    def set_epoch(self, epoch: int) -> None:
        self.batches = [[epoch]]


def test_a_batch_sampler_may_keep_batches_of_its_own_and_shows_what_it_draws_from() -> None:
    batches = Listing(SequentialSampler(range(8)), 2, False)
    order = _alone(DataLoader(range(8), batch_sampler=batches)).batch_sampler
    for epoch in range(2):
        order.set_epoch(epoch)
        assert [*order] == [[epoch]]
    assert batch_size_of(batches) == batch_size_of(order) == 2
    assert (len(order.sampler), [*order.sampler]) == (8, [*range(8)])


def test_a_batch_sampler_that_is_checked_shows_its_attributes_and_takes_new_values() -> None:
    leaf = DistributedSampler(range(8), 2, 0, shuffle=False)
    loader = DataLoader(range(8), batch_sampler=Buckets(leaf, 2, False))
    checked = placed(loader, loader.batch_sampler, leaf, DistributedSampler(range(8), 2, 1, shuffle=False))
    assert (checked.widest, batch_size_of(checked)) == (7, 2)
    checked.batch_size = 4
    assert [*checked] == [[1, 3, 5, 7]]


class Epochs:
    """Anything that may be told an epoch; it notes those that it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class Indices(Epochs, Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        return 8


class Batches(Epochs, BatchSampler):
    """Has its epoch from the user's own code, as Lightning does not tell a batch sampler."""

    def __init__(self, sampler: Any) -> None:
        Epochs.__init__(self)
        BatchSampler.__init__(self, sampler, 2, False)


class Listed(Epochs, Stream):
    sampler: Any = None


def _told(wraps: Callable[[Any], Any], shape: str) -> dict[str, set[int]]:
    """Which epochs the parts of a loader are told by Lightning, and then by code of the user's own."""
    indices, listed = Indices(), Listed()
    batches = Batches(indices)
    loaders = {
        "sampler": lambda: DataLoader(range(8), batch_size=2, sampler=indices),
        "unbatched": lambda: DataLoader(range(8), batch_size=None, sampler=indices),
        "batches": lambda: DataLoader(range(8), batch_sampler=batches),
        "iterable": lambda: listed,
    }
    listed.sampler = indices
    loader = wraps(loaders[shape]())
    _set_sampler_epoch(loader, 3)
    if shape == "batches":
        loader.batch_sampler.set_epoch(7)
        assert loader.batch_sampler.sampler.told == indices.told
    return {name: set(part.told) for name, part in (("indices", indices), ("batches", batches), ("listed", listed))}


@pytest.mark.parametrize("shape", ["sampler", "unbatched", "batches", "iterable"])
def test_who_is_told_the_epoch_is_as_under_lightning_alone(shape: str) -> None:
    plain = _told(lambda loader: loader, shape)
    assert plain["indices"] == {3}
    assert plain["batches"] == ({7} if shape == "batches" else set())
    assert _told(_alone, shape) == plain


def test_a_data_set_that_reads_batches_draws_the_same_with_any_number_of_workers() -> None:
    read = [torch.cat(list(_alone(DataLoader(Noisy(), batch_size=2, num_workers=count)))) for count in (0, 1, 2)]
    assert torch.equal(read[0], read[1])
    assert torch.equal(read[0], read[2])


def test_a_data_set_without_batches_stays_the_users_own() -> None:
    read = []
    for count in (0, 1):
        loader = _alone(DataLoader(data := Noisy(), batch_size=None, num_workers=count))
        assert loader.dataset is data
        loader.dataset.offset = 5
        read.append(torch.stack(list(loader)))
    assert torch.equal(*read)
    assert read[0].min() >= 5


def test_a_loader_of_a_trainer_that_is_saved_or_copied_reads_the_same() -> None:
    wrapper = cast(Any, distributed)._IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(range(8)), 2, False))
    loader = _alone(DataLoader(Noisy(), batch_size=2, shuffle=True))
    loaders = [loader, group_batches(loader, 2), _alone(DataLoader(Noisy(), batch_sampler=wrapper))]
    for own in loaders:
        copies = [pickle.loads(pickle.dumps(own)), copy.deepcopy(own)]
        assert all(isinstance(one, DataLoader) for one in copies)
        expected, *read = ([str(batch) for batch in one] for one in (own, *copies))
        assert read == [expected, expected]


def test_predictions_show_plain_lists_of_indices() -> None:
    wrapper = cast(Any, distributed)._IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(range(6)), 2, False))
    loader = _alone(DataLoader(Noisy(), batch_sampler=wrapper, num_workers=1))
    assert len(list(loader)) == 3
    assert [*map(type, loader.batch_sampler.seen_batch_indices)] == [list] * 3
    assert loader.batch_sampler.seen_batch_indices == [[0, 1], [2, 3], [4, 5]]


def test_an_iterable_keeps_its_class_and_takes_new_values() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    resume = Resume()
    loader = _alone(Stream(), trainer=resume.watch(trainer))
    assert isinstance(loader, Stream)
    loader.rate = 3
    assert list(loader) == [0, 1, 2]
    assert resume.watch(trainer) is resume.watch(trainer)
    other = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert not resume.watch(other).belongs_to(trainer)
