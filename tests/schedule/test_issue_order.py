"""The order of messages: one for all ranks, after what messages depend on, and complete."""

from __future__ import annotations

from random import Random

import pytest

from lightning_mm5d.schedule import SCHEDULES, Action, Graph, Kind, Schedule, build, dependencies
from lightning_mm5d.schedule.issue_order import IssueOrder, Message, Turn, total_order

from .graphs import chain, chunked, random_graph, tree

SEEDS = range(60)


def _turns(schedule: Schedule, graph: Graph) -> dict[int, list[Turn]]:
    order = IssueOrder(schedule, graph)
    return {rank: order.turns(actions) for rank, actions in schedule.items()}


def _random_case(seed: int) -> tuple[Schedule, Graph, bool]:
    rng = Random(seed)
    graph, forward_only = random_graph(rng), rng.random() < 0.2
    name = rng.choice([name for name in SCHEDULES if name != "auto"])
    return build(name, graph, forward_only=forward_only), graph, forward_only


@pytest.mark.parametrize("seed", SEEDS)
def test_actions_come_after_what_they_depend_on_and_in_the_order_of_their_rank(seed: int) -> None:
    schedule, graph, _ = _random_case(seed)
    order = total_order(schedule, graph)
    assert sorted(map(str, order)) == sorted(str(action) for actions in schedule.values() for action in actions)
    place = {action.provides: number for number, action in enumerate(order)}
    for action in order:
        assert all(place[needed] < place[action.provides] for needed in dependencies(action, graph))
    for actions in schedule.values():
        places = [place[action.provides] for action in actions]
        assert places == sorted(places)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rank_issues_in_the_order_of_places_and_posts_what_an_action_needs_before_it(seed: int) -> None:
    schedule, graph, forward_only = _random_case(seed)
    sent, received = [], []
    for turns in _turns(schedule, graph).values():
        issued = [one for turn in turns for one in (*turn.receives, *turn.sends) if not _is_local(one, graph)]
        assert [message.place for message in issued] == sorted(message.place for message in issued)
        posted: set[tuple[str, str, int, bool]] = set()
        for action, receives, sends in turns:
            posted.update(message[1:] for message in receives)
            received += receives
            sent += sends
            for needed in dependencies(action, graph):
                if needed.stage != action.stage:
                    key = (needed.stage, action.stage, action.microbatch, needed.kind is Kind.B)
                    assert key in posted, f"{action} runs before {key} is posted"
    assert sorted(sent) == sorted(received)
    assert [message.place for message in sorted(sent)] == list(range(len(sent)))
    edges = [edge for edge in graph.edges if graph.has_backward(edge[0]) and not forward_only]
    assert len(sent) == (len(graph.edges) + len(edges)) * len(graph.microbatches)


def _is_local(message: Message, graph: Graph) -> bool:
    ends = (message.source, message.target)
    return len({graph.node_of(stage, message.microbatch).rank for stage in ends}) == 1


def test_the_order_does_not_depend_on_the_order_in_which_ranks_are_listed() -> None:
    graph = tree(6, vision=2, audio=1, language=3)
    schedule = build("1f1b", graph)
    turned = {rank: schedule[rank] for rank in sorted(schedule, reverse=True)}
    assert total_order(schedule, graph) == total_order(turned, graph)


def test_actions_without_cost_keep_an_order_in_which_ranks_take_turns() -> None:
    graph = chain(2, 2, forward_cost=0.0, backward_cost=0.0)
    order = total_order(build("1f1b", graph, forward_only=True), graph)
    assert list(map(str, order)) == ["F(language.0, 0)", "F(language.0, 1)", "F(language.1, 0)", "F(language.1, 1)"]


def test_a_receive_is_posted_one_action_ahead() -> None:
    graph = chain(2, 3)
    turns = _turns({0: [*_all("F", 0), *_all("B", 0)], 1: [*_all("F", 1), *_all("B", 1)]}, graph)
    assert [[message.microbatch for message in turn.receives] for turn in turns[1]] == [[0, 1], [2], [], [], [], []]


def _all(kind: str, stage: int) -> list[Action]:
    return [Action(Kind(kind), f"language.{stage}", m) for m in range(3)]


def test_actions_left_out_leave_out_their_messages() -> None:
    graph = chain(3, 4)
    schedule = build("1f1b", graph)
    order = IssueOrder(schedule, graph)
    turns = order.turns([action for action in schedule[1] if action.microbatch % 2])
    assert {message.microbatch for turn in turns for message in (*turn.receives, *turn.sends)} == {1, 3}


def test_chunks_on_one_rank_have_messages_too() -> None:
    """The ranks of a message follow from the layout: an engine drops those that stay on one rank."""
    graph = chunked(2, 2, 4, schedule="zbv")
    turns = _turns(build("zbv", graph), graph)
    assert any(m.source == "language.1" and m.target == "language.2" for turn in turns[1] for m in turn.receives)
