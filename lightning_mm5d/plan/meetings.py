"""Tells whether replicas can meet in the actions of a step, where parameters are gathered or tokens travel to experts.

Where they cannot, a step gathers all that they share before its first action.
"""

from __future__ import annotations

from typing import Any

from lightning_mm5d.plan.data_shards import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action, AnySchedule, Graph, Schedule
from lightning_mm5d.schedule.actions import dependencies
from lightning_mm5d.schedule.meeting import can_meet, gathers


def replicas_meet(plan: Plan, schedule: AnySchedule, count: int, trainable: frozenset[str]) -> bool:
    """Return whether the ranks of all replicas can meet in the actions of a step.

    Args:
        plan: all stages.
        schedule: of the step.
        count: microbatches of each replica.
        trainable: names of the parameters that require a gradient.
    """
    topology, shards = plan.topology, DataShards(plan)
    actions: dict[int, list[Action]] = {}
    graphs: dict[int, Graph] = {}
    built: dict[Any, tuple[Graph, Schedule]] = {}
    for rank in range(plan.layout.size):
        key = topology.connected_replicas(rank)
        if key not in built:
            built[key] = plan.graphs.schedule(schedule, count, trainable, rank=rank)
        graphs[rank], found = built[key]
        actions[rank] = topology.actions_of(rank, found, count)

    def meets(rank: int, action: Action) -> tuple[int, ...]:
        return shards.meeting(action.stage, rank) if gathers(action) else ()

    return can_meet(actions, lambda rank, action: dependencies(action, graphs[rank]), meets)
