"""Actions that run together: groups of consecutive microbatches, and instances of one stage at the same time.

A rank computes the microbatches of a group together, one after another in its schedule. The schedule is built for
groups as if each were one microbatch of as many times the cost, and then each action becomes those of the group's
microbatches. So a stage that computes a group at once waits for nothing that a schedule of single microbatches would
not have brought, and one that computes its microbatches one after another follows the same list.

A schedule's rank may stand for several ranks (see `Node.rank`): with tensor parallelism they share each stage of the
language model, but each may run its own instance of an encoder. A builder sees one rank that runs one action at a time,
so it could put a language model's forward between the encoder's forwards for two microbatches; one of the ranks then
waits while another encodes. With n instances, the forwards of n consecutive microbatches move to the first of them, and
the backwards to the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lightning_mm5d.schedule.actions import Action, Kind, Schedule
from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.schedule.validate import ScheduleError, validate


@dataclass(frozen=True)
class Grouping:
    """Microbatches of each replica in groups of `size`; the last group of a replica may be smaller.

    Args:
        size: microbatches in a group.
        count: microbatches of each replica, M; microbatch i of replica r has the id ``r * M + i``.
    """

    size: int
    count: int

    def first(self, microbatch: int) -> int:
        """Return the first microbatch of the group of `microbatch`."""
        return microbatch - microbatch % self.count % self.size

    def members(self, microbatch: int) -> range:
        """Return the microbatches of the group of `microbatch`."""
        first = self.first(microbatch)
        return range(first, min(first + self.size, (first // self.count + 1) * self.count))

    def place(self, microbatch: int) -> int:
        """Return which of its group `microbatch` is, from 0."""
        return microbatch - self.first(microbatch)

    def coarse(self, graph: Graph) -> Graph:
        """Return the graph of groups, each under the id of its first microbatch; costs are those of full groups."""
        nodes = [
            replace(
                node,
                microbatches=tuple(m for m in node.microbatches if self.first(m) == m),
                forward_cost=node.forward_cost * self.size,
                backward_cost=node.backward_cost * self.size,
                weight_cost=None if node.weight_cost is None else node.weight_cost * self.size,
            )
            for node in graph.nodes
        ]
        return Graph(tuple(nodes), graph.edges)

    def expanded(self, schedule: Schedule) -> Schedule:
        """Return a schedule of groups as one of microbatches, those of a group in a row."""
        return {
            rank: [
                Action(action.kind, action.stage, member)
                for action in actions
                for member in self.members(action.microbatch)
            ]
            for rank, actions in schedule.items()
        }

    def firsts(self, schedule: Schedule) -> Schedule:
        """Undo `expanded`."""
        return {
            rank: [action for action in actions if self.first(action.microbatch) == action.microbatch]
            for rank, actions in schedule.items()
        }


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
