"""The graph of stages: what it answers and what it refuses."""

from __future__ import annotations

import pytest

from lightning_mm5d.schedule import Graph, Node

from .graphs import chain, chunked, tree


def test_neighbours_follow_the_edges() -> None:
    graph = tree(2, vision=2, audio=1, language=2)
    assert graph.predecessors("language.0") == ("vision.1", "audio.0")
    assert graph.successors("vision.1") == ("language.0",)
    assert graph.successors("language.1") == ()


def test_distance_to_end_is_the_longest_path() -> None:
    nodes = (*chain(3, 1).nodes, Node(stage="vision.0", rank=3, microbatches=(0,)))
    edges = (*chain(3, 1).edges, ("vision.0", "language.0"), ("vision.0", "language.2"))
    graph = Graph(nodes, edges)
    assert [graph.distance_to_end(stage) for stage in graph.stages] == [2, 1, 0, 3]


def test_node_of_finds_the_instance_that_works_on_a_microbatch() -> None:
    instances = tuple(Node(stage="language.0", rank=r, microbatches=(2 * r, 2 * r + 1), replica=r) for r in (0, 1))
    graph = Graph(instances, ())
    assert [graph.node_of("language.0", m).rank for m in range(4)] == [0, 0, 1, 1]
    assert graph.instances("language.0") == instances


def test_microbatches_come_in_the_order_that_all_instances_keep() -> None:
    graph = Graph(
        (
            Node(stage="vision.0", rank=0, microbatches=(2, 0, 3, 1)),
            Node(stage="language.0", rank=1, microbatches=(0, 1)),
            Node(stage="language.0", rank=2, microbatches=(2, 3), replica=1),
        ),
        (("vision.0", "language.0"),),
    )
    assert graph.microbatches == (2, 0, 3, 1)


def test_weight_gradients_take_half_where_a_gradient_is_passed_on_and_all_where_not() -> None:
    graph = chain(2, 1)
    first, second = graph.nodes
    assert [graph.weight_cost(node) for node in (first, second)] == [2.0, 1.0]
    assert [graph.splits(node) for node in (first, second)] == [False, True]


def test_a_frozen_stage_that_passes_gradients_on_is_not_split() -> None:
    frozen = Node(stage="b.0", rank=1, microbatches=(0,), backward_cost=1.0, weight_cost=0.0)
    graph = Graph((_node("a.0", 0, 0), frozen), (("a.0", "b.0"),))
    assert not graph.splits(frozen)


def test_stages_of_a_rank_come_in_the_order_of_the_pipeline() -> None:
    graph = chunked(2, 2, 1, schedule="zbv")
    assert graph.stages_of(0) == ("language.0", "language.3")
    assert graph.stages_of(1) == ("language.1", "language.2")


def test_refuses_a_weight_cost_beyond_the_backward_cost() -> None:
    node = Node(stage="a.0", rank=0, microbatches=(0,), backward_cost=1.0, weight_cost=1.5)
    with pytest.raises(ValueError, match=r"weight_cost is 1\.5.*backward_cost, which is 1\.0"):
        Graph((node,), ())


def _node(stage: str, rank: int, *microbatches: int, backward_cost: float = 2.0) -> Node:
    return Node(stage=stage, rank=rank, microbatches=microbatches, backward_cost=backward_cost)


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ([_node("a.0", 0, 0)], [("a.0", "b.0")], r"no node has the stage 'b\.0'.*Use two of a\.0"),
        ([_node("a.0", 0, 0), _node("b.0", 1, 0)], [("a.0", "b.0")] * 2, r"given 2 times"),
        (
            [_node("a.0", 0, 0), _node("b.0", 1, 0)],
            [("a.0", "b.0"), ("b.0", "a.0")],
            r"is a cycle",
        ),
        ([_node("a.0", 0, 0), _node("a.0", 1, 0)], [], r"2 of its instances work on microbatch 0"),
        ([_node("a.0", 0, 0), _node("b.0", 1, 0, 1)], [], r"a\.0: 0 of its instances work on microbatch 1"),
        ([_node("a.0", 0, 0, 0)], [], r"a\.0: 2 of its instances work on microbatch 0"),
        ([_node("a.0", 0, 0), _node("a.0", 0, 1)], [], r"rank 0 has 2 instances"),
        ([_node("a.0", 0, 0, 1), _node("b.0", 1, 1, 0)], [], r"put the microbatches \[.*\] in a circle"),
        (
            [_node("a.0", 0, 0), _node("b.0", 1, 0, backward_cost=0)],
            [("a.0", "b.0")],
            r"a\.0 runs backwards but b\.0 does not",
        ),
        ([_node("a.0", 0, 0), _node("a.0", 1, 1, backward_cost=0)], [], r"backward_cost is \[2\.0, 0\]"),
        ([_node("a.0", 0, 0, backward_cost=-1)], [], r"backward_cost is -1.*finite"),
        ([_node("a.0", 0, 0, backward_cost=float("nan"))], [], r"backward_cost is nan.*finite"),
    ],
)
def test_refuses_a_graph_that_no_schedule_could_run(
    nodes: list[Node], edges: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Graph(tuple(nodes), tuple(edges))
