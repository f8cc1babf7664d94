"""Moves actions together so that instances of one stage run at the same time.

A schedule's rank may stand for several ranks (see `Node.rank`): with tensor parallelism they share each stage of the
language model, but each may run its own instance of an encoder. A builder sees one rank that runs one action at a time,
so it could put a language model's forward between the encoder's forwards for two microbatches; one of the ranks then
waits while another encodes. With n instances, the forwards of n consecutive microbatches move to the first of them,
and the backwards to the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_mm5d.schedule.actions import Action, Kind, Schedule
from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.schedule.validate import ScheduleError, validate


def side_by_side(
    schedule: Schedule, graph: Graph, instances: Mapping[StageKey, int], *, forward_only: bool = False
) -> Schedule:
    """Return `schedule` with the actions of simultaneous instances next to each other.

    With two instances of ``v.0``, ``F(v.0, 0) F(l.0, 0) F(v.0, 1)`` becomes ``F(v.0, 0) F(v.0, 1) F(l.0, 0)``. Returns
    `schedule` itself if the result could not be executed.

    Args:
        schedule: valid for `graph`.
        graph: the stages.
        instances: how many instances of a stage each of its ranks stands for; 1 for stages that are not named.
        forward_only: whether the schedule has no backwards.
    """
    blocks: dict[tuple[StageKey, int], list[int]] = {}
    for node in graph.nodes:
        width = instances.get(node.stage, 1)
        for first in range(0, len(node.microbatches), width):
            block = [*node.microbatches[first : first + width]]
            blocks |= {(node.stage, microbatch): block for microbatch in block}
    moved = {rank: list(_moved(actions, blocks)) for rank, actions in schedule.items()}
    try:
        validate(moved, graph, forward_only=forward_only)
    except ScheduleError:
        return schedule
    return moved


def _moved(actions: Iterable[Action], blocks: Mapping[tuple[StageKey, int], list[int]]) -> Iterable[Action]:
    seen: set[Action] = set()
    for action in actions:
        together = [Action(action.kind, action.stage, other) for other in blocks[action.stage, action.microbatch]]
        if action.kind is Kind.F:
            if action not in seen:
                yield from together
                seen.update(together)
            continue
        seen.add(action)
        if seen.issuperset(together):
            yield from together
