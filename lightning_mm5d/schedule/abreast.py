"""Lets instances of a stage on one rank run side by side.

A rank may be several ranks that share the layers of one stage and have an instance each of another (an encoder beside
a language model with tensor parallelism). To a builder such a rank does one thing after the other, so it would put
what the language model does with the first microbatch between the encoder's first and second forward, and while one
rank encodes the others would wait. Here forwards of as many microbatches as there are instances move together, to the
first of them, and backwards to the last.

It refuses nothing: where the moved actions could not be executed, the schedule stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_mm5d.schedule.actions import Action, Kind, Schedule
from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.validate import ScheduleError, validate


def abreast(schedule: Schedule, graph: Graph, instances: Mapping[str, int], *, forward_only: bool = False) -> Schedule:
    """Return `schedule` with the actions of side-by-side instances together.

    Args:
        schedule: valid for `graph`.
        graph: the stages.
        instances: how many instances of a stage run side by side on each of its ranks; others run one.
        forward_only: whether it has no backwards.
    """
    blocks: dict[tuple[str, int], list[int]] = {}
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


def _moved(actions: Iterable[Action], blocks: Mapping[tuple[str, int], list[int]]) -> Iterable[Action]:
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
