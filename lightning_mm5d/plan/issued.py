"""What every rank issues to others in one step, from the plan alone, and the proof that all of it ends.

A message of the schedule becomes one message for each pair of ranks whose shares of a payload overlap. What stays on
one rank is not issued. Where several ranks of a target share one payload, they gather it before the action. Ranks that
share the layers of a stage meet in its actions. Gradients are summed over ranks that hold the same parameter: in the
last action of their stage, between what it receives and what it sends, or where `ordered_timing` says so after the last
message of a rank, because earlier sums could wait for ranks whose messages wait in the same device.

Tells whether replicas can meet in the actions of a step, where parameters are gathered or tokens travel to experts.

Where they cannot, a step gathers all that they share before its first action.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.plan.sums import sums_of
from lightning_mm5d.plan.topology import pairs_of
from lightning_mm5d.schedule import Action, AnySchedule, Graph, IssueOrder, Kind, Message, Schedule, ScheduleError
from lightning_mm5d.schedule.graph import StageKey, dependencies
from lightning_mm5d.schedule.issue_order import Operation, Step, can_meet, check_streams, gathers


class SumTiming(NamedTuple):
    """When sums of gradients may leave while a schedule runs, where devices have one order for all messages.

    With gloo they may leave at any time. Such devices must not wait in a circle, whatever the batches of replicas are:
    so a sum has the same place among the messages of the schedule on all of its ranks.

    Attributes:
        early: whether a sum leaves in the last action of its stage; else after all actions.
        inside: whether it leaves within that action; else at its end, after messages of layers.
        late: names of the parameters that wait for the end of all actions, because several stages use them.
    """

    early: bool = True
    inside: bool = True
    late: frozenset[str] = frozenset()


def ordered_timing(plan: Plan) -> SumTiming:
    """Return when sums may leave where devices have one order for all messages; the same on all ranks.

    Replicas that share ranks end their stages at different places among the messages of these ranks, and so do several
    encoders of one replica. Layers that are
    gathered for an action are gathered at places that depend on the batch. Context parallel ranks have other tokens,
    and so may have other gradients at a time; and a rank without tokens for some experts comes to its next gradients
    before it serves those of other ranks.
    """
    topology, owners, layout = plan.topology, plan.partition.owners, plan.layout
    are_separate = all(len(topology.connected_replicas(rank)) == 1 for rank in range(layout.size))
    are_separate &= all(layout.sizes(name).dp == layout.num_replicas for name in layout.modalities)
    gathers = any(
        modality.shared_stage == 3 and modality.sharding.reshard_after_forward for modality in plan.modalities.values()
    )
    return SumTiming(
        early=not gathers and (are_separate or not topology.edges),
        inside=not plan.experts and all(layout.sizes(name).cp == 1 for name in layout.modalities),
        late=frozenset(name for name in plan.sizes if len({topology.stage_of[key] for key in owners[name]}) > 1),
    )


class Issued:
    """What the ranks of a plan issue in one step of a schedule.

    Args:
        plan: all stages.
        schedule: as `build` takes it.
        count: microbatches per replica, M.
        trainable: names of the parameters that require a gradient.
        forward_only: leave out backwards.
        meets: whether replicas meet in actions: they gather layers there, or share experts.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: AnySchedule,
        count: int,
        trainable: frozenset[str],
        *,
        forward_only: bool = False,
        meets: bool = False,
    ) -> None:
        self._plan, self._count, self._trainable = plan, count, trainable
        self._schedule, self._forward_only = schedule, forward_only
        self._built: dict[Any, tuple[Schedule, IssueOrder]] = {}
        self._known: dict[Message, list[Operation]] = {}
        self._timing = ordered_timing(plan)
        self._shards = DataShards(plan) if meets else None

    def check(self) -> None:
        """Refuse a schedule whose messages, gathers and sums of gradients would not end.

        Raises:
            ScheduleError: the ranks would wait for each other under a model of streams.
        """
        check_streams({rank: [self.steps(rank)] for rank in range(self._plan.layout.size)})

    def steps(self, rank: int) -> list[Step]:
        """Return what `rank` issues and waits for, in order."""
        schedule, order = self._order(rank)
        actions = self._plan.topology.actions_of(rank, schedule, self._count)
        pending: list[Operation] = []  # issued, and waited for at the end of the step
        sums = {} if self._forward_only else self._sums(rank)
        last = {action.stage: action for action in actions if action.kind is not Kind.F}
        steps: list[Step] = []
        met: Counter[Any] = Counter()
        for action, receives, sends in order.turns(actions):
            steps += [Step(operation) for message in receives for operation in self._received(message, rank)]
            for message in order.needed(action):
                steps += [Step(operation, waits=True) for operation in self._received(message, rank)]
                steps += self._gather(message)
            steps += self._meeting(("collectives", action), action.stage, action.microbatch)
            steps += self._replicas(action, rank, met)
            leaving = sums.pop(action.stage, []) if last.get(action.stage) == action else []
            leaving += (operation for message in sends for operation in self._sent(message, rank))
            pending += leaving
            steps += map(Step, leaving)
        late = [operation for stage in sorted(sums, key=str) for operation in sums[stage]]
        return [*steps, *map(Step, late), *(Step(operation, waits=True) for operation in (*pending, *late))]

    def _order(self, rank: int) -> tuple[Schedule, IssueOrder]:
        key = self._plan.topology.connected_replicas(rank)
        if key not in self._built:
            graph, schedule = self._plan.graphs.schedule(
                self._schedule, self._count, self._trainable, rank=rank, forward_only=self._forward_only
            )
            grouping = None if self._forward_only else self._plan.graphs.grouping(self._count)
            self._built[key] = schedule, IssueOrder(schedule, graph, grouping)
        return self._built[key]

    def _ranks_at(self, stage: StageKey, microbatch: int) -> tuple[int, ...]:
        return self._plan.topology.ranks_at(stage, *divmod(microbatch, self._count))

    def _operations(self, message: Message) -> list[Operation]:
        """One operation for each pair of ranks that a message passes between."""
        if message not in self._known:
            sources, targets = (self._ranks_at(stage, message.microbatch) for stage in (message.source, message.target))
            self._known[message] = [
                Operation((message, f"from rank {pair[0]} to rank {pair[1]}"), pair, ("messages", pair[0] < pair[1]))
                for pair in [(sources[i], targets[j]) for i, j in pairs_of(sources, targets)]
                if pair[0] != pair[1]
            ]
        return self._known[message]

    def _received(self, message: Message, rank: int) -> list[Operation]:
        return [operation for operation in self._operations(message) if operation.ranks[1] == rank]

    def _sent(self, message: Message, rank: int) -> list[Operation]:
        return [operation for operation in self._operations(message) if operation.ranks[0] == rank]

    def _gather(self, message: Message) -> list[Step]:
        sources, targets = (self._ranks_at(stage, message.microbatch) for stage in (message.source, message.target))
        if len(targets) == 1 or set(targets) <= set(sources):
            return []
        return self._meeting(("gather", message), message.target, message.microbatch)

    def _meeting(self, what: tuple[str, Any], stage: StageKey, microbatch: int) -> list[Step]:
        """A collective of the ranks of an instance, which all of them wait for."""
        ranks = self._ranks_at(stage, microbatch)
        operation = Operation(what, ranks, ("layers", *ranks))
        return [Step(operation), Step(operation, waits=True)] if len(ranks) > 1 else []

    def _replicas(self, action: Action, rank: int, met: Counter[Any]) -> list[Step]:
        """What replicas that meet in an action do there; `met` counts the actions of a kind."""
        ranks = self._shards.meeting(action.stage, rank) if self._shards and gathers(action) else ()
        kind = action.stage, action.kind
        met[kind] += bool(ranks)
        operation = Operation(("replicas", *kind, met[kind]), ranks, ("replicas", *ranks))
        return [Step(operation), Step(operation, waits=True)] if ranks else []

    def _sums(self, rank: int) -> dict[StageKey | None, list[Operation]]:
        """The sums of gradients by the stage in whose last action they leave, or None, in one order on all ranks.

        Ranks that ran no microbatch join them.
        """
        by_stage: dict[StageKey | None, set[tuple[int, ...]]] = {}
        for name, sums in sums_of(self._plan, rank).items():
            if name in self._trainable:
                by_stage.setdefault(self._ending_stage(name), set()).update(summed.ranks for summed in sums)
        return {
            stage: [Operation(("gradients", stage, ranks), ranks, ("gradients", *ranks)) for ranks in sorted(groups)]
            for stage, groups in by_stage.items()
        }

    def _ending_stage(self, name: str) -> StageKey | None:
        if not self._timing.early or name in self._timing.late:
            return None
        return self._plan.topology.stage_of[next(iter(self._plan.partition.owners[name]))]


