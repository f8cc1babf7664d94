"""The greedy list scheduler that makes all schedules, and the rules by which they differ.

It plays a pipeline in simulated time: a free rank runs the first ready action by the rules' order. Rules say which
backwards are split, which actions are held back and what comes first.

Its schedules never deadlock, for any placement and any limits. All instances run microbatches in one common order. The
*front* is the first microbatch whose backwards have not all ended; some action of it is always ready. An instance's
limit never holds it back, because nothing earlier is in flight. A rank's limit lets it pass once no action on that rank
could free an activation. Names and numbers break all ties, so processes with equal graphs get equal schedules.

The schedules with full backwards and one chunk a rank: ``gpipe`` and ``1f1b``.

``gpipe`` runs backwards after the rank's last forward (Huang et al. 2019, arXiv:1811.06965). Its order is the simplest,
and a rank holds the activations of all microbatches at once.

``1f1b`` alternates. A stage starts no forward while as many of its microbatches are in flight as there are stages from
it to the end (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503). In a graph the longest path to the end counts,
so that encoders side by side fill the language model's pipeline together, as in Cornstarch (Jang et al. 2025,
arXiv:2503.11367).

Within this limit forwards come first. A rank that ran all backwards that have arrived would hold back the next forward,
for which all later ranks wait.

``interleaved``: several chunks of a modality on each rank, which shortens the pipeline's ramps.

Stage k of a modality lies on rank k mod P (Narayanan et al. 2021, arXiv:2104.04473). Each chunk runs P microbatches,
then the rank's next chunk has its turn. A rank holds as many activations as stages follow its first chunk, plus as
many as follow its last one, plus one: Megatron's warm-up, written with distances so that it applies to any graph of
stages. On a chain of P ranks with v chunks each and M microbatches, a multiple of P, ranks idle for (P - 1)(f + b) / v,
where f and b are the forward and backward of all chunks of a rank.

Modalities with one stage on a rank run as under ``1f1b``.

``zero_bubble`` and ``zbv``: split backwards, so that weight gradients fill the bubbles.

Other stages wait for the input gradient only. A weight gradient runs where the rank has nothing else to do, or where it
may hold no more activations. On a chain with one stage a rank this is ZB-H1 (Qi et al. 2023, arXiv:2401.10241): no rank
holds more than the first one under ``1f1b``, and ranks idle for (P - 1)(f + i - w) where w is at most i, instead of
(P - 1)(f + i + w), with f, i and w of a forward, an input gradient and a weight gradient.

``zbv`` is the same on a graph whose chunks lie in a V: stage k of 2P on rank min(k, 2P - 1 - k) (Qi et al. 2024,
arXiv:2405.15362). The rank that starts the forward of a microbatch also ends it, which evens out activations. With
f = i = w of a chunk, ranks idle for (P - 1) f only, during the first forwards.

Stages that pass no gradient on and stages in which nothing is trained run full backwards.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_mm5d.schedule.graph import Action, Graph, Kind, Schedule, StageKey
from lightning_mm5d.schedule.validate import simulate

_SAME_TIME = 1e-9
"""Ends closer than this share of the time count as simultaneous, or rounding would decide the order."""
_INSTANT = 1e-3
"""How long a forward lasts beside a backward where only their number counts."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a rank may start, and what it starts first.

    Args:
        in_flight: by stage, the most microbatches per instance from the start of the forward to the start of the
            full backward or input gradient; stages that are not named have no limit.
        held: by rank, the most activations, from the start of the forward to the end of the full backward or weight
            gradient. The front may pass, so a rank of several stages can hold one more for each of them.
        split: split backwards whose parts both take time; a weight gradient runs where nothing else is ready.
        eager: forwards come before gradients, else gradients before forwards.
        flush: run no gradient before the rank's last forward; not with limits, since these wait for gradients.
        groups: by stage, how many microbatches pass before the rank's next chunk has its turn; by default 1.
        patience: how long a weight gradient waits for a gradient to arrive, as a share of its own duration.
        lazy: full backwards that pass no gradient on run where nothing else is ready, since no stage waits for them.
        stretch: factors on the durations of input and weight gradients while playing; they change the order, which
            may suit the true durations better.
        by_count: while playing, all backwards last equally long and forwards next to nothing, so that the order
            follows from the graph alone, whatever actions cost.
    """

    in_flight: Mapping[StageKey, float] = field(default_factory=dict)
    held: Mapping[int, float] = field(default_factory=dict)
    split: bool = False
    eager: bool = False
    flush: bool = False
    groups: Mapping[StageKey, int] = field(default_factory=dict)
    patience: float = 0.0
    lazy: bool = False
    stretch: tuple[float, float] = (1.0, 1.0)
    by_count: bool = False

    def __post_init__(self) -> None:
        assert not (self.flush and (self.in_flight or self.held)), (
            "forwards would wait for gradients, and these for them"
        )


class Played(NamedTuple):
    """The result of playing rules: the schedule, its makespan and, by rank, the most activations that it held."""

    schedule: Schedule
    makespan: float
    held: dict[int, int]


_Choice = tuple[Kind, int, int]
"""A kind of action, the instance and the position of the microbatch."""


class Pipeline:
    """A graph in integers, prepared for playing many rules.

    Args:
        graph: the stages.
        forward_only: leave out backwards.
    """

    def __init__(self, graph: Graph, *, forward_only: bool = False) -> None:
        self.graph = graph
        self.microbatches = graph.microbatches
        self.nodes = sorted(graph.nodes, key=lambda node: (node.stage, node.rank))
        self.stages = sorted(graph.stages)
        number = {stage: index for index, stage in enumerate(self.stages)}
        position = {m: index for index, m in enumerate(self.microbatches)}
        self.stage_of = [number[node.stage] for node in self.nodes]
        self.orders = [[position[m] for m in node.microbatches] for node in self.nodes]
        self.backward = [graph.has_backward(stage) and not forward_only for stage in self.stages]
        self.successors = [[number[dst] for dst in graph.successors(stage)] for stage in self.stages]
        self.predecessors = [[number[src] for src in graph.predecessors(stage)] for stage in self.stages]
        self.passes_to = [[src for src in sources if self.backward[src]] for sources in self.predecessors]
        self.distances = [graph.distance_to_end(stage) for stage in self.stages]
        self.home = [[0] * len(self.microbatches) for _ in self.stages]  # stage, position -> rank
        self.at: dict[int, list[int]] = {rank: [] for rank in graph.ranks}
        for index, node in enumerate(self.nodes):
            self.at[node.rank].append(index)
            for p in self.orders[index]:
                self.home[self.stage_of[index]][p] = node.rank
        self.weights = [graph.weight_cost(node) for node in self.nodes]
        self.splits = [graph.splits(node) for node in self.nodes]

    def play(self, rules: Rules) -> Played:
        """Return the schedule that ``rules`` give."""
        return _Run(self, rules).play()

    def best(self, candidates: Iterable[Rules]) -> Played:
        """Return the shortest schedule of those that ``candidates`` give, the first of equally short ones."""
        return min((self.play(rules) for rules in candidates), key=lambda played: round(played.makespan, 9))


class _Run:
    """The state of one play: which actions have started and ended, and which run now."""

    def __init__(self, pipeline: Pipeline, rules: Rules) -> None:
        self.pipeline, self.rules = pipeline, rules
        nodes, count = pipeline.nodes, len(pipeline.microbatches)
        self.forwards = [0] * len(nodes)  # started
        self.backwards = [0] * len(nodes)  # started, full or input gradient
        self.pending: list[deque[int]] = [deque() for _ in nodes]  # positions whose weight gradient is due
        self.missing_forward = [[len(sources)] * count for sources in pipeline.predecessors]
        self.missing_backward = [[1 + len(targets)] * count for targets in pipeline.successors]
        self.in_flight = [rules.in_flight.get(node.stage, math.inf) for node in nodes]
        self.groups = [rules.groups.get(node.stage, 1) for node in nodes]
        self.splits = [rules.split and splits for splits in pipeline.splits]
        self.late = [rules.lazy and not pipeline.passes_to[stage] for stage in pipeline.stage_of]
        self.held = dict.fromkeys(pipeline.at, 0)
        self.peak = dict(self.held)
        self.limit = {rank: rules.held.get(rank, math.inf) for rank in pipeline.at}
        self.forwards_left = {rank: sum(len(pipeline.orders[i]) for i in mine) for rank, mine in pipeline.at.items()}
        self.unfinished = [len(pipeline.stages) + sum(pipeline.backward)] * count
        self.front = 0
        self.waived = False
        self.running: list[tuple[float, int, Kind, int, int]] = []  # a heap of (end, rank, kind, node, position)

    def play(self) -> Played:
        pipeline = self.pipeline
        schedule: Schedule = {rank: [] for rank in pipeline.at}
        free, woken, now = set(pipeline.at), set(pipeline.at), 0.0
        while True:
            for rank in sorted(woken & free):
                choice = self._choose(rank, now)
                if choice is not None:
                    kind, index, p = choice
                    node = pipeline.nodes[index]
                    schedule[rank].append(Action(kind, node.stage, pipeline.microbatches[p]))
                    heapq.heappush(self.running, (now + self._start(kind, index), rank, kind, index, p))
                    free.remove(rank)
            if not self.running:
                break
            woken, front = set(), self.front
            latest = self.running[0][0] * (1 + _SAME_TIME)
            while self.running and self.running[0][0] <= latest:
                now, rank, kind, index, p = heapq.heappop(self.running)
                free.add(rank)
                woken.add(rank)
                self._end(kind, index, p, woken)
            if self.front != front or self.rules.patience:
                woken |= free
        self._assert_complete()
        # ranks that follow the list do not wait for these
        if self.waived or self.rules.stretch != (1.0, 1.0) or self.rules.by_count:
            now = simulate(schedule, pipeline.graph).makespan
        return Played(schedule, now, self.peak)

    def _choose(self, rank: int, now: float) -> _Choice | None:
        """The ready action that the rules put first; one that no stage waits for only where no other is ready."""
        pipeline, rules = self.pipeline, self.rules
        ready: list[tuple[tuple[int, ...], _Choice]] = []  # keys differ, so choices are not compared
        deferrable: list[tuple[int, int, Kind]] = []
        for index in pipeline.at[rank]:
            stage, order = pipeline.stage_of[index], pipeline.orders[index]
            forwards, backwards = self.forwards[index], self.backwards[index]
            if self._gradient_ready(rank, index):
                p = order[backwards]
                if self.late[index]:
                    deferrable.append((p, index, Kind.B))
                else:
                    key = (1, backwards // self.groups[index], pipeline.distances[stage], p, stage)
                    ready.append((key, (Kind.I if self.splits[index] else Kind.B, index, p)))
            if self.pending[index]:
                deferrable.append((self.pending[index][0], index, Kind.W))
            if self._forward_ready(rank, index):
                p = order[forwards]
                turn = forwards // self.groups[index]
                key = (0 if rules.eager else 2, turn, -pipeline.distances[stage], p, stage)
                ready.append((key, (Kind.F, index, p)))
        if ready:
            return min(ready)[1]
        if deferrable:
            p, index, kind = min(deferrable, key=lambda each: each[:2])
            if not self._worth_waiting(rank, index, now):
                return kind, index, p
        return None

    def _gradient_ready(self, rank: int, index: int) -> bool:
        """Whether instance ``index`` could run its next full backward or input gradient."""
        stage, backwards = self.pipeline.stage_of[index], self.backwards[index]
        if not self.pipeline.backward[stage] or self.forwards[index] == backwards:
            return False
        if self.rules.flush and self.forwards_left[rank]:
            return False
        return not self.missing_backward[stage][self.pipeline.orders[index][backwards]]

    def _forward_ready(self, rank: int, index: int) -> bool:
        """Whether instance ``index`` could run its next forward within the limits."""
        stage, forwards = self.pipeline.stage_of[index], self.forwards[index]
        order = self.pipeline.orders[index]
        if forwards == len(order):
            return False
        if self.pipeline.backward[stage] and forwards - self.backwards[index] >= self.in_flight[index]:
            return False
        p = order[forwards]
        return not self.missing_forward[stage][p] and self._may_hold(rank, stage, p)

    def _may_hold(self, rank: int, stage: int, p: int) -> bool:
        """Whether ``rank`` may hold one more activation, because of its limit or because ``p`` is the front."""
        if not self.pipeline.backward[stage] or self.held[rank] < self.limit[rank]:
            return True
        if p != self.front or any(self._can_free(rank, index) for index in self.pipeline.at[rank]):
            return False
        self.waived = True
        return True

    def _can_free(self, rank: int, index: int) -> bool:
        """Whether instance ``index`` could free an activation now by a deferrable action."""
        return bool(self.pending[index]) or (self.late[index] and self._gradient_ready(rank, index))

    def _worth_waiting(self, rank: int, index: int, now: float) -> bool:
        """Whether a gradient arrives for ``rank`` soon enough to let a weight gradient of ``index`` wait."""
        if not self.rules.patience:
            return False
        pipeline, until = self.pipeline, now + self.rules.patience * self.pipeline.weights[index]
        for end, _, kind, source, p in self.running:
            if end < until and kind in (Kind.B, Kind.I):
                for stage in pipeline.passes_to[pipeline.stage_of[source]]:
                    if pipeline.home[stage][p] == rank and self.missing_backward[stage][p] == 1:
                        return True
        return False

    def _start(self, kind: Kind, index: int) -> float:
        """Counts an action as started and returns its duration."""
        node = self.pipeline.nodes[index]
        if kind is Kind.F:
            self.forwards[index] += 1
            self.forwards_left[node.rank] -= 1
            self.held[node.rank] += self.pipeline.backward[self.pipeline.stage_of[index]]
            self.peak[node.rank] = max(self.peak[node.rank], self.held[node.rank])
            return _INSTANT if self.rules.by_count else node.forward_cost
        if kind is Kind.W:
            self.pending[index].popleft()
            return self.pipeline.weights[index] * self.rules.stretch[1]
        self.backwards[index] += 1
        if self.rules.by_count:
            return 1.0
        duration = node.backward_cost - (self.pipeline.weights[index] if kind is Kind.I else 0.0)
        return duration * self.rules.stretch[0]

    def _end(self, kind: Kind, index: int, p: int, woken: set[int]) -> None:
        """Counts an action as ended and adds the ranks that waited for it to ``woken``."""
        pipeline, stage = self.pipeline, self.pipeline.stage_of[index]
        if kind is Kind.F:
            self.missing_backward[stage][p] -= 1
            receivers, missing = pipeline.successors[stage], self.missing_forward
        elif kind is Kind.W:
            receivers, missing = [], self.missing_backward
        else:
            receivers, missing = pipeline.passes_to[stage], self.missing_backward
        for receiver in receivers:
            missing[receiver][p] -= 1
            if not missing[receiver][p]:
                woken.add(pipeline.home[receiver][p])
        if kind is Kind.I:
            self.pending[index].append(p)
        elif kind is not Kind.F:
            self.held[pipeline.nodes[index].rank] -= 1
        if kind is not Kind.W:
            self.unfinished[p] -= 1
            while self.front < len(self.unfinished) and not self.unfinished[self.front]:
                self.front += 1

    def _assert_complete(self) -> None:
        for index, node in enumerate(self.pipeline.nodes):
            count = len(node.microbatches)
            backwards = count if self.pipeline.backward[self.pipeline.stage_of[index]] else 0
            assert (self.forwards[index], self.backwards[index]) == (count, backwards), (
                f"{node.stage} on rank {node.rank} stopped after {self.forwards[index]} forwards and "
                f"{self.backwards[index]} backwards of {count} microbatches: nothing can run any more"
            )


def gpipe(graph: Graph) -> list[Rules]:
    """All forwards, then all backwards."""
    return [Rules(flush=True)]


def one_f_one_b(graph: Graph) -> list[Rules]:
    """One forward, one backward, within `in_flight_limits`.

    The order by count does not depend on estimated costs. The other one may be shorter where stages on one rank, or
    instances that serve several replicas, compete for it. Stages of a modality that follow each other on one rank, as
    unlike pipelines have them, count as one.
    """
    limits = in_flight_limits(graph, joined=True)
    return [Rules(in_flight=limits, eager=True, by_count=by_count) for by_count in (True, False)]


def in_flight_limits(graph: Graph, *, joined: bool = False) -> dict[StageKey, int]:
    """Return for each stage with backward the most microbatches in flight per instance under ``1f1b``.

    A microbatch is in flight from the start of its forward to the end of its backward. The limit is the number of
    stages on the longest path to the end, times the loss replicas per instance, rounded up. A chain of 3 has 3, 2, 1.

    Args:
        graph: the stages.
        joined: whether stages of a modality that follow each other on one rank count as one.
    """
    depths: dict[StageKey, int] = {}
    for stage in sorted(graph.stages, key=graph.distance_to_end):
        later = graph.successors(stage)
        steps = [depths[other] + (not joined or _is_apart(graph, stage, other)) for other in later]
        depths[stage] = max(steps, default=1)
    return {stage: per_instance(graph, stage, depths[stage]) for stage in graph.stages if graph.has_backward(stage)}


def _is_apart(graph: Graph, stage: StageKey, other: StageKey) -> bool:
    """Whether two stages are of different modalities, or any of their instances on different ranks."""
    ranks = [{node.replica: node.rank for node in graph.instances(key)} for key in (stage, other)]
    return stage.modality != other.modality or ranks[0] != ranks[1]


def per_instance(graph: Graph, stage: StageKey, count: int) -> int:
    """Return how many microbatches each instance of ``stage`` has if each loss replica has ``count``; rounded up."""
    ends = [end for end in graph.stages if not graph.successors(end)]
    loss_replicas = max(len(graph.instances(end)) for end in ends)
    return math.ceil(count * loss_replicas / len(graph.instances(stage)))


def interleaved(graph: Graph) -> list[Rules]:
    """Chunks take turns of P microbatches, or of one, which is better where M is no multiple of P."""
    limits = in_flight_limits(graph)
    chunked = {stage for rank in graph.ranks for mine in chunks(graph, rank) if len(mine) > 1 for stage in mine}
    in_flight = {stage: limit for stage, limit in limits.items() if stage not in chunked}
    if not chunked:
        return one_f_one_b(graph)
    held = {rank: warm_up(graph, rank) for rank in graph.ranks}
    return [Rules(in_flight=in_flight, held=held, eager=True, groups=groups) for groups in (turns(graph), {})]


def chunks(graph: Graph, rank: int) -> list[list[StageKey]]:
    """Return for each modality its stages on ``rank`` that run backwards, in the order of the pipeline."""
    by_modality: dict[str, list[StageKey]] = {}
    for stage in graph.stages_of(rank):
        if graph.has_backward(stage):
            by_modality.setdefault(stage.modality, []).append(stage)
    return list(by_modality.values())


def turns(graph: Graph) -> dict[StageKey, int]:
    """Return P, the pipeline ranks of its modality, for each stage that shares its rank with others of its modality."""
    depths = Counter(stage.modality for stage in graph.stages)
    by_stage: dict[StageKey, int] = {}
    for rank in graph.ranks:
        for stages in chunks(graph, rank):
            if len(stages) > 1:
                turn = math.ceil(depths[stages[0].modality] / len(stages))
                by_stage |= {stage: max(turn, by_stage.get(stage, 1)) for stage in stages}
    return by_stage


def warm_up(graph: Graph, rank: int) -> int:
    """Return the most activations that ``rank`` holds under ``interleaved``: as many as fill the pipeline after it."""
    total = 0
    for mine in chunks(graph, rank):
        first, last = (graph.distance_to_end(stage) for stage in (mine[0], mine[-1]))
        total += per_instance(graph, mine[0], first + 1 if len(mine) == 1 else first + last + 1)
    return total


PATIENCE = 0.5
"""A weight gradient waits if a gradient arrives within this share of its duration."""
STRETCHES = ((1.2, 1.4), (1.4, 1.4))
"""Values of `Rules.stretch` that shortened the schedules of the most graphs, of the few that were tried."""


def zero_bubble(graph: Graph) -> list[Rules]:
    """Split backwards in several orders, and full backwards, all within `held_limits`."""
    plain = Rules(in_flight=in_flight_limits(graph), held=held_limits(graph))
    split = replace(plain, split=True, patience=PATIENCE)
    shorter, longer = STRETCHES
    return [
        *(replace(split, eager=eager, lazy=lazy) for lazy in (False, True) for eager in (True, False)),
        replace(split, eager=True, lazy=True, patience=0.0),
        replace(split, eager=True, lazy=True, patience=0.0, stretch=shorter),
        *(replace(split, eager=eager, stretch=longer) for eager in (True, False)),
        plain,
    ]


def held_limits(graph: Graph) -> dict[int, int]:
    """Return for each rank the most activations that it may hold.

    It is the depth of the pipeline times the loss replicas that the rank serves, as for the first stage under ``1f1b``;
    or `warm_up`, where that is more.
    """
    depth = 1 + max((graph.distance_to_end(stage) for stage in graph.stages), default=0)
    limits = {}
    for rank in graph.ranks:
        firsts = [stages[0] for stages in chunks(graph, rank)]
        deep = max((per_instance(graph, stage, depth) for stage in firsts), default=0)
        limits[rank] = max(deep, warm_up(graph, rank))
    return limits
