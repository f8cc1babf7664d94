"""Without Lightning's distributed sampler, ranks see the shuffled batches of one process, in every epoch.

vision: rank 0; language: ranks 1-2 as stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.seed import seed_everything
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from features.toys import PIPE, Outcome, Run, Samples, Toy, assert_same, outcomes, weights


class Noting(Toy):
    """Notes which samples each batch of training has, by their first token and pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen += [float(pixel) for pixel in batch["images"][:, 0]]


WORKERS = {"num_workers": 1, "persistent_workers": True}


def fit(run: Run, *, validation: Mapping[str, Any] = MappingProxyType({}), sanity: int = 2, **options: Any) -> Any:
    seed_everything(3)
    module = Noting()
    trainer = run.trainer(max_epochs=3, use_distributed_sampler=False, num_sanity_val_steps=sanity)
    trainer.fit(module, run.loader(16, **options), run.loader(8, **validation))
    return {"seen": module.seen, "weights": weights(module)}


def shuffled(run: Run) -> Any:
    return fit(run, shuffle=True)


def with_a_generator(run: Run) -> Any:
    return fit(run, shuffle=True, generator=torch.Generator().manual_seed(5))


def with_replacement(run: Run) -> Any:
    return fit(run, sampler=RandomSampler(Samples(16), replacement=True))


def made_anew(run: Run, every: int, **options: Any) -> Any:
    """Lightning opens a dataloader that it asks for again twice, and reads from the second iterator alone."""
    seed_everything(3)

    class Making(Noting):
        def train_dataloader(self) -> Any:
            own = {"generator": torch.Generator().manual_seed(5)} if "generator" in options else {}
            return run.loader(16, shuffle=True, **{**options, **own})

    module = Making()
    run.trainer(max_epochs=4, use_distributed_sampler=False, reload_dataloaders_every_n_epochs=every).fit(module)
    return {"seen": module.seen, "weights": weights(module)}


def made_anew_for_each_epoch(run: Run) -> Any:
    return made_anew(run, 1)


def made_anew_with_workers(run: Run) -> Any:
    return made_anew(run, 2, num_workers=1)


def made_anew_with_a_generator(run: Run) -> Any:
    return made_anew(run, 1, num_workers=1, generator=True)


def made_anew_with_persistent_workers(run: Run) -> Any:
    return made_anew(run, 2, **WORKERS)


def with_persistent_workers(run: Run) -> Any:
    return fit(run, shuffle=True, validation=WORKERS, **WORKERS)


def with_persistent_workers_and_no_sanity_check(run: Run) -> Any:
    return fit(run, shuffle=True, validation=WORKERS, sanity=0, **WORKERS)


def weighted(run: Run) -> Any:
    return fit(run, sampler=WeightedRandomSampler(list(range(1, 17)), 16))


def of_a_subset(run: Run) -> Any:
    return fit(run, sampler=SubsetRandomSampler(range(2, 14)))


def with_reads_on_one_rank(run: Run) -> Any:
    class Reading(Noting):
        def on_train_epoch_end(self) -> None:
            if self.trainer.global_rank == 1:
                next(iter(self.trainer.train_dataloader))
                torch.rand(3)

    seed_everything(3)
    module = Reading()
    run.trainer(max_epochs=3, use_distributed_sampler=False).fit(module, run.loader(16, shuffle=True))
    return {"seen": module.seen, "weights": weights(module)}


SCENARIOS = (
    shuffled,
    with_a_generator,
    with_replacement,
    weighted,
    of_a_subset,
    with_reads_on_one_rank,
    made_anew_for_each_epoch,
    made_anew_with_workers,
    made_anew_with_a_generator,
    made_anew_with_persistent_workers,
    with_persistent_workers,
    with_persistent_workers_and_no_sanity_check,
)


@pytest.fixture(scope="module")
def found() -> dict[str, Outcome]:
    return outcomes(PIPE, *SCENARIOS)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_ranks_see_the_batches_of_one_process(found: dict[str, Outcome], name: str) -> None:
    one, ranks = found[name].one, found[name].ranks
    assert len(set(one["seen"][:16])) > 6
    assert one["seen"][:12] != one["seen"][-12:]
    for rank in ranks:
        assert rank["seen"] == one["seen"]
    assert_same(ranks[0]["weights"], one["weights"])
