"""The validator: it passes what builders make (see test_builders) and names what is wrong elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_mm5d.schedule import (
    Action,
    Graph,
    Kind,
    Node,
    Schedule,
    ScheduleError,
    build,
    execution_order,
    validate,
)

from .graphs import chain, most_in_flight, tree


def _f(stage: int, microbatch: int) -> Action:
    return Action(Kind.F, f"language.{stage}", microbatch)


def _b(stage: int, microbatch: int) -> Action:
    return Action(Kind.B, f"language.{stage}", microbatch)


def _drop(schedule: Schedule) -> None:
    schedule[0].remove(_b(0, 1))


def _double(schedule: Schedule) -> None:
    schedule[1].append(_f(1, 0))


def _move(schedule: Schedule) -> None:
    schedule[0].append(schedule[1].pop())


def _invent(schedule: Schedule) -> None:
    schedule[0].append(_f(0, 7))


def _backward_first(schedule: Schedule) -> None:
    schedule[1] = [_b(1, 0), _f(1, 0), _f(1, 1), _b(1, 1)]


def _circular(schedule: Schedule) -> None:
    schedule[0] = [_f(0, 0), _b(0, 0), _f(0, 1), _b(0, 1)]
    schedule[1] = [_f(1, 0), _f(1, 1), _b(1, 0), _b(1, 1)]


def _overtake_forward(schedule: Schedule) -> None:
    schedule[1] = [_f(1, 1), _f(1, 0), _b(1, 0), _b(1, 1)]
    schedule[0] = [_f(0, 0), _f(0, 1), _b(0, 0), _b(0, 1)]


def _overtake_backward(schedule: Schedule) -> None:
    schedule[1] = [_f(1, 0), _f(1, 1), _b(1, 1), _b(1, 0)]
    schedule[0] = [_f(0, 0), _f(0, 1), _b(0, 0), _b(0, 1)]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_drop, r"rank 0: B\(language\.0, 1\) is missing"),
        (_double, r"rank 1: F\(language\.1, 0\) appears 2 times"),
        (_move, r"rank 0: B\(language\.1, 1\) belongs to rank 1"),
        (_invent, r"rank 0: F\(language\.0, 7\) has no place"),
        (_backward_first, r"Deadlock: .*rank 1 at B\(language\.1, 0\) waits for F\(language\.1, 0\)"),
        (
            _circular,
            r"rank 0 at B\(language\.0, 0\) waits for B\(language\.1, 0\); "
            r"rank 1 at F\(language\.1, 1\) waits for F\(language\.0, 1\)",
        ),
        (
            _overtake_forward,
            r"F from language\.0 on rank 0 to language\.1 on rank 1: .*\[0, 1\].*\[1, 0\]",
        ),
        (
            _overtake_backward,
            r"B from language\.1 on rank 1 to language\.0 on rank 0: .*\[1, 0\].*\[0, 1\]",
        ),
    ],
)
def test_names_what_is_wrong_with_a_spoilt_schedule(spoil: Callable[[Schedule], None], message: str) -> None:
    graph = chain(2, 2)
    schedule = build("1f1b", graph)
    validate(schedule, graph)
    spoil(schedule)
    with pytest.raises(ScheduleError, match=message):
        validate(schedule, graph)


def test_gpipe_exceeds_a_bound_on_activations_that_1f1b_keeps() -> None:
    graph = chain(3, 6)
    assert most_in_flight(build("1f1b", graph), graph)["language.0"] == 3
    assert most_in_flight(build("gpipe", graph), graph)["language.0"] == 6


def test_frozen_stages_hold_nothing_and_may_not_run_backward() -> None:
    graph = tree(4, vision=1, language=1, frozen=("vision",))
    schedule = build("1f1b", graph)
    validate(schedule, graph)
    assert most_in_flight(schedule, graph) == {"language.0": 1}
    schedule[0].append(Action(Kind.B, "vision.0", 0))
    with pytest.raises(ScheduleError, match=r"B\(vision\.0, 0\) has no place"):
        validate(schedule, graph)


def test_forward_only_refuses_backwards() -> None:
    graph = chain(2, 2)
    validate(build("1f1b", graph, forward_only=True), graph, forward_only=True)
    with pytest.raises(ScheduleError, match="has no place"):
        validate(build("1f1b", graph), graph, forward_only=True)


def test_order_is_free_between_stages_of_one_rank() -> None:
    """language.0 and language.1 share rank 0: nothing is sent, so nothing can overtake."""
    nodes = tuple(Node(stage=f"language.{i}", rank=0, microbatches=(0, 1)) for i in range(2))
    graph = Graph(nodes, (("language.0", "language.1"),))
    actions = [_f(0, 0), _f(0, 1), _f(1, 1), _f(1, 0), _b(1, 0), _b(1, 1), _b(0, 1), _b(0, 0)]
    validate({0: actions}, graph)


def test_execution_order_runs_every_action_after_what_it_needs() -> None:
    graph = tree(3, vision=1, audio=1, language=2)
    schedule = build("1f1b", graph)
    order = [action for _, action in execution_order(schedule, graph)]
    assert sorted(map(str, order)) == sorted(str(action) for actions in schedule.values() for action in actions)
    for m in range(3):
        joint = order.index(Action(Kind.F, "language.0", m))
        assert joint > order.index(Action(Kind.F, "vision.0", m))
        assert joint > order.index(Action(Kind.F, "audio.0", m))


def _split(stage: int, microbatch: int) -> list[Action]:
    return [Action(kind, f"language.{stage}", microbatch) for kind in (Kind.I, Kind.W)]


def test_backwards_may_be_split_for_some_microbatches_only() -> None:
    graph = chain(2, 2)
    first, second = _split(1, 1)
    validate({0: [_f(0, 0), _f(0, 1), _b(0, 0), _b(0, 1)], 1: [_f(1, 0), _b(1, 0), _f(1, 1), first, second]}, graph)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([_f(0, 0), *_split(0, 0), _b(0, 0)], r"B\(language\.0, 0\) appears beside I\(language\.0, 0\) and W"),
        ([_f(0, 0), _split(0, 0)[0]], r"W\(language\.0, 0\) is missing"),
        ([_f(0, 0), _split(0, 0)[1]], r"I\(language\.0, 0\) is missing"),
        ([_f(0, 0), *reversed(_split(0, 0))], r"Deadlock: rank 0 at W\(language\.0, 0\) waits for B"),
    ],
)
def test_refuses_parts_that_are_alone_doubled_or_in_the_wrong_order(actions: list[Action], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate({0: actions}, chain(1, 1))


def test_weight_gradients_may_run_in_any_order_but_input_gradients_may_not() -> None:
    graph = chain(2, 2)
    (i0, w0), (i1, w1) = _split(1, 0), _split(1, 1)
    first = [_f(0, 0), _f(0, 1), _b(0, 0), _b(0, 1)]
    validate({0: first, 1: [_f(1, 0), _f(1, 1), i0, i1, w1, w0]}, graph)
    with pytest.raises(ScheduleError, match=r"B from language\.1 on rank 1 to language\.0"):
        validate({0: first, 1: [_f(1, 0), _f(1, 1), i1, i0, w1, w0]}, graph)


def test_activations_count_until_the_weight_gradient() -> None:
    graph = chain(1, 2)
    (i0, w0), (i1, w1) = _split(0, 0), _split(0, 1)
    for actions, most in (([_f(0, 0), i0, _f(0, 1), i1, w0, w1], 2), ([_f(0, 0), i0, w0, _f(0, 1), i1, w1], 1)):
        validate({0: actions}, graph)
        assert most_in_flight({0: actions}, graph) == {"language.0": most}
