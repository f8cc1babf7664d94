"""Proves that operations between ranks end on devices that run them in the order of issue.

A device runs what is issued on one *stream* one after the other, and an operation ends only once all of its ranks run
it. Which operations share a stream depends on the transport and on the device, so there is a model for each:

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
from typing import NamedTuple

from lightning_mm5d.schedule.graph import Action, Kind
from lightning_mm5d.schedule.validate import ScheduleError


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
    left: dict[Action, int] = {}
    for listed in actions.values():
        for one in listed:
            left[one.provides] = left.get(one.provides, 0) + 1
    position = dict.fromkeys(actions, 0)

    def ready(rank: int) -> Action | None:
        if position[rank] == len(actions[rank]):
            return None
        action = actions[rank][position[rank]]
        return None if any(left.get(other, 0) for other in needed(rank, action)) else action

    moves = True
    while moves:
        moves = False
        for rank in actions:
            while (action := ready(rank)) is not None:
                kind = action.stage, action.kind
                others = [(other, ready(other)) for other in meets(rank, action) or (rank,)]
                found = [(other, one) for other, one in others if one is not None and (one.stage, one.kind) == kind]
                if len(found) < len(others):
                    break
                for other, met in found:
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
        found = []
        for number, (rank, steps) in enumerate(self._threads):
            if self._position[number] < len(steps):
                operation = steps[self._position[number]].operation
                running = self._streams[rank, self._model(operation)]
                first = _text(running[0].name) if running else "nothing"
                ahead = "" if first == _text(operation.name) else f", and its device for {first}"
                found.append(f"rank {rank} waits for {_text(operation.name)}{ahead}")
        return found

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
