"""What a rank does in a step, computed once for each kind of step: its actions, and what is issued around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_mm5d.engine.bridge import Bridge, Bridges
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action, Graph, Grouping, Kind, Schedule, is_table
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.schedule.issue_order import IssueOrder

Receipt = tuple[Bridge, tuple[int, int]]
"""A payload that arrives: on which bridge, and the replica and index of its microbatch."""


class Exchange(NamedTuple):
    """What a stage exchanges with other stages for one microbatch.

    Attributes:
        place: replica and index of the microbatch.
        has_backward: whether the stage runs backwards.
        sources: the bridge from each earlier stage, and that on which its gradients leave; None where it wants none.
        targets: each later stage with the bridge to it, and that on which gradients come back.
    """

    place: tuple[int, int]
    has_backward: bool
    sources: tuple[tuple[Bridge, Bridge | None], ...]
    targets: tuple[tuple[StageKey, Bridge, Bridge], ...]


class Prepared(NamedTuple):
    """A rank's part of a step.

    Attributes:
        actions: of this rank, in order.
        exchanges: of each stage and microbatch of this rank.
        groups: the numbers of actions that begin after all that any of them receives, and send after all of them have
            ended; of most groups one action.
        arrivals: how many payloads come, by their bridges.
        receipts: for each action, what is received from its begin on at the latest, in the order of issue; empty
            where threads receive ahead.
        split_stages: those whose backwards are split.
        last_actions: of each stage the last one that gives gradients.
    """

    actions: list[Action]
    exchanges: dict[tuple[StageKey, int], Exchange]
    groups: list[range]
    arrivals: Counter[Bridge]
    receipts: list[list[Receipt]]
    split_stages: frozenset[StageKey]
    last_actions: dict[StageKey, Action]


class Preparation:
    """Prepares the steps of one rank.

    Args:
        plan: all stages.
        bridges: of this rank.
        schedule: its name, a table or a function.
        num_microbatches: M, of which a table has that many; None where each batch decides.
        rank: global rank.
        is_ordered: whether operations between ranks run in the order of issue.
    """

    def __init__(
        self,
        plan: Plan,
        bridges: Bridges,
        schedule: str | Callable[[Graph], Schedule],
        num_microbatches: int | None,
        rank: int,
        *,
        is_ordered: bool,
    ) -> None:
        self._plan, self._bridges, self._rank, self._is_ordered = plan, bridges, rank, is_ordered
        self._schedule, self._num_microbatches = schedule, num_microbatches
        self._built: dict[Any, Prepared] = {}

    def schedule_of(self, count: int) -> str | Callable[[Graph], Schedule]:
        """Return the schedule of a step of `count` microbatches: ``1f1b`` where a table has another number."""
        return "1f1b" if is_table(self._schedule) and count != self._num_microbatches else self._schedule

    def forget(self) -> None:
        """Prepare steps anew, since what stages cost is known better."""
        self._built.clear()

    def of(self, count: int, trainable: frozenset[str], replicas: frozenset[int], forward_only: bool) -> Prepared:
        """Return this rank's part of a step.

        Args:
            count: microbatches of each replica.
            trainable: names of the parameters that require a gradient.
            replicas: that have microbatches.
            forward_only: whether there are no backwards.
        """
        key = (count, trainable, replicas, forward_only)
        if key not in self._built:
            self._built[key] = self._prepare(*key)
        return self._built[key]

    def _prepare(self, count: int, trainable: frozenset[str], replicas: frozenset[int], forward_only: bool) -> Prepared:
        graph, schedule = self._plan.graphs.schedule(
            self.schedule_of(count), count, trainable, rank=self._rank, forward_only=forward_only
        )
        actions = [
            action
            for action in self._plan.topology.actions_of(self._rank, schedule, count)
            if action.microbatch // count in replicas
        ]
        keys = dict.fromkeys((action.stage, action.microbatch) for action in actions)
        exchanges = {(stage, number): self._exchange(graph, stage, divmod(number, count)) for stage, number in keys}
        arrivals: Counter[Bridge] = Counter()
        for action in actions:
            exchange = exchanges[action.stage, action.microbatch]
            if action.kind is Kind.F:
                arrivals.update(bridge for bridge, _ in exchange.sources)
            elif action.kind is not Kind.W:
                arrivals.update(back for *_, back in exchange.targets)
        receipts: list[list[Receipt]] = []
        grouping = None if forward_only else self._plan.graphs.grouping(count)
        for turn in IssueOrder(schedule, graph, grouping).turns(actions) if self._is_ordered and arrivals else []:
            receipts.append([])
            for message in turn.receives:
                place, ends = divmod(message.microbatch, count), (message.source, message.target)
                ends = ends[::-1] if message.gradients else ends
                receipts[-1].append((self._bridges.between(*ends, place, back=message.gradients), place))
        split_stages = frozenset(action.stage for action in actions if action.kind is Kind.I)
        last = {action.stage: action for action in actions if action.kind is not Kind.F}
        return Prepared(actions, exchanges, _groups(actions, grouping), arrivals, receipts, split_stages, last)

    def _exchange(self, graph: Graph, stage: StageKey, place: tuple[int, int]) -> Exchange:
        between = self._bridges.between
        sources = [
            (
                between(other, stage, place),
                between(other, stage, place, back=True) if graph.has_backward(other) else None,
            )
            for other in graph.predecessors(stage)
        ]
        targets = [
            (other, between(stage, other, place), between(stage, other, place, back=True))
            for other in graph.successors(stage)
        ]
        return Exchange(place, graph.has_backward(stage), tuple(sources), tuple(targets))


def _groups(actions: Sequence[Action], grouping: Grouping | None) -> list[range]:
    groups: list[range] = []
    for number, action in enumerate(actions):
        joins = grouping is not None and action.kind is not Kind.W and grouping.place(action.microbatch) > 0
        groups.append(range(groups.pop().start, number + 1) if joins else range(number, number + 1))
    return groups
