"""A lower bound on the makespan of every schedule of a graph.

Each rank is a machine and each action a job with a *head*, the shortest time before it can start, and a *tail*, the
shortest time from its end to the end of the step. The earliest head, the total duration and the shortest tail of any
set of jobs on a rank bound the makespan together (the one-machine bound, Carlier 1982). Limits on activations are not
counted, so with tight limits no schedule may reach the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import accumulate

from lightning_mm5d.schedule.graph import Graph, Node
from lightning_mm5d.schedule.stage_key import StageKey


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
        mine = [each for index, node in enumerate(graph.nodes) if node.rank == rank for each in jobs[index]]
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


def _all_jobs(graph: Graph) -> list[tuple[_Jobs, _Jobs, _Jobs]]:
    """For each node its forwards, input gradients and weight gradients; the latter two are empty without backward."""
    jobs = []
    for node in graph.nodes:
        last = graph.weight_cost(node)
        jobs.append((_Jobs(node.forward_cost), _Jobs(node.backward_cost - last), _Jobs(last)))
    number = {node: index for index, node in enumerate(graph.nodes)}
    order = [*TopologicalSorter({stage: graph.predecessors(stage) for stage in graph.stages}).static_order()]
    nodes = [(node, *jobs[number[node]]) for stage in order for node in graph.instances(stage)]

    def others(node: Node, stages: Iterable[StageKey], kind: int) -> Iterator[list[tuple[_Jobs, int]]]:
        """For each stage, the jobs of the instances that share microbatches with ``node``, and how many they share."""
        for stage in stages:
            shared: dict[Node, int] = {}
            for m in node.microbatches:
                other = graph.node_of(stage, m)
                shared[other] = shared.get(other, 0) + 1
            yield [(jobs[number[other]][kind], count) for other, count in shared.items()]

    for node, forward, _, _ in nodes:
        sources = [_ends(theirs) for theirs in others(node, graph.predecessors(node.stage), 0)]
        forward.heads.extend(forward.paced(_elementwise_max(len(node.microbatches), *sources)))
    for node, forward, gradient, weight in reversed(nodes):
        if graph.has_backward(node.stage):
            own = [time + forward.duration for time in forward.heads]
            targets = [_ends(theirs) for theirs in others(node, graph.successors(node.stage), 1)]
            gradient.heads.extend(gradient.paced(_elementwise_max(len(own), own, *targets)))
            weight.heads.extend(time + gradient.duration for time in gradient.heads)
            weight.tails.extend(number * weight.duration for number in range(len(own)))
    for node, _, gradient, weight in nodes:
        if graph.has_backward(node.stage):
            own = [time + weight.duration for time in weight.tails]
            passed = [src for src in graph.predecessors(node.stage) if graph.has_backward(src)]
            sources = [_remainders(theirs) for theirs in others(node, passed, 1)]
            gradient.tails.extend(gradient.paced(_elementwise_max(len(own), own, *sources)))
    for node, forward, gradient, _ in reversed(nodes):
        own = [time + gradient.duration for time in gradient.tails]
        targets = [_remainders(theirs) for theirs in others(node, graph.successors(node.stage), 0)]
        forward.tails.extend(forward.paced(_elementwise_max(len(node.microbatches), own, *targets)))
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
