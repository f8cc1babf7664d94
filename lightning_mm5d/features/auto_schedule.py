"""``auto``: searches for the shortest schedule within a bound on activations.

The search plays the rules of the named schedules, then mixtures of them, then climbs: it changes the limit of one stage
at a time. The number of rules played depends on the number of actions and not on a clock, because all ranks must find
the same schedule. For 16 ranks and 32 microbatches it takes about half a second. It stops early at the lower bound.

A lower bound on the makespan of every schedule of a graph.

Each rank is a machine and each action a job with a *head*, the shortest time before it can start, and a *tail*, the
shortest time from its end to the end of the step. The earliest head, the total duration and the shortest tail of any
set of jobs on a rank bound the makespan together (the one-machine bound, Carlier 1982). Limits on activations are not
counted, so with tight limits no schedule may reach the bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from itertools import accumulate, cycle, product
from typing import NamedTuple

from lightning_mm5d.schedule.graph import Graph, Node, Schedule, StageKey
from lightning_mm5d.schedule.greedy import (
    PATIENCE,
    Pipeline,
    Played,
    Rules,
    gpipe,
    in_flight_limits,
    interleaved,
    one_f_one_b,
    turns,
    zero_bubble,
)
from lightning_mm5d.schedule.validate import ScheduleError


@dataclass(frozen=True)
class _Jobs:
    """The forwards, input gradients or weight gradients of one instance: a job for each microbatch.

    Args:
        duration: of each job.
        heads: ascending; entry k is the earliest time at which k + 1 of the jobs can have been started.
        tails: ascending; entry k is the shortest time to the end after the end of the job that k others follow.
    """

    duration: float
    heads: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)

    def paced(self, times: Iterable[float]) -> list[float]:
        """Ascending ``times``, delayed until neighbours are at least a job apart: [0, 1, 9] is [0, 2, 9] for 2."""
        return list(accumulate(times, lambda before, time: max(time, before + self.duration)))


def lower_bound(graph: Graph) -> float:
    """Return a time, in the unit of the graph's costs, that no makespan is below; messages take no time."""
    jobs = _all_jobs(graph)
    bound = 0.0
    for rank in graph.ranks:
        mine = [each for node in graph.nodes if node.rank == rank for each in jobs[node]]
        sides = [(each.duration, each.heads, each.tails) for each in mine if each.heads]
        bound = max(bound, _one_machine(sides), _one_machine([(time, tails, heads) for time, heads, tails in sides]))
    return bound


def _one_machine(jobs: list[tuple[float, list[float], list[float]]]) -> float:
    """The one-machine bound of one rank; `jobs` holds (duration, heads, tails) of each group of jobs.

    For every tail t and head h it takes the jobs whose head is at least h, of the groups whose shortest tail is at
    least t, and adds h, their durations and t. One job of head 2, duration 3 and tail 4 gives 9.
    """
    best = 0.0
    for tail in {tails[0] for _, _, tails in jobs}:
        late = sorted(
            ((head, duration) for duration, heads, tails in jobs if tails[0] >= tail for head in heads), reverse=True
        )
        work = accumulate(duration for _, duration in late)
        best = max(best, max(head + total + tail for (head, _), total in zip(late, work, strict=True)))
    return best


def _all_jobs(graph: Graph) -> dict[Node, tuple[_Jobs, _Jobs, _Jobs]]:
    """For each node its forwards, input gradients and weight gradients; the latter two are empty without backward."""
    jobs = {}
    for node in graph.nodes:
        last = graph.weight_cost(node)
        jobs[node] = _Jobs(node.forward_cost), _Jobs(node.backward_cost - last), _Jobs(last)
    order = [*TopologicalSorter({stage: graph.predecessors(stage) for stage in graph.stages}).static_order()]
    nodes = [(node, *jobs[node]) for stage in order for node in graph.instances(stage)]

    def others(node: Node, stages: Iterable[StageKey], kind: int) -> Iterator[list[tuple[_Jobs, int]]]:
        """For each stage, the jobs of the instances that share microbatches with ``node``, and how many they share."""
        for stage in stages:
            shared = Counter(graph.node_of(stage, m) for m in node.microbatches)
            yield [(jobs[other][kind], count) for other, count in shared.items()]

    for node, forward, _, _ in nodes:
        sources = [_ends(theirs) for theirs in others(node, graph.predecessors(node.stage), 0)]
        forward.heads.extend(forward.paced(_elementwise_max(len(node.microbatches), *sources)))
    for node, forward, gradient, weight in reversed(nodes):
        if graph.has_backward(node.stage):
            node_times = [time + forward.duration for time in forward.heads]
            targets = [_ends(theirs) for theirs in others(node, graph.successors(node.stage), 1)]
            gradient.heads.extend(gradient.paced(_elementwise_max(len(node_times), node_times, *targets)))
            weight.heads.extend(time + gradient.duration for time in gradient.heads)
            weight.tails.extend(number * weight.duration for number in range(len(node_times)))
    for node, _, gradient, weight in nodes:
        if graph.has_backward(node.stage):
            node_times = [time + weight.duration for time in weight.tails]
            passed = [src for src in graph.predecessors(node.stage) if graph.has_backward(src)]
            sources = [_remainders(theirs) for theirs in others(node, passed, 1)]
            gradient.tails.extend(gradient.paced(_elementwise_max(len(node_times), node_times, *sources)))
    for node, forward, gradient, _ in reversed(nodes):
        node_times = [time + gradient.duration for time in gradient.tails]
        targets = [_remainders(theirs) for theirs in others(node, graph.successors(node.stage), 0)]
        forward.tails.extend(forward.paced(_elementwise_max(len(node.microbatches), node_times, *targets)))
    return jobs


