"""Callbacks that copy averaged weights into the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from features.toys import (
    LANGUAGE,
    PIPE,
    SHARED,
    VISION,
    Layout,
    Run,
    Toy,
    assert_same,
    figures,
    outcomes,
    together,
    weights,
)
from lightning_mm5d import Modality
from lightning_mm5d.features.sharded_checkpoints.sharded_load import ShardedCheckpoint

ROWS = {"zero_stage": 3, "dp_shard_size": 2}
SHARING = Layout(
    {
        "vision": Modality(colocate_with="language", **ROWS, **VISION),
        "language": Modality(pp_size=2, **ROWS, **LANGUAGE),
    },
    4,
    2,
)
"""vision beside language on ranks 0-3; language: two stages of two ranks that share their rows"""


class Saving(Callback):
    """Saves after each epoch's validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def averaged(run: Run, callback: type[Callback], *arguments: Any, **options: Any) -> Any:
    """Train, go on from the checkpoint of the second epoch, and return what came of both."""
    folder, found = run.folder / callback.__name__, []
    for path in (None, folder / "1.ckpt"):
        module, average = Toy(), callback(*arguments, **options)
        saving = [] if path is not None else [Saving(folder)]
        trainer = run.trainer(max_epochs=4, callbacks=[average, *saving])
        trainer.fit(module, run.training(), run.loader(8), ckpt_path=path)
        found.append(figures(trainer))
        if run.options.get("checkpoint") != "sharded":
            found.append(weights(module))
    trainer.save_checkpoint(folder / "after.ckpt")
    return found + [saved(folder / name) for name in ("1.ckpt", "after.ckpt")]


def saved(path: Path) -> dict[str, Any]:
    """Return the weights in a checkpoint, trained and averaged."""
    state = ShardedCheckpoint(path).state if path.is_dir() else torch.load(path, weights_only=False)
    found = {"state_dict": dict(state["state_dict"]), "current": state.get("current_model_state", {})}
    return found | {"averages": [one.get("average_model_state") for one in state["callbacks"].values()]}


def stochastic(run: Run) -> Any:
    return averaged(run, StochasticWeightAveraging, 0.05, swa_epoch_start=2)


def moving(run: Run) -> Any:
    return averaged(run, EMAWeightAveraging, decay=0.5)


def test_averages_of_stages_and_rows_equal_one_process(tmp_path: Path) -> None:
    for scenario, outcome in outcomes(SHARING, stochastic, moving, folder=tmp_path).items():
        assert_same(outcome.ranks[0], outcome.one, where=scenario)


@pytest.mark.exhaustive
def test_averages_are_saved_in_shards(tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    for scenario, outcome in outcomes(PIPE, stochastic, moving, folder=tmp_path, checkpoint="sharded").items():
        expected = [one for index, one in enumerate(outcome.one) if index not in (1, 3)]  # no rank has all weights
        assert_same(outcome.ranks[0], expected, where=scenario)


def equal_average(run: Run) -> Any:
    module = Toy()
    average = WeightAveraging(use_buffers=False)
    run.trainer(max_epochs=2, callbacks=[average]).fit(module, run.training(), run.loader(8))
    return weights(module)


def test_it_equals_one_process_where_every_rank_has_the_whole_module() -> None:
    """two replicas of everything: ranks 0-1"""
    outcome = outcomes(SHARED, equal_average)["equal_average"]
    assert_same(outcome.ranks[0], outcome.one)


def normalized(average: Tensor, value: Tensor, _: Tensor) -> Tensor:
    return average + value / value.norm()


def by_norm(run: Run) -> str:
    try:
        run.trainer(callbacks=[WeightAveraging(avg_fn=normalized)]).fit(Toy(), run.training())
    except ValueError as error:
        return str(error)
    return "no error"


def test_an_average_that_depends_on_whole_parameters_is_refused_where_ranks_have_rows() -> None:
    for error in together(SHARING, by_norm):
        assert "callbacks.WeightAveraging.avg_fn" in error
        assert "normalized" in error
