"""One order for all messages of a step, the same on all ranks, in which no device can deadlock.

Messages are sorted by the action that sends them, and actions by their end in a simulation. That order follows from the
schedule and its graph, so every rank derives the same one. A rank issues its sends and receives in that order:

1. before an action: all receives whose messages come before those of the action, needed by the action or not;
2. after the action: its sends.

Proof that this cannot deadlock, even on a device that runs one operation at a time in the order of issue: take the
first unfinished message in the order. Its sender can run the sending action, since all messages that this action
depends on come earlier. Both ends have issued everything that comes earlier, and all of that has finished. So both ends
are at the front of their devices, and the message passes. The same holds for one stream per pair, in one direction or
in both.

Microbatches in a group (`Grouping`) are one action here: it comes after all messages to any of them, and before all
messages of any of them. So a rank may compute them at once or one after another.

What arrives while an action runs was posted before it. The order knows stages only: a message between ranks is divided
as the layout says, and what stays on one rank is not issued. A rank that is at both ends of a message sends its share
to others before it receives its own.

Actions that run together: groups of consecutive microbatches, and instances of one stage at the same time.

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

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_mm5d.schedule.graph import Action, Graph, Kind, Schedule, cost, dependencies
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.schedule.validate import ScheduleError, execution_order, validate


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


class Message(NamedTuple):
    """What one action of a stage sends to one other stage, from all ranks of an instance to all ranks of another.

    Attributes:
        place: position among all messages of the step; messages sort by it.
        source: the stage that sends.
        target: the stage that receives.
        microbatch: global id.
        gradients: whether it carries gradients, from a later stage to an earlier one.
    """

    place: int
    source: StageKey
    target: StageKey
    microbatch: int
    gradients: bool

    def __str__(self) -> str:
        what = "gradients" if self.gradients else "activations"
        return f"{what} of microbatch {self.microbatch}, {self.source} -> {self.target}"


class Turn(NamedTuple):
    """An action of a rank with what the rank issues around it, each in the order of issue.

    Attributes:
        action: the action.
        receives: posted before the action; the action may need only some of them, or others that were posted earlier.
        sends: issued after it; those of a group after its last action at the latest.
    """

    action: Action
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


class IssueOrder:
    """The messages of one step of a schedule, in order.

    Args:
        schedule: for each rank its actions in order.
        graph: its stages; their costs decide which of two independent messages comes first.
        grouping: of microbatches whose actions follow each other in the schedule; None without groups.

    Raises:
        ScheduleError: the schedule deadlocks.
    """

    def __init__(self, schedule: Schedule, graph: Graph, grouping: Grouping | None = None) -> None:
        self._sent: dict[Action, tuple[Message, ...]] = {}
        self._before: dict[Action, int] = {}  # how many messages come before those of the action
        self._arriving: defaultdict[tuple[StageKey, int, bool], list[Message]] = defaultdict(list)
        self._grouping = grouping
        if grouping is not None:
            schedule, graph = grouping.firsts(schedule), grouping.coarse(graph)
        count = 0
        for action in total_order(schedule, graph):
            gradients = action.kind is not Kind.F
            before, members = count, [action.microbatch] if grouping is None else grouping.members(action.microbatch)
            for member in members:
                one = Action(action.kind, action.stage, member)
                self._before[one] = before
                self._sent[one] = tuple(
                    Message(place, one.stage, target, member, gradients)
                    for place, target in enumerate(_targets(one, graph), start=count)
                )
                count += len(self._sent[one])
                for message in self._sent[one]:
                    self._arriving[message.target, self._first(member), gradients].append(message)

    def turns(self, actions: Iterable[Action]) -> list[Turn]:
        """Return what one rank issues around each of its actions.

        Args:
            actions: of the rank, in the order of the schedule. Actions may be left out together with those of the same
                microbatch on other ranks.
        """
        found = list(actions)
        due = deque(sorted(message for action in found for message in self.needed(action)))
        turns, held = [], list[Message]()  # messages of a group, which leave together
        for action in found:
            receives = []
            while due and due[0].place < self._before[action]:
                receives.append(due.popleft())
            held += self._sent[action]
            is_last = self._grouping is None or self._grouping.members(action.microbatch)[-1] == action.microbatch
            turns.append(Turn(action, tuple(receives), tuple(held) if is_last else ()))
            held = [] if is_last else held
        assert not due, f"no action receives {due[0]}"
        return turns

    def needed(self, action: Action) -> list[Message]:
        """Return the messages that an action takes, in their order; no other action takes them.

        The first action of a group takes those of all.
        """
        if action.kind is Kind.W or self._first(action.microbatch) != action.microbatch:
            return []
        return self._arriving.get((action.stage, action.microbatch, action.kind is not Kind.F), [])

    def _first(self, microbatch: int) -> int:
        return microbatch if self._grouping is None else self._grouping.first(microbatch)


def total_order(schedule: Schedule, graph: Graph) -> list[Action]:
    """Return all actions by their simulated end, each after those that it depends on and those before it on its rank.

    Actions that end together, and actions that take no time, come in the order of a simulation in which each action
    takes one unit, and then by their names.

    Args:
        schedule: for each rank its actions in order.
        graph: its stages, with costs.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    ends: dict[Action, tuple[float, int]] = {}  # in the unit of the costs, and in actions
    free = dict.fromkeys(schedule, (0.0, 0))
    order: list[tuple[float, int, StageKey, int, str, Action]] = []
    for rank, action in execution_order(schedule, graph):
        start, number = free[rank]
        for needed in dependencies(action, graph):
            arrival, count = ends[needed]
            start, number = max(start, arrival), max(number, count)
        end = free[rank] = ends[action.provides] = start + cost(action, graph), number + 1
        order.append((*end, action.stage, action.microbatch, action.kind.value, action))
    return [action for *_, action in sorted(order, key=lambda one: one[:-1])]


def _targets(action: Action, graph: Graph) -> tuple[StageKey, ...]:
    """The stages that get something from an action."""
    if action.kind is Kind.F:
        return graph.successors(action.stage)
    if action.passes_gradients:
        return tuple(stage for stage in graph.predecessors(action.stage) if graph.has_backward(stage))
    return ()
