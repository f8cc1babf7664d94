"""Comparisons of schedules, and their graphs from sizes alone: costs, what is frozen, chunks, replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.schedule import (
    SCHEDULES,
    Graph,
    Schedule,
    ScheduleError,
    build,
    simulate,
    to_csv,
)
from lightning_mm5d.tools.planner.outcomes import compare, sketch
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


def _graph(world_size: int, count: int = 4, **modalities: Modality) -> Graph:
    layout = Layout.build(modalities, world_size=world_size, loss_modality="language")
    return sketch(layout, modalities, count)


def _costs(graph: Graph) -> dict[str, tuple[float, float, float]]:
    return {node.stage: (node.forward_cost, node.backward_cost, graph.weight_cost(node)) for node in graph.nodes}


def test_a_case_is_the_graph_that_papers_draw() -> None:
    graph = _graph(6, vision=Modality(pp_size=2), audio=Modality(), language=Modality(pp_size=3))
    assert graph.ranks == (0, 1, 2, 3, 4, 5)
    assert sorted(graph.predecessors("language.0")) == ["audio.0", "vision.1"]
    costs = _costs(graph)
    assert costs["vision.0"] == (1.0, 2.0, 2.0)
    assert costs["language.0"] == (1.0, 2.0, 1.0)


def test_costs_are_those_of_ranks_and_shared_by_their_chunks() -> None:
    language = Modality(pp_size=2, pipeline={"pp_chunks": 2}, cost=[2.0, 3.0])
    costs = _costs(_graph(3, vision=Modality(cost=0.5), language=language))
    assert {stage: forward for stage, (forward, _, _) in costs.items()} == {
        "vision.0": 0.5,
        "language.0": 1.0,
        "language.1": 1.5,
        "language.2": 1.0,
        "language.3": 1.5,
    }


def test_chunks_lie_in_a_v_where_they_are_told_to() -> None:
    modalities = {"language": Modality(pp_size=2, pipeline={"pp_chunks": 2}, cost=[2.0, 3.0])}
    layout = Layout.build(modalities, world_size=2, loss_modality="language")
    graph = sketch(layout, modalities, 2, v_shaped=True)
    assert [(node.rank, node.forward_cost) for node in graph.nodes] == [(0, 1.0), (1, 1.5), (1, 1.5), (0, 1.0)]


def test_frozen_modalities_run_input_gradients_where_something_before_them_is_trained() -> None:
    modalities = {"audio": Modality(), "vision": Modality(), "language": Modality()}
    layout = Layout.build(modalities, world_size=3, loss_modality="language")
    costs = _costs(sketch(layout, modalities, 2, frozen=("audio", "language")))
    assert costs == {"audio.0": (1.0, 0.0, 0.0), "vision.0": (1.0, 2.0, 2.0), "language.0": (1.0, 1.0, 0.0)}
    costs = _costs(sketch(layout, modalities, 2, frozen=tuple(modalities)))
    assert {backward for _, backward, _ in costs.values()} == {0.0}


def test_an_encoder_with_more_replicas_takes_turns() -> None:
    graph = _graph(4, vision=Modality(dp_size=2), language=Modality(dp_size=1, pp_size=2))
    assert {node.rank: node.microbatches for node in graph.instances("vision.0")} == {0: (0, 2), 1: (1, 3)}
    assert [node.microbatches for node in graph.instances("language.1")] == [(0, 1, 2, 3)]


@pytest.mark.parametrize(("feeds", "targets"), [("first", [0]), ("all", [0, 1, 2]), ([0, 2], [0, 2])])
def test_encoders_feed_the_stages_that_they_are_told_to(feeds: object, targets: list[int]) -> None:
    graph = _graph(4, vision=Modality(feeds=feeds), language=Modality(pp_size=3))  # type: ignore[arg-type]
    assert sorted(graph.successors("vision.0")) == [f"language.{index}" for index in targets]


def test_modalities_in_one_stage_take_turns_on_its_rank() -> None:
    graph = _graph(1, vision=Modality(colocate_with="language", cost=0.5), language=Modality(cost=2.0))
    ((stage, costs),) = _costs(graph).items()
    assert (graph.ranks, stage) == ((0,), next(iter(graph.stages)))
    assert costs == (2.5, 5.0, 5.0)
