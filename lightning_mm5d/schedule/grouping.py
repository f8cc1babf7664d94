"""Groups of consecutive microbatches that a rank computes together, one behind the other in its schedule.

The schedule is built for groups as if each were one microbatch of as many times the cost, and then each action becomes
those of the group's microbatches. So a stage that computes a group at once waits for nothing that a schedule of single
microbatches would not have brought, and one that computes its microbatches one after another follows the same list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_mm5d.schedule.actions import Action, Schedule
from lightning_mm5d.schedule.graph import Graph


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
