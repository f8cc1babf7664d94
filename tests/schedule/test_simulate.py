"""The simulator: times, bubbles and activations of schedules whose course is known."""

from __future__ import annotations

import pytest

from lightning_mm5d.schedule import Action, Graph, Kind, ScheduleError, Span, build, simulate

from .graphs import chain, tree


def test_spans_bubble_and_busy_time_of_two_stages() -> None:
    graph = chain(2, 1, forward_cost=1, backward_cost=2)
    simulation = simulate(build("1f1b", graph), graph)
    assert simulation.spans == (
        Span(0, Action(Kind.F, "language.0", 0), 0, 1),
        Span(1, Action(Kind.F, "language.1", 0), 1, 2),
        Span(1, Action(Kind.B, "language.1", 0), 2, 4),
        Span(0, Action(Kind.B, "language.0", 0), 4, 6),
    )
    assert simulation.makespan == 6
    assert simulation.busy == {0: 3, 1: 3}
    assert simulation.bubble == {0: 0.5, 1: 0.5}


def test_gradients_arrive_after_the_input_half_and_activations_stay_until_the_weight_half() -> None:
    graph = chain(2, 1, forward_cost=1, backward_cost=3)
    first, last = "language.0", "language.1"
    split = [Action(Kind.I, last, 0), Action(Kind.W, last, 0)]
    schedule = {0: [Action(Kind.F, first, 0), Action(Kind.B, first, 0)], 1: [Action(Kind.F, last, 0), *split]}
    simulation = simulate(schedule, graph)
    assert simulation.spans[2:] == (
        Span(1, split[0], 2, 3.5),
        Span(0, Action(Kind.B, first, 0), 3.5, 6.5),
        Span(1, split[1], 3.5, 5.0),
    )
    assert simulation.peak_activations == {0: 1, 1: 1}
    held = [Action(Kind.F, last, 0), split[0], Action(Kind.F, last, 1), Action(Kind.I, last, 1), split[1]]
    other = [Action(kind, first, m) for kind in (Kind.F, Kind.B) for m in (0, 1)]
    both = simulate({0: other, 1: [*held, Action(Kind.W, last, 1)]}, chain(2, 2))
    assert both.peak_activations[1] == 2


def test_bubble_of_a_chain_is_the_textbook_share() -> None:
    graph = chain(4, 12)
    bubble = simulate(build("1f1b", graph), graph).bubble
    assert bubble == {rank: pytest.approx(3 / (12 + 3)) for rank in range(4)}


def test_messages_delay_their_receiver_only() -> None:
    graph = chain(2, 1)
    simulation = simulate(build("1f1b", graph), graph, transfer_cost=0.25)
    assert simulation.makespan == 6 + 2 * 0.25
    assert simulation.busy == {0: 3, 1: 3}


def test_transfer_cost_sees_the_sending_and_the_receiving_stage() -> None:
    graph = tree(1, vision=1, language=2)
    seen = set()

    def cost(sender: str, receiver: str) -> float:
        seen.add((sender, receiver))
        return 10.0 if sender == "vision.0" else 0.0

    assert simulate(build("1f1b", graph), graph, transfer_cost=cost).makespan == 9 + 10
    forwards = {("vision.0", "language.0"), ("language.0", "language.1")}
    assert seen == forwards | {(receiver, sender) for sender, receiver in forwards}


def test_forward_only_and_frozen_stages_hold_no_activations() -> None:
    graph = tree(4, vision=1, language=1, frozen=("vision",))
    assert simulate(build("1f1b", graph), graph).peak_activations == {0: 0, 1: 1}
    forwards = build("1f1b", graph, forward_only=True)
    assert simulate(forwards, graph).peak_activations == {0: 0, 1: 0}


def test_no_microbatches_take_no_time() -> None:
    simulation = simulate(build("1f1b", chain(2, 0)), chain(2, 0))
    assert (simulation.makespan, simulation.bubble) == (0.0, {0: 0.0, 1: 0.0})


def test_deadlock_is_refused() -> None:
    graph = Graph(chain(1, 1).nodes, ())
    backward_first = [Action(Kind.B, "language.0", 0), Action(Kind.F, "language.0", 0)]
    with pytest.raises(ScheduleError, match="Deadlock: rank 0 at B"):
        simulate({0: backward_first}, graph)
