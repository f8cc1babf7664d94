"""Tells whether replicas can meet in the actions of a step, where parameters are gathered or tokens travel to experts.

Where they cannot, a step gathers all that they share before its first action.
"""

from __future__ import annotations

from typing import Any

from lightning_mm5d.plan.data_shards import DataShards
from lightning_mm5d.plan.issued import check_messages
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action, AnySchedule, Graph, Schedule, ScheduleError
from lightning_mm5d.schedule.actions import dependencies
from lightning_mm5d.schedule.meeting import can_meet, gathers

_ALL_FORWARDS_FIRST = "gpipe"


def why_apart(
    plan: Plan, schedule: AnySchedule, count: int, trainable: frozenset[str], *, is_ordered: bool = False
) -> str | None:
    """Return why replicas cannot meet in the actions of a step; None where they can. The same on all ranks.

    Args:
        plan: all stages.
        schedule: of the step.
        count: microbatches of each replica, M.
        trainable: names of the parameters that require a gradient.
        is_ordered: whether operations between ranks run in the order of issue.
    """
    if path := _conditional(plan):
        return f"{path} calls some of its experts only with tokens for them, which a rank of a sequence may not have"
    if _ends(plan, schedule, count, trainable, is_ordered):
        return None
    name = schedule if isinstance(schedule, str) else "of your own"
    helps = name != _ALL_FORWARDS_FIRST and _ends(plan, _ALL_FORWARDS_FIRST, count, trainable, is_ordered)
    fix = f"; with schedule={_ALL_FORWARDS_FIRST!r} they can meet" if helps else ""
    return f"replicas would wait for each other in the schedule {name}{fix}"


def _ends(plan: Plan, schedule: AnySchedule, count: int, trainable: frozenset[str], is_ordered: bool) -> bool:
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

    if not can_meet(actions, lambda rank, action: dependencies(action, graphs[rank]), meets):
        return False
    if is_ordered and topology.edges:
        try:
            check_messages(plan, schedule, count, trainable, meets=True)
        except ScheduleError:
            return False
    return True


def _conditional(plan: Plan) -> str | None:
    """Return a layer with several modules of experts, on ranks that have different tokens of a sequence.

    Which of them it calls may depend on its tokens: Ernie 4.5 VL has experts for text and experts for images. A rank
    that goes on to its attention would wait there for one that waits for it at experts.
    """
    for name, modality in plan.modalities.items():
        if plan.layout.sizes(name).cp == 1 and not modality.sequence_parallel:
            continue
        held = [layer.path for layer in plan.experts.values() if layer.modality == name]
        for path in plan.partition.parts[name].paths:
            if sum(one.startswith(f"{path}.") for one in held) > 1:
                return path
    return None
