"""Graphs from sizes alone: costs, what is frozen, chunks, replicas and shared ranks."""

from __future__ import annotations

import pytest

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.schedule import Graph
from lightning_mm5d.tools.planner.sketch import sketch


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
    language = Modality(pp_size=2, pp_chunks=2, cost=[2.0, 3.0])
    costs = _costs(_graph(3, vision=Modality(cost=0.5), language=language))
    assert {stage: forward for stage, (forward, _, _) in costs.items()} == {
        "vision.0": 0.5,
        "language.0": 1.0,
        "language.1": 1.5,
        "language.2": 1.0,
        "language.3": 1.5,
    }


def test_chunks_lie_in_a_v_where_they_are_told_to() -> None:
    modalities = {"language": Modality(pp_size=2, pp_chunks=2, cost=[2.0, 3.0])}
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
