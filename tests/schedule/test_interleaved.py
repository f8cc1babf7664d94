"""Interleaved schedules: the known bubble, Megatron's warm-up, and graphs in which only one modality has chunks."""

from __future__ import annotations

import pytest

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.schedule import Kind, build, simulate, validate

from .graphs import case, chain, chunked


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 1.5, 0.5)])
@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 2, 32), (4, 4, 8)])
def test_chain_reaches_the_known_bubble(
    ranks: int, chunks: int, microbatches: int, times: tuple[float, float, float]
) -> None:
    graph = chunked(ranks, chunks, microbatches, times=times)
    work = chunks * microbatches * sum(times)
    assert simulate(build("interleaved", graph), graph).makespan == pytest.approx(work + (ranks - 1) * sum(times))


@pytest.mark.parametrize(("ranks", "chunks"), [(4, 2), (4, 3)])
def test_warm_up_is_megatrons(ranks: int, chunks: int) -> None:
    schedule = build("interleaved", chunked(ranks, chunks, 4 * ranks))
    for rank in range(ranks):
        first_backward = [action.kind for action in schedule[rank]].index(Kind.B)
        assert first_backward == 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1


def test_chunks_take_turns_of_as_many_microbatches_as_there_are_ranks() -> None:
    actions = build("interleaved", chunked(2, 2, 4))[0]
    forwards = [(action.stage, action.microbatch) for action in actions if action.kind is Kind.F]
    first, second = "language.0", "language.2"
    assert forwards[:4] == [(first, 0), (first, 1), (second, 0), (second, 1)]


def test_microbatches_need_not_divide_by_the_ranks() -> None:
    graph = chunked(4, 2, 10)
    schedule = build("interleaved", graph)
    validate(schedule, graph)
    assert simulate(schedule, graph).makespan < 2 * 10 * 3 + 2 * (4 - 1) * 3


def test_one_chunk_a_rank_is_1f1b() -> None:
    assert build("interleaved", chain(4, 8)) == build("1f1b", chain(4, 8))


def test_a_chunked_language_model_after_encoders_beats_1f1b() -> None:
    modalities = {"vision": Modality(), "audio": Modality(), "language": Modality(pp_size=4)}
    makespans = {}
    for name in ("1f1b", "interleaved"):
        graph = case(16, schedule=name, **modalities)
        makespans[name] = simulate(build(name, graph), graph).makespan
    assert makespans["interleaved"] < makespans["1f1b"]
