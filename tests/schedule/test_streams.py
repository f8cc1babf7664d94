"""Which operations end on which streams: the threads of today's transport, and one order for all messages."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from lightning_mm5d.schedule import (
    SCHEDULES,
    Action,
    Graph,
    IssueOrder,
    Kind,
    Message,
    Schedule,
    ScheduleError,
    build,
)
from lightning_mm5d.schedule.issue_order import MODELS, Operation, Step, check_streams

from .graphs import chain, chunked, random_graph, tree


def _operation(message: Message, graph: Graph, *, world: bool = False) -> Operation:
    """A message as an operation of two ranks, on a group of these, or on one of two groups of the world by its way."""
    source, target = (graph.node_of(stage, message.microbatch).rank for stage in (message.source, message.target))
    group = ("world", source < target) if world else ("pair", *sorted((source, target)))
    return Operation(message, (source, target), group)


def _ordered(schedule: Schedule, graph: Graph) -> dict[int, list[list[Step]]]:
    """What ranks do that issue in one order from one thread."""
    order, found = IssueOrder(schedule, graph), {}
    for rank, actions in schedule.items():
        steps: list[Step] = []
        sent: list[Step] = []
        for action, receives, sends in order.turns(actions):
            steps += [Step(one) for one in _crossing(receives, graph)]
            steps += [Step(one, waits=True) for one in _crossing(order.needed(action), graph)]
            steps += [Step(one) for one in _crossing(sends, graph)]
            sent += [Step(one, waits=True) for one in _crossing(sends, graph)]
        found[rank] = [[*steps, *sent]]
    return found


def _crossing(messages: tuple[Message, ...] | list[Message], graph: Graph, *, world: bool = False) -> list[Operation]:
    found = [_operation(one, graph, world=world) for one in messages]
    return [one for one in found if one.ranks[0] != one.ranks[1]]


def _threaded(schedule: Schedule, graph: Graph) -> dict[int, list[list[Step]]]:
    """What ranks do today: a thread for each peer posts the next receive once the last one has ended."""
    order, found = IssueOrder(schedule, graph), {}
    for rank, actions in schedule.items():
        main: list[Step] = []
        receivers: dict[int, list[Step]] = {}
        for action, _, sends in order.turns(actions):
            for one in _crossing(order.needed(action), graph, world=True):
                receivers.setdefault(one.ranks[0], []).extend((Step(one), Step(one, waits=True)))
                main.append(Step(one, waits=True))
            main += [Step(one) for one in _crossing(sends, graph, world=True)]
        found[rank] = [*receivers.values(), main]
    return found


HANG = {"vision | language pp 2": tree(8, vision=1, language=2), "3 ranks": chain(3, 8), "4 ranks": chain(4, 8)}


@pytest.mark.parametrize("name", HANG)
def test_receives_that_threads_post_ahead_hold_up_sends_of_the_same_group(name: str) -> None:
    graph = HANG[name]
    schedule = build("1f1b", graph)
    programs = _threaded(schedule, graph)
    with pytest.raises(ScheduleError, match="Deadlock with one stream for each group: rank 0 waits for gradients"):
        check_streams(programs)
    check_streams(programs, {"way": MODELS["one stream for each sender and receiver"]})
    check_streams(_ordered(schedule, graph))


@pytest.mark.parametrize("seed", range(150))
def test_one_order_ends_on_every_kind_of_stream(seed: int) -> None:
    rng = Random(seed)
    graph, forward_only = random_graph(rng), rng.random() < 0.2
    name = rng.choice([name for name in SCHEDULES if name != "auto"])
    check_streams(_ordered(build(name, graph, forward_only=forward_only), graph))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_ends_with_chunks_and_parallel_encoders(schedule: str) -> None:
    for graph in (chunked(3, 2, 7, schedule=schedule), tree(5, vision=2, audio=1, language=3, frozen=("audio",))):
        check_streams(_ordered(build(schedule, graph), graph))


def test_a_users_schedule_ends_too() -> None:
    graph = chain(2, 3)

    def all_of(kind: Kind, stage: int) -> list[Action]:
        return [Action(kind, f"language.{stage}", m) for m in range(3)]

    schedule = {0: [*all_of(Kind.F, 0), *all_of(Kind.B, 0)], 1: [*all_of(Kind.F, 1), *all_of(Kind.B, 1)]}
    check_streams(_ordered(schedule, graph))


def _programs(**listed: str) -> Mapping[int, list[list[Step]]]:
    """Programs of ranks r0, r1, ..: ``"m01 sum"`` issues these, ``"!m01"`` waits; m01 goes from rank 0 to rank 1."""
    found = {}
    for rank, text in listed.items():
        steps = []
        for word in text.split():
            name = word.removeprefix("!")
            ranks = (int(name[1]), int(name[2])) if name[0] == "m" else tuple(range(len(listed)))
            steps.append(Step(Operation(name, ranks, name[0]), waits=word.startswith("!")))
        found[int(rank[1:])] = [steps]
    return found


def test_a_sum_before_the_last_message_ends_only_where_it_has_a_stream_of_its_own() -> None:
    """A parameter that the first and the last stage share: the last stage is done with it first."""
    early = _programs(r0="m10 !m10 sum !sum", r1="sum m10 !sum !m10")
    with pytest.raises(
        ScheduleError,
        match="each device: rank 0 waits for m10; rank 1 waits for sum",
    ):
        check_streams(early)
    check_streams(early, {name: MODELS[name] for name in list(MODELS)[:2]})
    check_streams(_programs(r0="m10 !m10 sum !sum", r1="m10 sum !sum !m10"))


def test_ends_that_disagree_on_the_order_of_messages_are_named() -> None:
    with pytest.raises(ScheduleError, match="ranks 0 and 1 issue different operations on m: number 0 is m01a and m01b"):
        check_streams(_programs(r0="m01a m01b", r1="m01b m01a"))
    with pytest.raises(ScheduleError, match="number 1 is m01b and nothing"):
        check_streams(_programs(r0="m01a m01b", r1="m01a"))


def test_a_receive_posted_before_what_its_send_needs_is_found() -> None:
    programs = _programs(r0="m10 m01 !m10 !m01", r1="m01 !m01 m10 !m10")
    with pytest.raises(ScheduleError, match="Deadlock with one stream for each group"):
        check_streams(programs)
    check_streams(programs, {"way": MODELS["one stream for each sender and receiver"]})
