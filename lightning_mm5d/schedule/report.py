"""Plays schedules of the same stages side by side, and gives what came of it as plain values for a table or JSON.

Which schedule is best depends on depth, costs and microbatches, so all are played; that takes seconds, a run takes
days. It refuses what `build` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mm5d.schedule.actions import Schedule
from lightning_mm5d.schedule.builders import SCHEDULES, AnySchedule, build
from lightning_mm5d.schedule.custom import label
from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.simulate import Simulation, simulate


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a schedule.

    Args:
        schedule: as `name_of` calls it.
        graph: the stages as they were placed for it.
        actions: for each rank what it runs, in order.
        simulation: its timeline.
    """

    schedule: str
    graph: Graph
    actions: Schedule
    simulation: Simulation

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they idle."""
        return sum(self.simulation.bubble.values()) / max(len(self.simulation.bubble), 1)

    @property
    def peak_activations(self) -> int:
        """The most microbatches that any rank holds, summed over its stages: two of half a stage count as two."""
        return max(self.simulation.peak_activations.values(), default=0)

    def as_json(self) -> dict[str, Any]:
        """Return ``{"schedule", "makespan", "bubble", "ranks"}``.

        Ranks holds for each ``{"rank", "modality", "stage", "peak_activations", "actions"}``. Modality is joined with
        ``+`` where a rank has several, stage is the index of its first, and actions are written as in `custom`:
        ``F0``, ``B0``, ``I0``, ``W0``, with ``.chunk`` where a rank has several stages.
        """
        ranks = []
        for rank in self.graph.ranks:
            stages = self.graph.stages_of(rank)
            ranks.append(
                {
                    "rank": rank,
                    "modality": "+".join(dict.fromkeys(stage.modality for stage in stages)),
                    "stage": stages[0].number,
                    "peak_activations": self.simulation.peak_activations[rank],
                    "actions": [label(action, rank, self.graph) for action in self.actions[rank]],
                }
            )
        makespan = self.simulation.makespan
        return {"schedule": self.schedule, "makespan": makespan, "bubble": self.bubble, "ranks": ranks}


def compare(
    graph: Graph | Callable[[AnySchedule], Graph],
    schedules: Iterable[AnySchedule] = SCHEDULES,
    *,
    transfer_cost: float | Callable[[str, str], float] = 0.0,
) -> list[Outcome]:
    """Plays schedules side by side.

    Args:
        graph: the stages; or a function from a schedule to them, where placements differ. ``auto`` then takes the
            best over the placements of all schedules.
        schedules: as `build` takes them.
        transfer_cost: as in `simulate`.

    Raises:
        ConfigError: for a name that is not known.
        ScheduleError: for a schedule of the user's that does not fit the graph.
    """
    schedules = list(schedules)
    outcomes = []
    for schedule in schedules:
        played = [_play(schedule, placed, transfer_cost) for placed in _graphs(graph, schedule, schedules)]
        outcomes.append(min(played, key=lambda outcome: outcome.simulation.makespan))
    return outcomes


def name_of(schedule: AnySchedule) -> str:
    """Return a schedule's name; for a user's own the path of its table, ``table``, or the name of its function."""
    if not isinstance(schedule, str):
        return getattr(schedule, "__name__", type(schedule).__name__)
    return schedule if schedule in SCHEDULES or schedule.endswith(".csv") else "table"


def _graphs(
    graph: Graph | Callable[[AnySchedule], Graph], schedule: AnySchedule, schedules: Sequence[AnySchedule]
) -> list[Graph]:
    if isinstance(graph, Graph):
        return [graph]
    return list(dict.fromkeys(graph(other) for other in (schedules if schedule == "auto" else [schedule])))


def _play(schedule: AnySchedule, graph: Graph, transfer_cost: float | Callable[[str, str], float]) -> Outcome:
    actions = build(schedule, graph)
    simulation = simulate(actions, graph, transfer_cost=transfer_cost)
    return Outcome(schedule=name_of(schedule), graph=graph, actions=actions, simulation=simulation)
