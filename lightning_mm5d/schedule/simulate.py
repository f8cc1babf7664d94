"""Simulates a schedule: when each action runs, how long ranks idle and how many activations they hold.

It takes the same lists of actions that ranks execute. Schedules that deadlock are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lightning_mm5d.schedule.graph import Action, Graph, Kind, Schedule, cost, dependencies
from lightning_mm5d.schedule.stage_key import StageKey
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
    """A timeline and its summary; times are in the unit of the graph's costs.

    Args:
        spans: all actions, by start and then by rank.
        makespan: when the last action ends.
        busy: for each rank the time in which it computes.
        bubble: for each rank its idle share of the makespan, between 0 and 1.
        peak_activations: for each rank the most microbatches, summed over its stages, that it holds at a time: from the
            start of the forward to the end of the backward, or of the weight gradient if the backward is split.
            Microbatches without backward are not held.
    """

    spans: tuple[Span, ...]
    makespan: float
    busy: dict[int, float]
    bubble: dict[int, float]
    peak_activations: dict[int, int]


def simulate(
    schedule: Schedule, graph: Graph, *, transfer_cost: float | Callable[[StageKey, StageKey], float] = 0.0
) -> Simulation:
    """Simulates ``schedule``: an action starts once its rank is free and all its inputs have arrived.

    Args:
        schedule: for each rank its actions in order.
        graph: its stages, with costs.
        transfer_cost: how long a message between two ranks takes, one number for all or a function of the sending and
            the receiving stage (for gradients the later stage sends). It keeps neither rank busy, and messages do not
            slow each other.

    Raises:
        ScheduleError: the schedule deadlocks.
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
    """Return the timeline of measured spans, shifted to start at 0; time between spans counts as idle."""
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
