"""Microbatches in groups: the schedule is valid, groups lie in a row, and messages keep one order."""

from __future__ import annotations

import pytest

from lightning_mm5d.schedule import SCHEDULES, Graph, Grouping, IssueOrder, Kind, Node, build, validate
from lightning_mm5d.schedule.graph import StageKey


def _graph(count: int) -> Graph:
    stages = [StageKey("vision", 0), StageKey("language", 0), StageKey("language", 1)]
    nodes = [Node(stage=stage, rank=rank, microbatches=tuple(range(count))) for rank, stage in enumerate(stages)]
    return Graph(tuple(nodes), ((stages[0], stages[1]), (stages[1], stages[2])))


@pytest.mark.parametrize("count", [2, 5, 8])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "zbv"])
def test_groups_lie_in_a_row_and_can_be_executed(name: str, count: int) -> None:
    graph, grouping = _graph(count), Grouping(2, count)
    schedule = grouping.expanded(build(name, grouping.coarse(graph)))
    validate(schedule, graph)
    for actions in schedule.values():
        assert grouping.expanded(grouping.firsts({0: actions}))[0] == actions
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            if grouping.members(action.microbatch)[-1] != action.microbatch:
                assert following is not None
                assert (following.kind, following.stage) == (action.kind, action.stage)
                assert following.microbatch == action.microbatch + 1


def test_a_group_receives_before_its_first_action_and_sends_after_its_last() -> None:
    graph, grouping = _graph(4), Grouping(2, 4)
    schedule = grouping.expanded(build("1f1b", grouping.coarse(graph)))
    order = IssueOrder(schedule, graph, grouping)
    issued: dict[int, list[int]] = {}
    for rank, actions in schedule.items():
        posted: set[int] = set()
        for turn in order.turns(actions):
            action = turn.action
            posted |= {message.place for message in turn.receives}
            assert posted >= {message.place for message in order.needed(action)}
            issued.setdefault(rank, []).extend(message.place for message in turn.sends)
            if action.kind is not Kind.W and grouping.place(action.microbatch) == 0:
                assert not turn.sends
                sources = {message.microbatch for message in order.needed(action)}
                assert sources in (set(), {*grouping.members(action.microbatch)})
    assert all(places == sorted(places) for places in issued.values())
