"""A user's own schedules: read from a table, written as one, made by a function; refused with the place."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from lightning_mm5d.schedule import (
    Action,
    Graph,
    Kind,
    Schedule,
    ScheduleError,
    build,
    from_csv,
    simulate,
    to_csv,
)

from .graphs import chain, chunked, random_graph

_TABLE = """\
rank, actions
0, F0, F1, B0, B1  # the first stage
1, F0, I0
1, F1, I1, W0, W1,,

"""


def test_reads_rows_that_continue_each_other() -> None:
    schedule = from_csv(_TABLE, chain(2, 2))
    assert [str(action)[0] + str(action.microbatch) for action in schedule[1]] == ["F0", "I0", "F1", "I1", "W0", "W1"]
    assert schedule[0][2] == Action(Kind.B, "language.0", 0)


@pytest.mark.parametrize("seed", range(20))
def test_every_schedule_survives_being_written_and_read(seed: int) -> None:
    graph = random_graph(Random(seed))
    schedule = build("zero_bubble", graph)
    assert from_csv(to_csv(schedule, graph), graph) == schedule


def test_chunks_are_counted_along_the_pipeline() -> None:
    graph = chunked(2, 2, 1, schedule="zbv")
    schedule = from_csv("0,F0.0,F0.1,B0.1,B0.0\n1,F0.0,F0.1,B0.1,B0.0\n", graph)
    assert [action.stage for action in schedule[1]] == ["language.1", "language.2", "language.2", "language.1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,F0,X0\n1,F0,B0\n", r"line 1: got 'X0'.*rank 0, which has language\.0, is F, B, I or W.*instance F0\."),
        ("\n7,F0\n", r"line 2: got 'rank|got '7' as the rank.*Use one of 0, 1"),
        ("0,F0.1,B0\n", r"got 'F0\.1'"),
        ("0,F0,B0\n1,F0\n", r"rank 1: B\(language\.1, 0\) is missing"),
        ("0,F0,B0\n1,B0,F0\n", r"Deadlock"),
    ],
)
def test_refuses_tables_that_cannot_be_read_or_run(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_csv(text, chain(2, 1))


def test_a_rank_with_chunks_must_name_them() -> None:
    with pytest.raises(ScheduleError, match=r"got 'F0'.*a chunk from 0 to 1.*instance F0\.1"):
        from_csv("0,F0\n", chunked(2, 2, 1))


def test_build_takes_a_table_a_file_and_a_function(tmp_path: Path) -> None:
    graph = chain(2, 2)
    (tmp_path / "mine.csv").write_text(_TABLE, encoding="utf-8")
    expected = from_csv(_TABLE, graph)
    assert build(_TABLE, graph) == build(str(tmp_path / "mine.csv"), graph) == expected
    assert build(lambda graph: from_csv(_TABLE, graph), graph) == expected
    assert simulate(expected, graph).makespan == 7


def test_evaluation_runs_the_forwards_of_ones_own_schedule() -> None:
    forwards = build(_TABLE, chain(2, 2), forward_only=True)
    assert forwards == build("1f1b", chain(2, 2), forward_only=True)


def test_a_function_that_forgets_a_rank_is_refused() -> None:
    def forgetful(graph: Graph) -> Schedule:
        return {0: build("1f1b", graph)[0]}

    with pytest.raises(ScheduleError, match=r"rank 1: F\(language\.1, 0\) is missing"):
        build(forgetful, chain(2, 2))