def _ends(theirs: list[tuple[_Jobs, int]]) -> list[float]:
    """The earliest ends of the shared jobs, ascending."""
    return sorted(head + jobs.duration for jobs, count in theirs for head in jobs.heads[:count])


def _remainders(theirs: list[tuple[_Jobs, int]]) -> list[float]:
    """The shortest times from the start of the shared jobs to the end of the step, ascending."""
    return sorted(tail + jobs.duration for jobs, count in theirs for tail in jobs.tails[:count])


def _elementwise_max(count: int, *lists: list[float]) -> list[float]:
    """The largest entry at each of `count` places of lists that are full or empty; 0 where all are empty."""
    return [max((times[index] for times in lists if times), default=0.0) for index in range(count)]


_ACTIONS = 60_000
"""Actions that a search plays in total, at about 10 microseconds each."""
_FEWEST, _MOST = 26, 300
"""The least and the most rules that a search plays."""

_LIMITS = ((1.0, 0), (1.0, 1), (1.25, 0), (1.5, 0), (2.0, 0), (math.inf, 0))
"""Limits on microbatches in flight: those of ``1f1b`` times the first number, plus the second."""


class _Mixture(NamedTuple):
    """One choice for all that the named schedules vary; fields are as in `Rules`, ``turns`` is its ``groups``."""

    limits: tuple[float, int]
    split: bool
    eager: bool
    lazy: bool
    turns: bool
    patience: float


_FIRST = (
    _Mixture((1.25, 0), split=True, eager=True, lazy=True, turns=False, patience=0.0),
    _Mixture((1.0, 0), split=False, eager=True, lazy=True, turns=True, patience=0.0),
    _Mixture((1.5, 0), split=True, eager=False, lazy=True, turns=False, patience=PATIENCE),
    _Mixture((math.inf, 0), split=True, eager=False, lazy=True, turns=True, patience=0.0),
    _Mixture((1.0, 1), split=False, eager=True, lazy=True, turns=False, patience=0.0),
    _Mixture((1.0, 1), split=False, eager=True, lazy=True, turns=True, patience=0.0),
    _Mixture((1.0, 1), split=True, eager=False, lazy=False, turns=False, patience=0.0),
    _Mixture((math.inf, 0), split=False, eager=False, lazy=False, turns=False, patience=0.0),
    _Mixture((1.0, 0), split=False, eager=False, lazy=True, turns=True, patience=0.0),
    _Mixture((math.inf, 0), split=False, eager=True, lazy=True, turns=False, patience=0.0),
    _Mixture((1.5, 0), split=False, eager=True, lazy=True, turns=True, patience=0.0),
)
"""The mixtures tried first. They shortened the makespans of 276 graphs most: chains with and without chunks, and
encoders, trained or frozen, that feed a language model, on their own ranks and colocated."""


def auto(graph: Graph, max_activations: int | Mapping[int, int] | None = None) -> Schedule:
    """Searches for the shortest schedule.

    Args:
        graph: the stages; their placement stays.
        max_activations: the most activations that a rank may hold, one number for all ranks or by rank; ranks that
            are not named have no bound. By default the most that any rank holds under ``1f1b``, ``interleaved`` or
            ``zero_bubble``.

    Raises:
        ScheduleError: all schedules that it finds hold more.
    """
    search = _Search(graph, max_activations)
    search.run()
    return search.answer().schedule


