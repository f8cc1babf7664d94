"""Comparisons of schedules as plain values, and graphs of cases without a model."""

from __future__ import annotations

import json

import pytest

from lightning_mm5d.errors import ConfigError
from lightning_mm5d.schedule import SCHEDULES, backward_costs, case, compare

_PAPER = {"vision": {"stages": 2}, "audio": {}, "language": {"stages": 3}}


def test_rows_hold_what_a_table_and_json_need() -> None:
    (row,) = compare(case({"vision": {}, "language": {}}, 2), ["1f1b"])
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


def test_schedules_that_want_chunks_get_them_and_name_them() -> None:
    rows = {row["schedule"]: row for row in compare(lambda name: case(_PAPER, 12, schedule=name))}
    assert set(rows) == set(SCHEDULES)
    assert rows["1f1b"]["ranks"][5]["actions"][:2] == ["F0", "B0"]
    assert rows["zbv"]["ranks"][5]["actions"][:2] == ["F0.0", "F0.1"]
    assert rows["auto"]["makespan"] == min(row["makespan"] for row in rows.values())
    assert rows["zbv"]["makespan"] < rows["zero_bubble"]["makespan"] < rows["1f1b"]["makespan"]


def test_a_case_is_the_graph_that_papers_draw() -> None:
    graph = case(_PAPER, 2)
    assert graph.workers == (0, 1, 2, 3, 4, 5)
    assert graph.predecessors("language.0") == ("vision.1", "audio.0")
    costs = {node.stage: (node.forward_cost, node.backward_cost, node.weight_cost) for node in graph.nodes}
    assert costs["vision.0"] == (1.0, 2.0, 2.0)
    assert costs["language.0"] == (1.0, 2.0, 1.0)


def test_frozen_modalities_with_trained_projectors_pay_for_gradients_only_where_they_flow() -> None:
    frozen = {"frozen": True, "projector": 0.1}
    graph = case({"vision": {"stages": 2, **frozen}, "audio": frozen, "language": {"stages": 2, "frozen": True}}, 2)
    costs = {node.stage: (node.forward_cost, node.backward_cost, node.weight_cost) for node in graph.nodes}
    assert costs == {
        "vision.0": (1.0, 0.0, 0.0),
        "vision.1": (1.1, 0.2, 0.2),
        "audio.0": (1.1, 0.2, 0.2),
        "language.0": (1.0, 1.0, 0.0),
        "language.1": (1.0, 1.0, 0.0),
    }


@pytest.mark.parametrize(
    ("trains", "passes_on", "recompute", "expected"),
    [
        (False, False, 1.0, (0.0, 0.0)),
        (False, True, 0.0, (1.0, 0.0)),
        (True, False, 0.0, (2.0, 2.0)),
        (True, True, 0.0, (2.0, 1.0)),
        (True, True, 1.0, (3.0, 1.0)),
        (False, True, 1.0, (2.0, 0.0)),
    ],
)
def test_backward_costs_nothing_half_or_all_and_recomputation_counts(
    trains: bool, passes_on: bool, recompute: float, expected: tuple[float, float]
) -> None:
    assert backward_costs(2.0, trains=trains, passes_on=passes_on, recompute=recompute) == expected


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("depth", 2, r"modalities\.language: got 'depth'.*stages, cost"),
        ("stages", 0, r"modalities\.language\.stages: got 0"),
        ("cost", [1.0, 2.0, 3.0], r"modalities\.language\.cost: got \[1\.0, 2\.0, 3\.0\].*1 stages"),
    ],
)
def test_refuses_a_case_that_cannot_be(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        case({"language": {field: value}}, 2)
