"""The samples of a step are dealt over replicas by what the data set says that they cost, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.loader import shard_loader
from lightning_mm5d.data.samplers import Epoch, Start
from lightning_mm5d.features.balanced_microbatches.feature import BalancedMicrobatches
from lightning_mm5d.features.balanced_microbatches.longest_first import Exchange, costs_of, digest_of
from lightning_mm5d.features.elastic import rest_of_shards

IMAGES = np.minimum(30, np.random.default_rng(0).lognormal(1, 1, 200)).astype(int)


class Numbers(Dataset):
    """Items that are their own indices, and what they cost."""

    def __init__(self, count: int = 200, costs: Any = None) -> None:
        self.count = count
        if costs is not None:
            self.sample_costs = costs

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Compared:
    """In place of the ranks' agreement: keeps what one rank states."""

    def __init__(self) -> None:
        self.stated: list[Any] = []

    def check(self, what: str, statement: Any) -> None:
        self.stated.append(statement)


def made(loader: Any, shards: list[int], replicas: int, *, training: bool = True, **options: Any) -> Any:
    """The loader of a rank under `balance`."""
    loader = shard_loader(loader, shards=shards, num_shards=replicas, seed=0, **options)
    trainer: Any = SimpleNamespace(training=training)
    BalancedMicrobatches({"balance": True}).loading(loader, trainer, None)
    return loader


def steps(
    dataset: Any, replicas: int, *, shuffle: bool = True, epoch: int = 0, drop_last: bool = False, **options: Any
) -> list[list[list[int]]]:
    """For each step the batches of all replicas, each read as its own rank reads it."""
    found = []
    for shard in range(replicas):
        sampler = DistributedSampler(dataset, replicas, shard, shuffle=shuffle)
        loader = made(DataLoader(dataset, 4, sampler=sampler, drop_last=drop_last), [shard], replicas, **options)
        loader.batch_sampler.sampler.set_epoch(epoch)
        found.append([batch.tolist() for batch in loader])
        assert len(found[-1]) == len(loader)
    return [[*step] for step in zip(*found, strict=True)]


def sizes(found: list[list[list[int]]]) -> list[list[int]]:
    return [[len(batch) for batch in step] for step in found]


def contents(found: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(sample for batch in step for sample in batch) for step in found]


def busiest(found: list[list[list[int]]]) -> float:
    """The most of a replica over the mean, the mean over all steps."""
    sums = np.array([[IMAGES[batch].sum() for batch in step] for step in found])
    return float((sums.max(axis=1) / sums.mean(axis=1)).mean())


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("count", "replicas"), [(200, 2), (199, 4), (61, 3)])
def test_each_step_has_the_samples_and_each_replica_the_number_that_it_had(
    count: int, replicas: int, shuffle: bool, drop_last: bool
) -> None:
    for epoch in range(2):
        options: Any = {"shuffle": shuffle, "drop_last": drop_last, "epoch": epoch}
        found = steps(Numbers(count, IMAGES[:count]), replicas, **options)
        plain = steps(Numbers(count), replicas, **options)
        assert contents(found) == contents(plain)
        assert sizes(found) == sizes(plain)
        assert found == steps(Numbers(count, {"images": IMAGES[:count].tolist()}), replicas, **options)
        assert busiest(found) < busiest(plain)


def test_the_busiest_replica_is_at_most_a_twentieth_over_the_mean_or_has_the_largest_sample() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        rows = np.minimum(30, generator.lognormal(1, 1, 64)).astype(int)
        step = np.arange(64).reshape(4, 16).tolist()
        sums = [rows[batch].sum() for batch in Exchange({"images": rows.astype(float)}).evened(step)]
        assert max(sums) <= 1.05 * max(rows.sum() / 4, rows.max()), sums


def test_of_several_kinds_none_has_a_busy_replica() -> None:
    costs = {"images": [9, 9, 0, 0, 0, 0, 9, 9], "tokens": [0, 0, 0.5, 0.5, 0.5, 0.5, 0, 0]}
    (step,) = steps(Numbers(8, costs), 2, shuffle=False)
    for column in costs.values():
        assert len({sum(column[sample] for sample in batch) for batch in step}) == 1


def test_a_rank_that_serves_several_replicas_reads_what_their_ranks_read() -> None:
    dataset = Numbers(60, IMAGES[:60])
    loader = made(DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 3, 0)), [0, 2], 3)
    found = [[batch.tolist() for batch in group] for group in loader]
    assert found == [[step[0], step[2]] for step in steps(dataset, 3)]


def test_a_users_own_sampler_is_drawn_once_for_all() -> None:
    dataset, drawn = Numbers(200, IMAGES), []
    for shard in range(2):
        sampler = DistributedSamplerWrapper(SubsetRandomSampler(range(0, 200, 2)), num_replicas=2, rank=shard)
        drawn.append([batch.tolist() for batch in made(DataLoader(dataset, 5, sampler=sampler), [shard], 2)])
    assert sorted(sample for one in drawn for batch in one for sample in batch) == [*range(0, 200, 2)]
    assert busiest([[*step] for step in zip(*drawn, strict=True)]) < 1.1