class _Search:
    def __init__(self, graph: Graph, max_activations: int | Mapping[int, int] | None) -> None:
        self.graph, self.pipeline = graph, Pipeline(graph)
        actions = sum(len(node.microbatches) * (3 if graph.has_backward(node.stage) else 1) for node in graph.nodes)
        self.plays_left = min(_MOST, max(_FEWEST, _ACTIONS // max(actions, 1)))
        self.enough = lower_bound(graph) * (1 + 1e-9)
        self.best: tuple[Rules, Played] | None = None
        self.frugal: Played | None = None
        named = [(rules, self.pipeline.play(rules)) for make in _NAMED for rules in make(graph)]
        self.plays_left -= len(named)
        if max_activations is None:
            max_activations = max((max(played.held.values()) for _, played in named), default=0)
        if not isinstance(max_activations, Mapping):
            max_activations = dict.fromkeys(graph.ranks, max_activations)
        self.bound = max_activations
        for rules, played in named:
            self._offer(rules, played)

    def run(self) -> None:
        for rules in (*gpipe(self.graph), *self._mixtures()):
            if self._done():
                return
            self._try(rules)
        if self.best is None:
            self._shrink()
        if self.best is not None:
            self._climb()

    def answer(self) -> Played:
        if self.best is None:
            assert self.frugal is not None
            rank = next(rank for rank, held in self.frugal.held.items() if held > self.bound.get(rank, held))
            raise ScheduleError(
                f"schedule auto: max_activations is {self.bound[rank]} on rank {rank}, but no schedule was found "
                f"that holds fewer than {self.frugal.held[rank]} there. Allow that many, or use fewer stages."
            )
        return self.best[1]

    def _mixtures(self) -> Iterator[Rules]:
        """Rules for each mixture: first those of `_FIRST`, then all others."""
        limits, grouped = in_flight_limits(self.graph), turns(self.graph)
        every = (
            _Mixture(scale, split, eager, lazy, in_turns, patience)
            for split in (True, False)
            for eager, lazy, in_turns in product((True, False), repeat=3)
            for patience in ((PATIENCE, 0.0) if split else (0.0,))
            for scale in _LIMITS
        )
        for mixture in dict.fromkeys([*_FIRST, *every]):
            if (mixture.turns and not grouped) or (mixture.split and not any(self.pipeline.splits)):
                continue
            factor, more = mixture.limits
            scaled = {} if factor == math.inf else {s: math.ceil(factor * limit) + more for s, limit in limits.items()}
            yield Rules(
                in_flight=scaled,
                held=self.bound,
                split=mixture.split,
                eager=mixture.eager,
                lazy=mixture.lazy,
                groups=grouped if mixture.turns else {},
                patience=mixture.patience,
            )

    def _shrink(self) -> None:
        """Halves the number of microbatches in flight until the schedule fits the bound or only one is left."""
        limit = max(self.bound.values())
        while limit > 0 and not self._try(Rules(in_flight=dict.fromkeys(self.graph.stages, limit), held=self.bound)):
            limit //= 2

    def _climb(self) -> None:
        """Raises or lowers the limit of one stage at a time, until no such change shortens the schedule."""
        limits = in_flight_limits(self.graph)
        moves = cycle(product(sorted(limits), (1, -1)))
        since = 0
        while since < 2 * len(limits) and not self._done():
            assert self.best is not None
            (stage, step), rules = next(moves), self.best[0]
            limit = rules.in_flight.get(stage, limits[stage]) + step
            improved = limit > 0 and self._try(replace(rules, flush=False, in_flight={**rules.in_flight, stage: limit}))
            since = 0 if improved else since + 1

    def _try(self, rules: Rules) -> bool:
        self.plays_left -= 1
        return self._offer(rules, self.pipeline.play(rules))

    def _offer(self, rules: Rules, played: Played) -> bool:
        """Keeps ``played`` if it fits the bound and is shorter than the best so far; returns whether it does."""
        excess = self._excess(played)
        if self.frugal is None or excess < self._excess(self.frugal):
            self.frugal = played
        if excess > 0 or (self.best is not None and played.makespan >= self.best[1].makespan * (1 - 1e-9)):
            return False
        self.best = rules, played
        return True

    def _excess(self, played: Played) -> int:
        """By how many activations the fullest rank is above its bound; at most 0 if the schedule fits."""
        return max((held - self.bound.get(rank, held) for rank, held in played.held.items()), default=0)

    def _done(self) -> bool:
        return self.plays_left <= 0 or (self.best is not None and self.best[1].makespan <= self.enough)


_NAMED = (one_f_one_b, interleaved, zero_bubble)
BUILDERS = {"auto": auto}