_ALL_FORWARDS_FIRST = "gpipe"


def why_apart(
    plan: Plan, schedule: AnySchedule, count: int, trainable: frozenset[str], *, is_ordered: bool = False
) -> str | None:
    """Return why replicas cannot meet in the actions of a step; None where they can. The same on all ranks.

    Args:
        plan: all stages.
        schedule: of the step.
        count: microbatches of each replica, M.
        trainable: names of the parameters that require a gradient.
        is_ordered: whether operations between ranks run in the order of issue.
    """
    if path := _conditional(plan):
        return f"{path} calls some of its experts only with tokens for them, which a rank of a sequence may not have"
    if _ends(plan, schedule, count, trainable, is_ordered):
        return None
    name = schedule if isinstance(schedule, str) else "of your own"
    helps = name != _ALL_FORWARDS_FIRST and _ends(plan, _ALL_FORWARDS_FIRST, count, trainable, is_ordered)
    fix = f"; with schedule={_ALL_FORWARDS_FIRST!r} they can meet" if helps else ""
    return f"replicas would wait for each other in the schedule {name}{fix}"


def _ends(plan: Plan, schedule: AnySchedule, count: int, trainable: frozenset[str], is_ordered: bool) -> bool:
    topology, shards = plan.topology, DataShards(plan)
    actions: dict[int, list[Action]] = {}
    graphs: dict[int, Graph] = {}
    built: dict[Any, tuple[Graph, Schedule]] = {}
    for rank in range(plan.layout.size):
        key = topology.connected_replicas(rank)
        if key not in built:
            built[key] = plan.graphs.schedule(schedule, count, trainable, rank=rank)
        graphs[rank], built_schedule = built[key]
        actions[rank] = topology.actions_of(rank, built_schedule, count)

    def meets(rank: int, action: Action) -> tuple[int, ...]:
        return shards.meeting(action.stage, rank) if gathers(action) else ()

    if not can_meet(actions, lambda rank, action: dependencies(action, graphs[rank]), meets):
        return False
    if is_ordered and topology.edges:
        try:
            Issued(plan, schedule, count, trainable, meets=True).check()
        except ScheduleError:
            return False
    return True


def _conditional(plan: Plan) -> str | None:
    """Return a layer with several modules of experts, on ranks that have different tokens of a sequence.

    Which of them it calls may depend on its tokens: Ernie 4.5 VL has experts for text and experts for images. A rank
    that goes on to its attention would wait there for one that waits for it at experts.
    """
    for name, modality in plan.modalities.items():
        if plan.layout.sizes(name).cp == 1 and not modality.tensor.sequence_parallel:
            continue
        held = [layer.path for layer in plan.experts.values() if layer.modality == name]
        for path in plan.partition.parts[name].paths:
            if sum(expert_path.startswith(f"{path}.") for expert_path in held) > 1:
                return path
    return None
