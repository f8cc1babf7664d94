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

**Streams.** Proves that operations between ranks end on devices that run them in the order of issue. A device runs what
is issued on one *stream* one after the other, and an operation ends only once all of its ranks run it. Which operations
share a stream depends on the transport and on the device, so there is a model for each:

- ``PER_WAY``: a stream for each sender and receiver, and for each group of a collective;
- ``PER_GROUP``: a stream for each communicator, so messages of a pair in both directions may share one;
- ``SERIAL``: one stream for everything, the worst that a device may do.

Each rank is given as what it issues and what it waits for. Operations that end never make another one wait longer, so
one run decides for all timings, if a rank issues from one thread.

Tells whether ranks of several replicas can run a schedule in which some actions are collectives among them.

Gathers of parameters are collectives of ranks that are different replicas. Where these run the actions of their stages
in the same order, and no other rank makes one of them wait for an action that comes after, they can be tied to actions.

Example: an encoder on rank 0 serves two replicas of a language model on ranks 1 and 2. Under ``1f1b`` it waits for a
backward of rank 1 before it sends rank 2 its first input; ranks 1 and 2 can not meet in a forward.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_mm5d.schedule.graph import Action, Graph, Kind, Schedule, StageKey, cost, dependencies
from lightning_mm5d.schedule.validate import ScheduleError, execution_order, validate


def can_meet(
    actions: Mapping[int, Sequence[Action]],
    needed: Callable[[int, Action], Sequence[Action]],
    meets: Callable[[int, Action], Sequence[int]],
) -> bool:
    """Return whether all ranks come to their end.

    Args:
        actions: of each rank, in order.
        needed: returns the actions that must have ended before a rank runs one.
        meets: returns the ranks that a rank meets in an action, among them itself; none where it meets nobody.
    """
    left = Counter(planned.provides for listed in actions.values() for planned in listed)
    position = dict.fromkeys(actions, 0)

    def ready(rank: int) -> Action | None:
        if position[rank] == len(actions[rank]):
            return None
        action = actions[rank][position[rank]]
        return None if any(left[other] for other in needed(rank, action)) else action

    moves = True
    while moves:
        moves = False
        for rank in actions:
            while (action := ready(rank)) is not None:
                kind = action.stage, action.kind
                others = [(other, ready(other)) for other in meets(rank, action) or (rank,)]
                come = [(other, met) for other, met in others if met is not None and (met.stage, met.kind) == kind]
                if len(come) < len(others):
                    break
                for other, met in come:
                    position[other] += 1
                    left[met.provides] -= 1
                moves = True
    return all(position[rank] == len(listed) for rank, listed in actions.items())


def gathers(action: Action) -> bool:
    """Whether an action uses the weights of its layers: all but weight gradients, which are made of activations."""
    return action.kind is not Kind.W


class Operation(NamedTuple):
    """A message or a collective.

    Attributes:
        name: unique, the same on all of its ranks; parts of a plain tuple are told one after the other.
        ranks: those that issue it; of a message the sender and the receiver.
        communicator: on which it is issued.
    """

    name: Hashable
    ranks: tuple[int, ...]
    communicator: Hashable


class Step(NamedTuple):
    """One step of a rank: it issues an operation, or waits until it has ended."""

    operation: Operation
    waits: bool = False


Model = Callable[[Operation], Hashable]
"""Names the stream of an operation."""


def per_way(operation: Operation) -> Hashable:
    """A stream for each sender and receiver, and for each group."""
    return operation.communicator, operation.ranks


def per_group(operation: Operation) -> Hashable:
    """A stream for each communicator."""
    return operation.communicator


def serial(operation: Operation) -> Hashable:
    """One stream for the device."""
    return None


MODELS: dict[str, Model] = {
    "one stream for each sender and receiver": per_way,
    "one stream for each group": per_group,
    "one stream for each device": serial,
}


def check_streams(programs: Mapping[int, Sequence[Sequence[Step]]], models: Mapping[str, Model] = MODELS) -> None:
    """Refuse operations that would not end.

    Args:
        programs: for each rank what each of its threads does, in order. Threads that can go on do so in their order.
        models: by name.

    Raises:
        ScheduleError: the ends of a communicator disagree on the order of its operations, or the ranks would wait for
            each other under a model; it names what each of them waits for.
    """
    _check_matches(programs)
    for name, model in models.items():
        waiting = _Run(programs, model).stuck()
        if waiting:
            raise ScheduleError(f"Deadlock with {name}: {'; '.join(waiting)}. Issue operations in one order.")


