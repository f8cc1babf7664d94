"""Plays a schedule in simulated time: when each action runs, how long ranks idle, what they must hold.

The same lists that ranks execute are played, so a plan can be judged, and drawn, without a machine. It
refuses schedules that deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lightning_mm5d.schedule.actions import Action, Kind, Schedule, cost, dependencies
from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.validate import execution_order


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank, from ``start`` to ``end`` in the unit of the graph's costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What came of a simulation; times are in the unit of the graph's costs.

    Args:
        spans: all actions, by start and then by rank.
        makespan: when the last action ends.
        busy: for each rank the time in which it computes.
        bubble: for each rank the share of the makespan in which it idles, between 0 and 1.
        peak_activations: for each rank the most microbatches, summed over its stages, that are at one time
            between the start of their forward and the end of their backward (of its weight-gradient half, where
            it is split); those without backward are not held.
    """

    spans: tuple[Span, ...]
    makespan: float
    busy: dict[int, float]
    bubble: dict[int, float]
    peak_activations: dict[int, int]


def simulate(
    schedule: Schedule, graph: Graph, *, transfer_cost: float | Callable[[str, str], float] = 0.0
) -> Simulation:
    """Plays ``schedule``: an action starts once its rank is free and all that it needs has arrived.

    Args:
        schedule: for each rank its actions in order.
        graph: its stages, with costs.
        transfer_cost: how long a message between two ranks is on its way, for all or as a function of the
            sending and the receiving stage (for gradients the later stage sends). It keeps neither rank
            busy, and messages do not slow each other.

    Raises:
        ScheduleError: where the schedule deadlocks.
    """
    spans: dict[Action, Span] = {}
    free = dict.fromkeys(schedule, 0.0)
    busy = dict.fromkeys(schedule, 0.0)
    for rank, action in execution_order(schedule, graph):
        start = free[rank]
        for needed in dependencies(action, graph):
            arrival = spans[needed].end
            if spans[needed].rank != rank:
                arrival += transfer_cost(needed.stage, action.stage) if callable(transfer_cost) else transfer_cost
            start = max(start, arrival)
        duration = cost(action, graph)
        free[rank] = start + duration
        busy[rank] += duration
        spans[action.provides] = Span(rank, action, start, free[rank])
    return _summary(spans.values(), schedule, busy)


def measured(spans: Iterable[Span]) -> Simulation:
    """The same summary of what was measured: the first span begins at 0, and what ranks wait for is idle time."""
    found = sorted(spans, key=lambda span: (span.rank, span.start))
    first = min((span.start for span in found), default=0.0)
    found = [replace(span, start=span.start - first, end=span.end - first) for span in found]
    schedule: Schedule = {span.rank: [] for span in found}
    busy = dict.fromkeys(schedule, 0.0)
    for span in found:
        schedule[span.rank].append(span.action)
        busy[span.rank] += span.end - span.start
    return _summary(found, schedule, busy)


def _summary(spans: Iterable[Span], schedule: Schedule, busy: dict[int, float]) -> Simulation:
    ordered = tuple(sorted(spans, key=lambda span: (span.start, span.rank, span.end)))
    makespan = max((span.end for span in ordered), default=0.0)
    return Simulation(
        spans=ordered,
        makespan=makespan,
        busy=busy,
        bubble={rank: 1 - time / makespan if makespan else 0.0 for rank, time in busy.items()},
        peak_activations={rank: _peak(actions) for rank, actions in schedule.items()},
    )


def _peak(actions: list[Action]) -> int:
    held = {(action.stage, action.microbatch) for action in actions if action.frees}
    count = peak = 0
    for action in actions:
        if (action.stage, action.microbatch) not in held:
            continue
        if action.kind is Kind.F:
            count += 1
            peak = max(peak, count)
        elif action.frees:
            count -= 1
    return peak
