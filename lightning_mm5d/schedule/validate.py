"""Proves that a schedule can be executed before any rank starts on it.

A schedule that is wrong does not fail: it hangs, or it adds a gradient twice. So whatever made it, a builder
or a hand, it is checked here as data. It refuses actions that are missing, doubled, foreign or on the wrong
rank, deadlocks, messages that would overtake each other, and more activations than were allowed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from lightning_mm5d.schedule.actions import Action, Kind, Schedule, dependencies
from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.stage_key import StageKey


class ScheduleError(ValueError):
    """A schedule that does not fit its graph or cannot be executed."""


def validate(
    schedule: Schedule,
    graph: Graph,
    *,
    forward_only: bool = False,
    max_in_flight: Mapping[str, int] | None = None,
) -> None:
    """Checks a schedule as it would be executed where sends never block and receives do.

    Args:
        schedule: for each rank its actions in order.
        graph: the stages that it is for.
        forward_only: whether backwards must be absent.
        max_in_flight: for each stage named, how many microbatches an instance may have in flight (forward
            started; backward, or its weight-gradient half, not ended) at any time; stages that run no backward
            hold nothing.

    Raises:
        ScheduleError: names the first action or pair of ranks that breaks a rule.
    """
    _check_actions(schedule, graph, forward_only)
    for _ in execution_order(schedule, graph):
        pass
    _check_message_order(schedule, graph, gradients=False)
    if not forward_only:
        _check_message_order(schedule, graph, gradients=True)
        _check_in_flight(schedule, graph, max_in_flight or {})


def execution_order(schedule: Schedule, graph: Graph) -> Iterator[tuple[int, Action]]:
    """Yields ``(rank, action)`` such that each comes after all that it waits for.

    Raises:
        ScheduleError: for a deadlock; names what each rank that is stuck waits for.
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
        raise ScheduleError(f"Deadlock: {waits}. An action comes after all that it needs, on every rank.")


def _check_actions(schedule: Schedule, graph: Graph, forward_only: bool) -> None:
    counts = Counter(action for actions in schedule.values() for action in actions)
    homes: dict[Action, int] = {}
    required: list[tuple[Action, ...]] = []
    for node in graph.nodes:
        for m in node.microbatches:
            forward, whole, *halves = (Action(kind, node.stage, m) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
            required.append((forward,))
            homes[forward] = node.rank
            if graph.has_backward(node.stage) and not forward_only:
                required.append(tuple(halves) if any(counts[half] for half in halves) else (whole,))
                homes |= dict.fromkeys((whole, *halves), node.rank)
    for rank, actions in schedule.items():
        for action in actions:
            if action not in homes:
                raise ScheduleError(
                    f"rank {rank}: {action} has no place in this graph. A schedule holds the forwards "
                    "of all its stages, and the backwards of those that run them (none where forward_only)."
                )
            if homes[action] != rank:
                raise ScheduleError(
                    f"rank {rank}: {action} belongs to rank {homes[action]}. "
                    "The rank of a stage's instance runs its actions."
                )
            if counts[action] > 1:
                raise ScheduleError(f"rank {rank}: {action} appears {counts[action]} times. It must appear once.")
    for wanted in required:
        for action in wanted:
            if not counts[action]:
                raise ScheduleError(f"rank {homes[action]}: {action} is missing. It must appear once.")
        whole = Action(Kind.B, wanted[0].stage, wanted[0].microbatch)
        if len(wanted) > 1 and counts[whole]:
            raise ScheduleError(
                f"rank {homes[whole]}: {whole} appears beside {wanted[0]} and {wanted[1]}. "
                "A backward runs whole or in halves. Leave out one or the other."
            )


def _check_message_order(schedule: Schedule, graph: Graph, *, gradients: bool) -> None:
    """Both ends of every edge must run the microbatches that they share in the same order."""
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
                    "Messages between two instances keep their order. Order both ends alike."
                )


def _by_ranks(
    microbatches: list[int], sender: StageKey, receiver: StageKey, graph: Graph
) -> dict[tuple[int, int], list[int]]:
    """Groups microbatches by the ranks that send and receive them, each group in the order given."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for m in microbatches:
        groups[graph.node_of(sender, m).rank, graph.node_of(receiver, m).rank].append(m)
    return groups


def _check_in_flight(schedule: Schedule, graph: Graph, max_in_flight: Mapping[str, int]) -> None:
    for rank, actions in schedule.items():
        in_flight: Counter[str] = Counter()
        for action in actions:
            stage = action.stage
            if not graph.has_backward(stage):
                continue
            in_flight[stage] += (action.kind is Kind.F) - action.frees
            if in_flight[stage] > max_in_flight.get(stage, in_flight[stage]):
                raise ScheduleError(
                    f"rank {rank}: {action} puts {in_flight[stage]} microbatches of {stage} in flight. "
                    f"At most {max_in_flight[stage]} are allowed. Run a backward before it."
                )
