"""Proves that a schedule can be executed before any rank starts it.

A wrong schedule does not fail: it hangs, or it adds a gradient twice. So every schedule is checked as data. Refused are
actions that are missing, doubled, unknown to the graph or on the wrong rank, deadlocks, and messages that would
overtake each other.

Users' own schedules: a table of actions, or a function of the graph.

A table is CSV text. Each row begins with a rank, then come its actions in order::

    rank
    0, F0, F1, F2, I0, F3, W0, ...
    1, F0, B0, F1, B1, ...

An action is its kind (F forward, B full backward, I input gradient, W weight gradient), the microbatch's global id
and, where the rank has several stages, a dot and the chunk: ``F3.1`` is the forward of microbatch 3 through the second
of the rank's stages in the order of the pipeline (`Graph.stages_of`). Rows of one rank continue each other. Empty
cells, empty lines, a first line of headings and comments after ``#`` are skipped. `to_csv` writes this form.

Text that is no such table is refused with its line; `validate` refuses a schedule that does not fit the graph.

**Simulation** tells when each action runs, how long ranks idle and how many activations they hold. It takes the same
lists of actions that ranks execute. Schedules that deadlock are refused.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from lightning_mm5d.schedule.graph import Action, Graph, Kind, Schedule, StageKey, cost, dependencies


class ScheduleError(ValueError):
    """A schedule that does not fit its graph or cannot be executed."""


def validate(schedule: Schedule, graph: Graph, *, forward_only: bool = False) -> None:
    """Checks a schedule for execution with sends that never block and receives that do.

    Args:
        schedule: for each rank its actions in order.
        graph: its stages.
        forward_only: whether backwards must be absent.

    Raises:
        ScheduleError: an action or a pair of ranks breaks a rule; it names the first.
    """
    _check_actions(schedule, graph, forward_only)
    for _ in execution_order(schedule, graph):
        pass
    _check_message_order(schedule, graph, gradients=False)
    if not forward_only:
        _check_message_order(schedule, graph, gradients=True)


def execution_order(schedule: Schedule, graph: Graph) -> Iterator[tuple[int, Action]]:
    """Yields ``(rank, action)`` for all actions, each after those that it depends on.

    Raises:
        ScheduleError: the schedule deadlocks; it names what each blocked rank waits for.
    """
    ended: set[Action] = set()
    position = dict.fromkeys(schedule, 0)
    blocked: dict[Action, list[int]] = defaultdict(list)  # ranks that wait for the action
    runnable = list(reversed(schedule))
    while runnable:
        rank = runnable.pop()
        actions = schedule[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            missing = next((needed for needed in dependencies(action, graph) if needed not in ended), None)
            if missing is not None:
                blocked[missing].append(rank)
                break
            yield rank, action
            ended.add(action.provides)
            position[rank] += 1
            runnable += blocked.pop(action.provides, ())
    if blocked:
        stuck = sorted(
            (rank, str(schedule[rank][position[rank]]), str(missing))
            for missing, waiting in blocked.items()
            for rank in waiting
        )
        waits = "; ".join(f"rank {rank} at {action} waits for {missing}" for rank, action, missing in stuck)
        raise ScheduleError(f"Deadlock: {waits}. Put every action after those that it needs.")


def _check_actions(schedule: Schedule, graph: Graph, forward_only: bool) -> None:
    """Every action has its place in the graph, none is missing or doubled."""
    counts = Counter(action for actions in schedule.values() for action in actions)
    ranks: dict[Action, int] = {}  # of every action that the graph allows
    for node in graph.nodes:
        kinds = Kind if graph.has_backward(node.stage) and not forward_only else (Kind.F,)
        ranks |= {Action(kind, node.stage, m): node.rank for kind in kinds for m in node.microbatches}
    for rank, actions in schedule.items():
        for action in actions:
            if action not in ranks:
                raise ScheduleError(
                    f"rank {rank}: {action} has no place in this graph. A schedule holds the forwards "
                    "of all its stages, and the backwards of those that run them (none where forward_only)."
                )
            if ranks[action] != rank:
                raise ScheduleError(
                    f"rank {rank}: {action} belongs to rank {ranks[action]}. "
                    "The rank of a stage's instance runs its actions."
                )
            if counts[action] > 1:
                raise ScheduleError(f"rank {rank}: {action} appears {counts[action]} times. It must appear once.")
    for node in graph.nodes:
        for m in node.microbatches:
            _check_complete(counts, ranks, *(Action(kind, node.stage, m) for kind in Kind))


def _check_complete(
    counts: Counter[Action], ranks: Mapping[Action, int], forward: Action, full: Action, inputs: Action, weights: Action
) -> None:
    """A microbatch has its forward and, if its stage runs backwards, one backward, which is full or split."""
    split = bool(counts[inputs] or counts[weights])
    for action in (forward, inputs, weights) if split else (forward, full):
        if action in ranks and not counts[action]:
            raise ScheduleError(f"rank {ranks[action]}: {action} is missing. It must appear once.")
    if split and counts[full]:
        raise ScheduleError(
            f"rank {ranks[full]}: {full} appears beside {inputs} and {weights}. "
            "A backward is full (B) or split (I and W). Leave out one or the other."
        )


def _check_message_order(schedule: Schedule, graph: Graph, *, gradients: bool) -> None:
    """Both ends of every edge run the microbatches that they share in one order."""
    executed: dict[StageKey, list[int]] = defaultdict(list)  # stage -> microbatches, in order for each rank
    for actions in schedule.values():
        for action in actions:
            if action.passes_gradients if gradients else action.kind is Kind.F:
                executed[action.stage].append(action.microbatch)
    for src, dst in graph.edges:
        if gradients and not graph.has_backward(src):
            continue
        sender, receiver = (dst, src) if gradients else (src, dst)
        sent, received = (_by_ranks(executed[stage], sender, receiver, graph) for stage in (sender, receiver))
        for (source, destination), microbatches in sent.items():
            if source != destination and received[source, destination] != microbatches:
                raise ScheduleError(
                    f"{'B' if gradients else 'F'} from {sender} on rank {source} to {receiver} on rank "
                    f"{destination}: sent in the order {microbatches}, received in {received[source, destination]}. "
                    "Messages between two instances keep their order. Use one order on both ends."
                )


def _by_ranks(
    microbatches: list[int], sender: StageKey, receiver: StageKey, graph: Graph
) -> dict[tuple[int, int], list[int]]:
    """Groups microbatches, in the order given, by the ranks that send and receive them."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for m in microbatches:
        groups[graph.node_of(sender, m).rank, graph.node_of(receiver, m).rank].append(m)
    return groups


