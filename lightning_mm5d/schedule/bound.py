"""How short a schedule of a graph can be at best: what no order of actions gets below.

Every rank is a machine whose jobs become ready no earlier than the shortest way to them allows, and leave a way to
go behind them. So the jobs that are ready late, or have far to go, bound the makespan together (the one-machine bound,
Carlier 1982). Limits on activations are not part of it: where few are allowed nothing may reach the bound.
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
    """The forwards, input gradients or weight gradients of one instance, a job for each microbatch.

    Args:
        duration: of each.
        heads: ascending, the time before the first, second, ... of them to be started can start.
        tails: ascending, the time that passes after the last, last but one, ... of them to be ended.
    """

    duration: float
    heads: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)

    def paced(self, times: Iterable[float]) -> list[float]:
        """``times`` with at least a job between two."""
        return list(accumulate(times, lambda before, time: max(time, before + self.duration)))


def lower_bound(graph: Graph) -> float:
    """A makespan that no schedule of ``graph`` goes below, in the unit of its costs; messages take no time."""
    jobs = _all_jobs(graph)
    bound = 0.0
    for rank in graph.ranks:
        mine = [each for index, node in enumerate(graph.nodes) if node.rank == rank for each in jobs[index]]
        sides = [(each.duration, each.heads, each.tails) for each in mine if each.heads]
        bound = max(bound, _latest(sides), _latest([(duration, tails, heads) for duration, heads, tails in sides]))
    return bound


def _latest(sides: list[tuple[float, list[float], list[float]]]) -> float:
    """The most that comes of: all jobs that are ready after some time, behind it, and the shortest way on from them."""
    best = 0.0
    for way in {tails[0] for _, _, tails in sides}:
        ready = sorted(
            ((time, duration) for duration, heads, tails in sides if tails[0] >= way for time in heads), reverse=True
        )
        work = accumulate(duration for _, duration in ready)
        best = max(best, max(time + after + way for (time, _), after in zip(ready, work, strict=True)))
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
        """By stage, the jobs of the instances that ``node`` shares microbatches with, and how many."""
        for stage in stages:
            shared: dict[Node, int] = {}
            for m in node.microbatches:
                other = graph.node_of(stage, m)
                shared[other] = shared.get(other, 0) + 1
            yield [(jobs[number[other]][kind], count) for other, count in shared.items()]

    for node, forward, _, _ in nodes:
        sources = [_after(theirs) for theirs in others(node, graph.predecessors(node.stage), 0)]
        forward.heads.extend(forward.paced(_most(len(node.microbatches), *sources)))
    for node, forward, gradient, weight in reversed(nodes):
        if graph.has_backward(node.stage):
            own = [time + forward.duration for time in forward.heads]
            targets = [_after(theirs) for theirs in others(node, graph.successors(node.stage), 1)]
            gradient.heads.extend(gradient.paced(_most(len(own), own, *targets)))
            weight.heads.extend(time + gradient.duration for time in gradient.heads)
            weight.tails.extend(number * weight.duration for number in range(len(own)))
    for node, _, gradient, weight in nodes:
        if graph.has_backward(node.stage):
            own = [time + weight.duration for time in weight.tails]
            passed = [src for src in graph.predecessors(node.stage) if graph.has_backward(src)]
            sources = [_before(theirs) for theirs in others(node, passed, 1)]
            gradient.tails.extend(gradient.paced(_most(len(own), own, *sources)))
    for node, forward, gradient, _ in reversed(nodes):
        own = [time + gradient.duration for time in gradient.tails]
        targets = [_before(theirs) for theirs in others(node, graph.successors(node.stage), 0)]
        forward.tails.extend(forward.paced(_most(len(node.microbatches), own, *targets)))
    return jobs


def _after(theirs: list[tuple[_Jobs, int]]) -> list[float]:
    """Ascending, when the jobs that are shared can have ended."""
    return sorted(head + jobs.duration for jobs, count in theirs for head in jobs.heads[:count])


def _before(theirs: list[tuple[_Jobs, int]]) -> list[float]:
    """Ascending, what passes from the start of the jobs that are shared to the end."""
    return sorted(tail + jobs.duration for jobs, count in theirs for tail in jobs.tails[:count])


def _most(count: int, *lists: list[float]) -> list[float]:
    """Place by place the largest; 0 where there is none."""
    return [max((times[index] for times in lists if times), default=0.0) for index in range(count)]
