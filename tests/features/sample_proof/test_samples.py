"""All ranks of a replica read the same samples: streams that shard themselves do, and what cannot is told so."""

from __future__ import annotations

import gc
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed
from torch.distributed import get_rank, get_world_size  # as by name, too
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, get_worker_info

from features.toys import (
    LANGUAGE,
    PAIR,
    PIPE,
    TWINS,
    VISION,
    Layout,
    Run,
    Samples,
    Toy,
    assert_same,
    figures,
    outcomes,
    weights,
)
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import RankMismatchError
from ranks import run_ranks
from sweeps import swept

BOTH = Layout(
    {"vision": Modality(dp_size=2, **VISION), "language": Modality(dp_size=2, pp_size=2, **LANGUAGE)},
    world=6,
    replicas=2,
)
"""vision: ranks 0-1; language: ranks 2-3 and 4-5 as stages, of two replicas"""


def _by_name() -> tuple[int, int]:
    return (get_rank(), get_world_size()) if torch.distributed.is_initialized() else (0, 1)


def _by_package() -> tuple[int, int]:
    group = torch.distributed.group.WORLD
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)


def _by_environment() -> tuple[int, int]:
    """As WebDataset's `pytorch_worker_info` asks: the environment first, then torch.distributed."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return _by_package()


class Stream(IterableDataset):
    """As WebDataset's `split_by_node` and `split_by_worker`: every n-th sample from that of the rank on."""

    def __init__(self, asks: Callable[[], tuple[int, int]], count: int = 32) -> None:
        self.samples, self.asks = Samples(count), asks

    def __iter__(self) -> Iterator[Any]:
        rank, world = self.asks()
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        indices = range(rank, len(self.samples), world)
        return (self.samples[index] for index in indices[first::step])


class OfTheTrainer(IterableDataset):
    """As `split_dataset_by_node` of datasets, asked for a rank when it is read."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.samples, self.trainer = Samples(32), trainer

    def __iter__(self) -> Iterator[Any]:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return (self.samples[index] for index in range(32) if index % world == rank)


def _loaded(run: Run, dataset: Any, **options: Any) -> DataLoader:
    return run.loader(dataset, **options)


def _fit(run: Run, loader: Any, validation: Any = None, **options: Any) -> Any:
    module = Toy()
    trainer = run.trainer(max_epochs=2, use_distributed_sampler=False, **options)
    trainer.fit(module, loader, validation)
    return {"weights": weights(module), "metrics": figures(trainer)}


def by_name(run: Run) -> Any:
    loader = run.loader(Stream(_by_name))
    return _fit(run, loader, loader)


def by_environment(run: Run) -> Any:
    return _fit(run, run.loader(Stream(_by_environment)), run.loader(Stream(_by_environment)))


def in_workers(run: Run) -> Any:
    """One process reads the samples of both workers in the order of theirs."""
    alone = run.layout is None
    options = {"num_workers": 2, "persistent_workers": True}
    found = _fit(run, run.loader(Stream(_by_package), **options))
    return found if alone or run.layout.replicas == 1 else None


def in_spawned_workers(run: Run) -> Any:
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    return _fit(run, run.loader(Stream(_by_environment, 16), **options))


def by_the_trainer(run: Run) -> Any:
    module = Toy()
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, run.loader(OfTheTrainer(trainer)))
    return weights(module)


class Sharded(L.LightningDataModule):
    """Shards by rank where dataloaders are made."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.seen = run, list[Any]()

    def train_dataloader(self) -> Any:
        samples, trainer = Samples(32), self.trainer
        self.seen.append((trainer.world_size, trainer.strategy.world_size, *_by_name()[1:]))
        return self.run.loader(Subset(samples, range(trainer.global_rank, 32, trainer.world_size)))

    def val_dataloader(self) -> Any:
        samples = Samples(16)
        if not torch.distributed.is_initialized():
            return self.run.loader(samples)
        return self.run.loader(samples, sampler=DistributedSampler(samples, shuffle=False))


def in_a_datamodule(run: Run) -> Any:
    data = Sharded(run)
    if run.layout is not None and len(run.layout.modalities["vision"].__dict__) and run.layout is TWINS:
        return None
    module = Toy()
    trainer = run.trainer(max_epochs=2, use_distributed_sampler=False)
    trainer.fit(module, datamodule=data)
    assert all(set(seen) == {run.layout.replicas if run.layout else 1} for seen in data.seen)
    return weights(module)


def outside(run: Run) -> Any:
    """Hooks of steps see ranks among all processes."""

    class Seeing(Toy):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if run.layout is not None:
                assert torch.distributed.get_world_size() == self.trainer.world_size == run.layout.world
                assert self.trainer.strategy.num_replicas == run.layout.replicas
                assert 0 <= self.trainer.strategy.replica_rank < run.layout.replicas
                assert self.trainer.is_global_zero == (torch.distributed.get_rank() == 0)

    module = Seeing()
    run.trainer(use_distributed_sampler=False).fit(module, run.loader(Stream(_by_package)))
    return weights(module)


