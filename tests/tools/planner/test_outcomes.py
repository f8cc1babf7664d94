"""Comparisons of schedules: what came of each, as values for a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.schedule import (
    SCHEDULES,
    Graph,
    Schedule,
    ScheduleError,
    build,
    simulate,
    to_csv,
)
from lightning_mm5d.tools.planner.outcomes import compare
from schedule.graphs import case, chain, tree

_PAPER = {"vision": Modality(pp_size=2), "audio": Modality(), "language": Modality(pp_size=3)}


def test_json_holds_the_actions_of_every_rank() -> None:
    (outcome,) = compare(tree(2, vision=1, language=1), ["1f1b"])
    row = outcome.as_json()
    assert json.loads(json.dumps(row)) == row
    assert row == {
        "schedule": "1f1b",
        "makespan": 9.0,
        "bubble": pytest.approx(1 / 3),
        "ranks": [
            {
                "rank": 0,
                "modality": "vision",
                "stage": 0,
                "peak_activations": 2,
                "actions": ["F0", "F1", "B0", "B1"],
            },
            {
                "rank": 1,
                "modality": "language",
                "stage": 0,
                "peak_activations": 1,
                "actions": ["F0", "B0", "F1", "B1"],
            },
        ],
    }


def test_an_outcome_sums_up_what_its_simulation_says() -> None:
    graph = chain(4, 8)
    (outcome,) = compare(graph, ["gpipe"])
    assert outcome.simulation == simulate(build("gpipe", graph), graph)
    assert outcome.peak_activations == 8
    assert outcome.bubble == pytest.approx(3 / (8 + 3))


def test_schedules_that_want_chunks_get_them_and_name_them() -> None:
    outcomes = {one.schedule: one for one in compare(lambda schedule: case(12, schedule=str(schedule), **_PAPER))}
    assert tuple(outcomes) == SCHEDULES
    first = {name: outcome.as_json()["ranks"][5]["actions"][:2] for name, outcome in outcomes.items()}
    assert first["1f1b"] == ["F0", "B0"]
    assert first["zbv"] == ["F0.0", "F0.1"]
    makespans = {name: outcome.simulation.makespan for name, outcome in outcomes.items()}
    assert makespans["auto"] == min(makespans.values())
    assert makespans["zbv"] < makespans["zero_bubble"] < makespans["1f1b"]


def test_split_backwards_and_several_modalities_on_a_rank_are_named() -> None:
    shared = {"vision": Modality(colocate_with="language"), "language": Modality(pp_size=2)}
    (outcome,) = compare(case(4, **shared), ["zero_bubble"])
    first, second = outcome.as_json()["ranks"]
    assert (first["modality"], second["modality"]) == ("vision+language", "vision+language")
    assert {action[0] for action in second["actions"]} == set("FBIW")
    assert {action.partition(".")[2] for action in second["actions"]} == {"0", "1"}


def test_ones_own_schedules_are_compared_under_names(tmp_path: Path) -> None:
    graph = chain(2, 2)
    table = to_csv(build("gpipe", graph), graph)
    path = tmp_path / "mine.csv"
    path.write_text(table, encoding="utf-8")

    def mine(graph: Graph) -> Schedule:
        return build("gpipe", graph)

    outcomes = compare(graph, [table, str(path), mine, "gpipe"])
    assert [outcome.schedule for outcome in outcomes] == ["table", str(path), "mine", "gpipe"]
    assert len({outcome.simulation.makespan for outcome in outcomes}) == 1
    with pytest.raises(ScheduleError, match="missing"):
        compare(chain(2, 3), [table])