def _check_matches(programs: Mapping[int, Sequence[Sequence[Step]]]) -> None:
    """Operations of the same ranks on one communicator match by their order, whatever they are called."""
    issued: defaultdict[tuple[Hashable, tuple[int, ...]], dict[int, list[Hashable]]] = defaultdict(dict)
    for rank, threads in programs.items():
        for step in (step for thread in threads for step in thread):
            operation = step.operation
            if not step.waits:
                issued[operation.communicator, operation.ranks].setdefault(rank, []).append(operation.name)
    for (communicator, ranks), names in issued.items():
        first = names.get(ranks[0])
        for rank in ranks:
            if names.get(rank) != first:
                raise ScheduleError(
                    f"ranks {ranks[0]} and {rank} issue different operations on {communicator}: "
                    f"{_difference(first or [], names.get(rank) or [])}. Both ends issue the same in one order."
                )


def _difference(mine: list[Hashable], other: list[Hashable]) -> str:
    number = next((n for n, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    pair = [_text(names[number]) if number < len(names) else "nothing" for names in (mine, other)]
    return f"number {number} is {pair[0]} and {pair[1]}"


def _text(name: Hashable) -> str:
    return " ".join(map(str, name)) if type(name) is tuple else str(name)


class _Run:
    """One run of all ranks under one model."""

    def __init__(self, programs: Mapping[int, Sequence[Sequence[Step]]], model: Model) -> None:
        self._model = model
        self._threads = [(rank, thread) for rank, threads in programs.items() for thread in threads]
        self._position = [0] * len(self._threads)
        self._streams: defaultdict[tuple[int, Hashable], deque[Operation]] = defaultdict(deque)
        self._heads: Counter[Hashable] = Counter()
        self._ended: set[Hashable] = set()
        self._waiting: defaultdict[Hashable, list[int]] = defaultdict(list)
        self._runnable = list(range(len(self._threads)))[::-1]
        while self._runnable:
            self._advance(self._runnable.pop())

    def stuck(self) -> list[str]:
        """What the ranks that have not come to their end wait for, with what their streams run."""
        waits = []
        for number, (rank, steps) in enumerate(self._threads):
            if self._position[number] < len(steps):
                operation = steps[self._position[number]].operation
                running = self._streams[rank, self._model(operation)]
                first = _text(running[0].name) if running else "nothing"
                ahead = "" if first == _text(operation.name) else f", and its device for {first}"
                waits.append(f"rank {rank} waits for {_text(operation.name)}{ahead}")
        return waits

    def _advance(self, number: int) -> None:
        rank, steps = self._threads[number]
        while self._position[number] < len(steps):
            operation, waits = steps[self._position[number]]
            if waits and operation.name not in self._ended:
                self._waiting[operation.name].append(number)
                return
            self._position[number] += 1
            if not waits:
                stream = self._streams[rank, self._model(operation)]
                stream.append(operation)
                if len(stream) == 1:
                    self._reach([operation])

    def _reach(self, heads: Iterable[Operation]) -> None:
        """Operations came to the head of a stream; end those that are at the heads of all of their ranks' streams."""
        left = list(heads)
        while left:
            operation = left.pop()
            self._heads[operation.name] += 1
            if self._heads[operation.name] < len(operation.ranks):
                continue
            self._ended.add(operation.name)
            self._runnable += reversed(self._waiting.pop(operation.name, []))
            for rank in operation.ranks:
                stream = self._streams[rank, self._model(operation)]
                stream.popleft()
                if stream:
                    left.append(stream[0])


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
                member_action = Action(action.kind, action.stage, member)
                self._before[member_action] = before
                self._sent[member_action] = tuple(
                    Message(place, member_action.stage, target, member, gradients)
                    for place, target in enumerate(_targets(member_action, graph), start=count)
                )
                count += len(self._sent[member_action])
                for message in self._sent[member_action]:
                    self._arriving[message.target, self._first(member), gradients].append(message)

    def turns(self, actions: Iterable[Action]) -> list[Turn]:
        """Return what one rank issues around each of its actions.

        Args:
            actions: of the rank, in the order of the schedule. Actions may be left out together with those of the same
                microbatch on other ranks.
        """
        ordered = list(actions)
        due = deque(sorted(message for action in ordered for message in self.needed(action)))
        turns, held = [], list[Message]()  # messages of a group, which leave together
        for action in ordered:
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
    return [action for *_, action in sorted(order, key=lambda row: row[:-1])]


def _targets(action: Action, graph: Graph) -> tuple[StageKey, ...]:
    """The stages that get something from an action."""
    if action.kind is Kind.F:
        return graph.successors(action.stage)
    if action.passes_gradients:
        return tuple(stage for stage in graph.predecessors(action.stage) if graph.has_backward(stage))
    return ()
