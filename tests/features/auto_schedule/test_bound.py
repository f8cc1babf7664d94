"""The lower bound: what nothing gets below, told from jobs that are ready late or have far to go."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from lightning_mm5d.features.auto_schedule import lower_bound
from lightning_mm5d.schedule import Graph, Node, build, simulate
from schedule.graphs import chain, chunked, random_graph, tree


@pytest.mark.parametrize("seed", range(30))
def test_no_schedule_of_a_random_graph_is_shorter(seed: int) -> None:
    graph = random_graph(Random(seed))
    for name in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
        assert simulate(build(name, graph), graph).makespan >= lower_bound(graph) - 1e-9


def test_a_rank_that_waits_for_its_second_chunk_bounds_the_makespan() -> None:
    """Ranks 0 to 3 in a V; a head makes rank 0's second chunk the longest, and it comes 7 forwards late."""
    graph = chunked(4, 2, 4, schedule="zbv", times=(0.5, 0.5, 0.5))
    *others, last = graph.nodes
    headed = replace(last, forward_cost=0.8, backward_cost=1.6, weight_cost=0.8)
    graph = Graph((*others, headed), graph.edges)
    ready, after = 7 * 0.5, 4 * (0.8 + 1.6 + 1.0)
    assert lower_bound(graph) == pytest.approx(ready + after)
    assert simulate(build("zbv", graph), graph).makespan == pytest.approx(ready + after)


def test_a_slow_stage_in_front_sets_the_pace_after_it() -> None:
    """``slow`` on rank 0, ``fast`` on rank 1, forward only: the last microbatch is there after 5 * 3."""
    nodes = [
        Node(stage=stage, rank=rank, microbatches=tuple(range(5)), forward_cost=cost, backward_cost=0.0)
        for rank, (stage, cost) in enumerate([("slow.0", 3.0), ("fast.0", 1.0)])
    ]
    assert lower_bound(Graph(tuple(nodes), (("slow.0", "fast.0"),))) == 5 * 3 + 1


def test_replicas_of_an_encoder_deliver_side_by_side() -> None:
    """Two replicas of an encoder on ranks 0 and 1, the language model on rank 2: the sixth comes after three."""
    nodes = [
        Node(
            stage="encoder.0",
            rank=rank,
            microbatches=tuple(range(rank, 6, 2)),
            forward_cost=4.0,
            backward_cost=0.0,
            replica=rank,
        )
        for rank in range(2)
    ]
    language = Node(
        stage="language.0", rank=2, microbatches=tuple(range(6)), forward_cost=1.0, backward_cost=1.0, weight_cost=0.0
    )
    graph = Graph((*nodes, language), (("encoder.0", "language.0"),))
    assert lower_bound(graph) == 3 * 4 + 2 * (1 + 1)  # the last two arrive together
    assert simulate(build("auto", graph), graph).makespan == lower_bound(graph)


def test_one_stage_alone_takes_its_work() -> None:
    assert lower_bound(chain(1, 5)) == 5 * 3


def test_no_microbatches_take_no_time() -> None:
    assert lower_bound(tree(0, vision=1, language=1)) == 0.0


@pytest.mark.parametrize("stages", [2, 5])
def test_frozen_stages_leave_the_way_back_out(stages: int) -> None:
    """A chain of which only the last stage runs backwards: no gradient goes further."""
    nodes = [
        Node(
            stage=f"language.{index}",
            rank=index,
            microbatches=(0, 1),
            backward_cost=2.0 if index == stages - 1 else 0.0,
        )
        for index in range(stages)
    ]
    graph = Graph(tuple(nodes), tuple(pairwise(node.stage for node in nodes)))
    assert lower_bound(graph) == (stages - 1) * 1 + 2 * 3
