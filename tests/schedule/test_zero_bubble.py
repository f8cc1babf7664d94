"""Zero-bubble schedules: bubbles against the theoretical bounds, and no more memory than 1F1B."""

from __future__ import annotations

import pytest

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.schedule import Kind, build, held_limits, simulate, validate

from .graphs import case, chunked, tree

_TIMES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.0, 0.7), (1.0, 0.9, 1.1), (1.0, 1.5, 0.5), (2.0, 1.0, 1.0)]
_SIZES = [(2, 4), (4, 8), (4, 24), (8, 16), (8, 64), (16, 32)]


@pytest.mark.parametrize("times", _TIMES)
@pytest.mark.parametrize(("ranks", "microbatches"), _SIZES)
def test_bubble_of_a_chain_is_at_most_1_05_of_the_theoretical_one(
    ranks: int, microbatches: int, times: tuple[float, float, float]
) -> None:
    graph = chunked(ranks, 1, microbatches, times=times)
    schedule = build("zero_bubble", graph)
    validate(schedule, graph)
    makespan = simulate(schedule, graph).makespan
    forward, inputs, weights = times
    work = microbatches * sum(times)
    idle = (ranks - 1) * max(forward + inputs - weights, forward)
    assert 1 - work / makespan <= 1.05 * idle / (work + idle)


@pytest.mark.parametrize(("ranks", "microbatches"), _SIZES)
def test_v_with_equal_times_idles_for_the_first_forwards_only(ranks: int, microbatches: int) -> None:
    graph = chunked(ranks, 2, microbatches, schedule="zbv")
    schedule = build("zbv", graph)
    validate(schedule, graph)
    makespan = simulate(schedule, graph).makespan
    work, idle = 2 * microbatches * 3, ranks - 1
    assert 1 - work / makespan <= 1.05 * idle / (work + idle)


@pytest.mark.parametrize("times", _TIMES)
def test_v_idles_less_than_one_chunk_does(times: tuple[float, float, float]) -> None:
    one = chunked(8, 1, 24, times=tuple(2 * time for time in times))  # type: ignore[arg-type]
    two = chunked(8, 2, 24, schedule="zbv", times=times)
    assert simulate(build("zbv", two), two).makespan < simulate(build("zero_bubble", one), one).makespan


@pytest.mark.parametrize(("ranks", "microbatches"), _SIZES)
def test_no_rank_holds_more_than_the_first_one_under_1f1b(ranks: int, microbatches: int) -> None:
    one, two = chunked(ranks, 1, microbatches), chunked(ranks, 2, microbatches, schedule="zbv")
    first = simulate(build("1f1b", one), one).peak_activations[0]
    assert held_limits(one) == dict.fromkeys(range(ranks), ranks)
    assert max(simulate(build("zero_bubble", one), one).peak_activations.values()) <= first
    assert max(simulate(build("zbv", two), two).peak_activations.values()) <= 2 * first  # chunks have half the size


@pytest.mark.parametrize("microbatches", [6, 12, 24])
def test_papers_graph_of_encoders_gets_shorter_than_under_1f1b(microbatches: int) -> None:
    graph = tree(microbatches, audio=1, vision=2, language=3)
    assert simulate(build("zero_bubble", graph), graph).makespan <= simulate(build("1f1b", graph), graph).makespan - 4


def test_only_stages_that_train_and_pass_gradients_on_split_backwards() -> None:
    modalities = {"audio": Modality(), "vision": Modality(pp_size=2), "language": Modality(pp_size=2)}
    graph = case(6, frozen=("audio", "language"), **modalities)
    schedule = build("zero_bubble", graph)
    validate(schedule, graph)
    kinds = {rank: {action.kind for action in actions} for rank, actions in schedule.items()}
    full, split = {Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}
    assert kinds == {0: {Kind.F}, 1: full, 2: split, 3: full, 4: full}
