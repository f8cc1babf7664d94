"""Lightning's tuners: learning rates are searched on any layout, batch sizes on one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from features.toys import PAIR, SHARED, Layout, Run, Samples, Toy, alone, assert_same, outcomes, weights
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.trainer import launch

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, of small loaders and steps without data


class Tuned(Toy):
    """Its rate and batch size are attributes, as tuners expect."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.05, 2

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class WithLoader(Tuned):
    def train_dataloader(self) -> Any:
        return DataLoader(Samples(64), batch_size=self.batch_size)

    val_dataloader = train_dataloader


def by_tuner(run: Run) -> Any:
    module, trainer = Tuned(), run.trainer()
    found = Tuner(trainer).lr_find(module, run.training(144), num_training=18, early_stop_threshold=None)
    assert found is not None
    lr, before = module.lr, weights(module)
    trainer.fit(module, run.training(144))
    return {"losses": found.results["loss"], "rate": found.suggestion(), "lr": lr, "weights": [before, weights(module)]}


def by_callback(run: Run) -> Any:
    module, finder = Tuned(), LearningRateFinder(num_training_steps=18, early_stop_threshold=None)
    trainer = run.trainer(callbacks=[finder])
    trainer.fit(module, run.training(144))
    assert finder.optimal_lr is not None
    return {"losses": finder.optimal_lr.results["loss"], "lr": module.lr, "weights": weights(module)}


def test_rates_are_those_of_one_process_and_training_begins_as_before_the_search() -> None:
    """vision: rank 0; language: rank 1"""
    for name, found in outcomes(PAIR, by_tuner, by_callback).items():
        for rank, got in enumerate(found.ranks):
            shown = set(got) - ({"weights"} if rank else set())
            assert_same({key: got[key] for key in shown}, {key: found.one[key] for key in shown}, 1e-7, name)
        assert found.one["lr"] != 0.05


def test_replicas_agree_on_a_rate_and_keep_the_weights_they_had() -> None:
    """two replicas: ranks 0-1; each loss of the search is that of rank 0, as under DDP"""
    found = outcomes(SHARED, by_tuner)["by_tuner"]
    first, second = found.ranks
    assert_same(second, first)
    assert_same(first["weights"][0], found.one["weights"][0])


def test_what_forked_ranks_find_comes_back_to_the_process_that_tunes() -> None:
    """vision: rank 0; language: rank 1"""
    got, expected = by_tuner(Run(PAIR, {"start_method": "fork"})), alone(by_tuner)
    assert_same(got, expected, 1e-7)


def batch_size(run: Run, **options: Any) -> Any:
    module = WithLoader()
    found = Tuner(run.trainer()).scale_batch_size(module, max_trials=3, steps_per_trial=2, **options)
    return found, module.batch_size, weights(module)


ONE = Layout({"model": Modality()}, 1)


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_one_process_searches_batch_sizes(mode: str) -> None:
    run = Run(ONE, {"start_method": "fork", "num_microbatches": 1})
    assert_same(batch_size(run, mode=mode), alone(lambda plain: batch_size(plain, mode=mode)))


def test_forked_ranks_compute_also_where_the_process_has_threads_of_its_own() -> None:
    """A rank that shares out work to threads of OpenMP after a fork would wait for those of its parent."""
    torch.set_num_threads(2)
    torch.nn.functional.layer_norm(torch.randn(1000, 1000), (1000,))
    run = Run(ONE, {"start_method": "fork", "num_microbatches": 1})
    assert len(batch_size(run, mode="power")) == 3


def test_several_ranks_do_not_search_batch_sizes() -> None:
    """The processes of vision: rank 0; language: rank 1 are not started."""
    run = Run(PAIR, {"start_method": "fork"})
    with pytest.raises(ConfigError, match="Batch sizes are searched on one process, and there are 2 ranks"):
        run.trainer(callbacks=[BatchSizeFinder()]).fit(WithLoader())
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        Tuner(run.trainer()).scale_batch_size(WithLoader())


def test_lightning_has_what_the_results_of_tuners_are_known_by() -> None:
    finder, sizes = LearningRateFinder(), BatchSizeFinder()
    for name in ("_early_exit", "_update_attr", "_attr_name"):
        private(finder, name)
    for name in ("_early_exit", "_batch_arg_name"):
        private(sizes, name)
    private(launch.lr_finder, "_determine_lr_attr_name")
    private(L.Trainer(logger=False, enable_checkpointing=False), "_teardown")