_ACTION = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")


def from_csv(text: str, graph: Graph) -> Schedule:
    """Reads a schedule from a table and validates it.

    Args:
        text: the table (see the module's docstring).
        graph: the stages that it is for.

    Raises:
        ScheduleError: a line cannot be read, or `validate` refuses the schedule.
    """
    schedule: Schedule = {rank: [] for rank in graph.ranks}
    rows = 0
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.partition("#")[0].split(",")]
        if not any(cells):
            continue
        rows += 1
        if rows == 1 and not cells[0].lstrip("-").isdigit():
            continue
        if not cells[0].isdigit() or int(cells[0]) not in schedule:
            raise ScheduleError(
                f"schedule, line {number}: got {cells[0]!r} as the rank. A row begins with the number of a rank of "
                f"the graph. Use one of {', '.join(map(str, graph.ranks))}."
            )
        rank = int(cells[0])
        schedule[rank] += [_parse(cell, rank, graph, number) for cell in cells[1:] if cell]
    _validate_users(schedule, graph)
    return schedule


def _validate_users(schedule: Schedule, graph: Graph) -> None:
    """Validate what a user has made, with the name of the field in errors."""
    try:
        validate(schedule, graph)
    except ScheduleError as error:
        raise ScheduleError(f"schedule: {error}") from error


def to_csv(schedule: Schedule, graph: Graph) -> str:
    """Writes a schedule as a table that `from_csv` reads."""
    return "".join(
        ",".join([str(rank), *(label(action, rank, graph) for action in schedule[rank])]) + "\n"
        for rank in sorted(schedule)
    )


def from_function(make: Callable[[Graph], Schedule], graph: Graph) -> Schedule:
    """Calls ``make(graph)`` and validates the schedule that it returns.

    Raises:
        ScheduleError: it returns something else than a list of actions for each rank, or `validate` refuses it.
    """
    schedule = make(graph)
    if not isinstance(schedule, Mapping) or not all(
        isinstance(actions, list | tuple) and all(isinstance(action, Action) for action in actions)
        for actions in schedule.values()
    ):
        got = type(schedule).__name__ if not isinstance(schedule, Mapping) else schedule
        raise ScheduleError(
            f"schedule: the function returned {got!r}. It returns a list of Action for each rank, as a dict. "
            "Return for instance build('1f1b', graph)."
        )
    _validate_users(schedule, graph)
    return schedule


