"""Callbacks that copy averaged weights into the module."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from features.toys import PIPE, SHARED, Run, Toy, assert_same, outcomes, together, weights


def averaged_weights(run: Run) -> Any:
    module = Toy()
    trainer = run.trainer(max_epochs=4, callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=2)])
    trainer.fit(module, run.training(), run.loader(8))
    return weights(module)


def test_stochastic_weight_averaging_equals_one_process() -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    outcome = outcomes(PIPE, averaged_weights)["averaged_weights"]
    assert_same(outcome.ranks[0], outcome.one)


def moving_average(run: Run) -> Any:
    module = Toy()
    trainer = run.trainer(max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.5)])
    trainer.fit(module, run.training(), run.loader(8))
    return weights(module)


def moving_average_refused(run: Run) -> str:
    try:
        moving_average(run)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_callback_that_saves_its_own_copy_of_the_module_is_refused_with_stages() -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    for error in together(PIPE, moving_average_refused):
        assert "EMAWeightAveraging" in error


def test_it_equals_one_process_where_every_rank_has_the_whole_module() -> None:
    """two replicas of everything: ranks 0-1"""
    outcome = outcomes(SHARED, moving_average)["moving_average"]
    assert_same(outcome.ranks[0], outcome.one)
