"""Sequences of any lengths and numbers, which ranks 0-1 share, train as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from context_parallel.runs import PAIR, Stream, same_steps, shared, steps
from features.toys import Run, outcomes
from sweeps import dealt, every, swept
from zoo import CASES

LENGTHS = (9, 16, 9, 31, 2, 12)


def trained_on(case: str, lengths: tuple[int, ...], samples: int) -> Callable[[Run], Any]:
    def scenario(run: Run) -> Any:
        return steps(run, CASES[case].build(), Stream(lengths, samples))

    return scenario


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("how", dealt(__file__, ["uniform", "zigzag", "makespan_min"]))
def test_lengths_that_change_with_every_batch_are_those_of_one_process(how: str) -> None:
    """Of an iterable dataset; ranks 0-2, so that few lengths divide."""
    layout = shared(3, cp_size=3, cp_distribution=how, cp_mode="ring")
    for outcome in outcomes(layout, trained_on("gpt2", LENGTHS, 4), num_microbatches=1).values():
        same_steps(outcome)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", swept(["allgather", "ring", "ulysses"], "ring"))
def test_sequences_shorter_than_the_number_of_ranks_are_those_of_one_process(mode: str) -> None:
    """Ranks 0-3, of which some have no token; one sample."""
    scenario = trained_on("llama_tied", (3, 2, 6), 1)
    for outcome in outcomes(shared(4, cp_size=4, cp_mode=mode), scenario, num_microbatches=1).values():
        same_steps(outcome)


@pytest.mark.usefixtures("float64")
def test_one_sequence_a_batch_is_that_of_one_process() -> None:
    scenario = trained_on("bert", (16, 11), 1)
    for outcome in outcomes(PAIR, scenario, num_microbatches=1).values():
        same_steps(outcome, 1e-9)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("schedule", "how"), every(2, ["1f1b", "zero_bubble"], ["zigzag", "makespan_min"]))
def test_microbatches_that_are_padded_unlike_are_those_of_one_process(schedule: str, how: str) -> None:
    """Ranks 0-1 and 2-3 as stages; weighed by tokens."""
    options: dict[str, Any] = {"num_microbatches": 4, "loss_weight": "tokens", "schedule": schedule}
    layout = shared(4, pp_size=2, cp_distribution=how)
    for outcome in outcomes(layout, trained_on("llama", (12, 17, 12), 4), **options).values():
        same_steps(outcome)