def label(action: Action, rank: int, graph: Graph) -> str:
    """Return an action as tables write it: ``F3``, or ``F3.1`` where ``rank`` has several stages."""
    mine = graph.stages_of(rank)
    chunk = f".{mine.index(action.stage)}" if len(mine) > 1 else ""
    return f"{action.kind.value}{action.microbatch}{chunk}"


def _parse(cell: str, rank: int, graph: Graph, line: int) -> Action:
    match, mine = _ACTION.fullmatch(cell), graph.stages_of(rank)
    if match is None or (match[3] is None and len(mine) > 1) or int(match[3] or 0) >= len(mine):
        example = f"F0.{len(mine) - 1}" if len(mine) > 1 else "F0"
        raise ScheduleError(
            f"schedule, line {line}: got {cell!r}. An action of rank {rank}, which has "
            f"{', '.join(mine)}, is F, B, I or W, a microbatch"
            + (f" and a chunk from 0 to {len(mine) - 1}" if len(mine) > 1 else "")
            + f". Write for instance {example}."
        )
    return Action(Kind(match[1]), mine[int(match[3] or 0)], int(match[2]))


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank, from ``start`` to ``end`` in the unit of the graph's costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A timeline and its summary; times are in the unit of the graph's costs.

    Args:
        spans: all actions, by start and then by rank.
        makespan: when the last action ends.
        busy: for each rank the time in which it computes.
        bubble: for each rank its idle share of the makespan, between 0 and 1.
        peak_activations: for each rank the most microbatches, summed over its stages, that it holds at a time: from the
            start of the forward to the end of the backward, or of the weight gradient if the backward is split.
            Microbatches without backward are not held.
    """

    spans: tuple[Span, ...]
    makespan: float
    busy: dict[int, float]
    bubble: dict[int, float]
    peak_activations: dict[int, int]


def simulate(
    schedule: Schedule, graph: Graph, *, transfer_cost: float | Callable[[StageKey, StageKey], float] = 0.0
) -> Simulation:
    """Simulates ``schedule``: an action starts once its rank is free and all its inputs have arrived.

    Args:
        schedule: for each rank its actions in order.
        graph: its stages, with costs.
        transfer_cost: how long a message between two ranks takes, one number for all or a function of the sending and
            the receiving stage (for gradients the later stage sends). It keeps neither rank busy, and messages do not
            slow each other.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    spans: dict[Action, Span] = {}
    free = dict.fromkeys(schedule, 0.0)
    busy = dict.fromkeys(schedule, 0.0)
    for rank, action in execution_order(schedule, graph):
        start = free[rank]
        for needed in dependencies(action, graph):
            arrival = spans[needed].end
            if spans[needed].rank != rank:
                arrival += transfer_cost(needed.stage, action.stage) if callable(transfer_cost) else transfer_cost
            start = max(start, arrival)
        duration = cost(action, graph)
        free[rank] = start + duration
        busy[rank] += duration
        spans[action.provides] = Span(rank, action, start, free[rank])
    return _summary(spans.values(), schedule, busy)


def measured(spans: Iterable[Span]) -> Simulation:
    """Return the timeline of measured spans, shifted to start at 0; time between spans counts as idle."""
    ordered = sorted(spans, key=lambda span: (span.rank, span.start))
    first = min((span.start for span in ordered), default=0.0)
    ordered = [replace(span, start=span.start - first, end=span.end - first) for span in ordered]
    schedule: Schedule = {span.rank: [] for span in ordered}
    busy = dict.fromkeys(schedule, 0.0)
    for span in ordered:
        schedule[span.rank].append(span.action)
        busy[span.rank] += span.end - span.start
    return _summary(ordered, schedule, busy)


def _summary(spans: Iterable[Span], schedule: Schedule, busy: dict[int, float]) -> Simulation:
    ordered = tuple(sorted(spans, key=lambda span: (span.start, span.rank, span.end)))
    makespan = max((span.end for span in ordered), default=0.0)
    return Simulation(
        spans=ordered,
        makespan=makespan,
        busy=busy,
        bubble={rank: 1 - time / makespan if makespan else 0.0 for rank, time in busy.items()},
        peak_activations={rank: _peak(actions) for rank, actions in schedule.items()},
    )


def _peak(actions: list[Action]) -> int:
    held = {(action.stage, action.microbatch) for action in actions if action.frees}
    count = peak = 0
    for action in actions:
        if (action.stage, action.microbatch) not in held:
            continue
        if action.kind is Kind.F:
            count += 1
            peak = max(peak, count)
        elif action.frees:
            count -= 1
    return peak