def test_an_epoch_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are left out are not planned, so that a late position costs nothing."""
    dataset = Numbers(200, IMAGES)
    whole = steps(dataset, 2)
    planned = []
    evened = Exchange.evened
    monkeypatch.setattr(Exchange, "evened", lambda self, step: planned.append(step) or evened(self, step))
    loader = made(DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, 1)), [1], 2)
    loader.served_order.start = Start(20, 20)
    assert [*loader.served_order] == [step[1] for step in whole[20:]]
    assert len(planned) == len(whole) - 20


def test_other_replicas_share_what_is_left_evenly() -> None:
    """Three replicas took two steps of 12 samples; two replicas take the rest."""
    dataset = Numbers(200, IMAGES)
    consumed = [sample for step in steps(dataset, 3)[:2] for batch in step for sample in batch]
    loader = DataLoader(dataset, batch_sampler=BatchSampler(DistributedSampler(dataset, 2, 0), 4, False))
    epoch = Epoch(number=0, seed=0, begun={"seed": 0}, before={})
    rest = rest_of_shards(loader, loader.batch_sampler, [(3, 4, 2)], (0, 1), 2, epoch=epoch)
    found = [[*step] for step in zip(*Exchange(costs_of(dataset))(rest, 0), strict=True)]
    assert sorted([*consumed, *(sample for step in found for batch in step for sample in batch)]) == [*range(200)]
    assert busiest(found) < 1.1 < busiest([[*step] for step in zip(*rest, strict=True)])


def test_replicas_of_unlike_speeds_take_work_in_proportion() -> None:
    found = steps(Numbers(200, IMAGES), 2, shares=(6, 2))
    assert {tuple(map(len, step)) for step in found} == {(6, 2)}
    assert contents(found) == contents(steps(Numbers(), 2, shares=(6, 2)))
    work = np.array([[IMAGES[batch].sum() for batch in step] for step in found]).sum(axis=0)
    assert 0.7 < work[0] / work.sum() < 0.8


def test_what_is_not_dealt_stays_as_it_is() -> None:
    """No costs, validation, batches that somebody else makes, and data that each replica reads in full."""
    assert steps(Numbers(), 2, shuffle=False)[0] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert steps(Numbers(200, IMAGES), 2, shuffle=False, training=False)[0] == [[0, 2, 4, 6], [1, 3, 5, 7]]

    class Own(BatchSampler):
        pass

    dataset = Numbers(200, IMAGES)
    sampler = DistributedSampler(dataset, 2, 0, shuffle=False)
    for loader in (
        DataLoader(dataset, batch_sampler=Own(sampler, 4, False)),
        DataLoader(dataset, 4, sampler=SequentialSampler(dataset)),
        DataLoader(dataset, None, sampler=sampler),
        [torch.arange(4)],
    ):
        first = next(iter(shard_loader(loader, shards=[0], num_shards=2, seed=0)))
        assert torch.equal(torch.as_tensor(next(iter(made(loader, [0], 2)))), torch.as_tensor(first))


def test_ranks_compare_what_the_data_set_says() -> None:
    agreement: Any = Compared()
    trainer: Any = SimpleNamespace(training=True)
    for costs in (IMAGES, IMAGES.tolist(), IMAGES[::-1], None):
        dataset = Numbers(200, costs)
        loader = shard_loader(
            DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, 0)), shards=[0], num_shards=2, seed=0
        )
        BalancedMicrobatches({"balance": True}).loading(loader, trainer, agreement)
    first, same, other, none = (stated["digest of sample_costs"] for stated in agreement.stated)
    assert first == same == digest_of({"cost": IMAGES.astype(float)})
    assert len({first, other, none}) == 3
    assert none is None


def test_costs_are_given_by_kind_or_by_a_method_and_a_subset_has_those_of_its_samples() -> None:
    dataset = Numbers(4, lambda: {"images": [3, 0, 1, 2], "seconds": torch.tensor([0.5, 0, 0, 1])})
    found = costs_of(Subset(Subset(dataset, [3, 1, 0]), (2, 0)))
    assert {kind: column.tolist() for kind, column in found.items()} == {"images": [3, 2], "seconds": [0.5, 1]}
    assert costs_of(Numbers()) == {} == costs_of([1, 2])


@pytest.mark.parametrize(
    ("costs", "got"),
    [
        ([1.0] * 3, r"Numbers.sample_costs: got '\[3\] for 4 samples'"),
        ({"images": [[1], [2], [3], [4]]}, r"Numbers.sample_costs\['images'\]: got '\[4, 1\] for 4 samples'"),
        ([0, 1, -2, 3], "got '-2 for sample 2'"),
        ([0, float("nan"), 2, 3], "got 'nan for sample 1'"),
        ([0, 1, 2, float("inf")], "got 'inf for sample 3'"),
        ([{"images": 3}] * 4, "got 'list that is not of numbers'"),
    ],
)
def test_costs_that_are_none_are_refused(costs: Any, got: str) -> None:
    dataset = Numbers(4, costs)
    with pytest.raises(ConfigError, match=got + r". It has one finite number of at least 0 a sample"):
        made(DataLoader(dataset, 2, sampler=DistributedSampler(dataset, 2, 0)), [0], 2)