def forked_after_runs(run: Run) -> Any:
    """Workers are forked after runs whose stores and groups nobody has collected yet."""
    gc.disable()
    run.trainer(use_distributed_sampler=False).fit(Toy(), run.loader(Stream(_by_package, 8)))
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # faulthandler's timer would wait for pytest's, whose thread a fork lacks
        gc.collect()
        os._exit(0)
    gc.enable()
    return os.waitpid(child, 0)[1]


WORK = (by_name, by_environment, in_workers, by_the_trainer, in_a_datamodule, outside, forked_after_runs)


@pytest.mark.parametrize("layout", swept([PIPE, TWINS, BOTH], BOTH), ids=["pipe", "twins", "both"])
def test_streams_that_shard_themselves_train_as_on_one_process(layout: Layout) -> None:
    """vision: rank 0; language: ranks 1-2, as stages or as replicas; or two replicas of three ranks each"""
    found = outcomes(layout, *WORK)
    for name, outcome in found.items():
        if outcome.ranks[0] is not None:
            assert_same(outcome.ranks[0], outcome.one, where=name)


@pytest.mark.exhaustive  # a minute of imports
def test_streams_shard_themselves_in_spawned_workers_as_on_one_process() -> None:
    """vision: rank 0, for both replicas of language: ranks 1-2; each worker imports everything anew"""
    found = outcomes(TWINS, in_spawned_workers)["in_spawned_workers"]
    assert_same(found.ranks[0], found.one)


# --- what cannot work is told ---


class InSetup(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.data = Subset(Samples(32), range(self.trainer.global_rank, 32, self.trainer.world_size))

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=8)


class Unseeded(Samples):
    """Augments with a generator of its own."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.generator = np.random.default_rng()

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        return {**item, "images": item["images"] + self.generator.normal()}


def _shuffled_by_itself() -> Any:
    order = list(range(32))
    random.Random().shuffle(order)
    return Subset(Samples(32), order)


class Validated(Toy):
    def train_dataloader(self) -> Any:
        return DataLoader(Samples(32), batch_size=8)

    def val_dataloader(self) -> Any:
        return DataLoader(Unseeded(16), batch_size=8)

    def predict_dataloader(self) -> Any:
        return DataLoader(Unseeded(16), batch_size=8)


REFUSED: dict[str, tuple[Callable[[L.Trainer], Any], str]] = {
    "a rank that setup has read": (
        lambda trainer: trainer.fit(Toy(), datamodule=InSetup()),
        "the ranks of replica 0 have read different samples for train batch 0 of epoch 0: batch['images'] differs "
        "between rank 0 and rank 1; batch['tokens'] differs",
    ),
    "an order of its own": (
        lambda trainer: trainer.fit(Toy(), DataLoader(_shuffled_by_itself(), batch_size=8)),
        "different samples for train batch 0 of epoch 0",
    ),
    "a generator without a seed": (
        lambda trainer: trainer.fit(Toy(), DataLoader(Unseeded(32), batch_size=8)),
        "for train batch 0 of epoch 0: batch['images'] differs between rank 0 and rank 1. All",
    ),
    "a generator without a seed in workers": (
        lambda trainer: trainer.fit(Toy(), DataLoader(Unseeded(32), batch_size=8, num_workers=1)),
        "for train batch 0 of epoch 0: batch['images'] differs",
    ),
    "validation": (
        lambda trainer: trainer.fit(Validated()),
        "for validate batch 0 of epoch 0: batch['images'] differs",
    ),
    "prediction": (
        lambda trainer: trainer.predict(Validated()),
        "for predict batch 0 of epoch 0: batch['images'] differs",
    ),
    "another number of samples": (
        lambda trainer: trainer.fit(Toy(), DataLoader(Samples(32 if trainer.global_rank else 7), batch_size=8)),
        "(float64[7, 6], float64[8, 6])",
    ),
}


def _refused(rank: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    random.seed()
    found, alive = {}, []
    for name, (fit, _) in REFUSED.items():
        trainer = Run(PAIR).trainer(use_distributed_sampler=False, num_sanity_val_steps=0)
        alive.append(trainer)
        try:
            fit(trainer)
        except RankMismatchError as error:
            found[name] = str(error)
    return found


def test_ranks_of_a_replica_that_read_different_samples_are_all_told_before_they_train_with_them() -> None:
    """vision: rank 0; language: rank 1"""
    for rank, found in enumerate(run_ranks(2, _refused)):
        for name, (_, message) in REFUSED.items():
            assert message in found.get(name, "no error"), (rank, name, found.get(name))
            assert "strategy.replica_rank" in found[name]
