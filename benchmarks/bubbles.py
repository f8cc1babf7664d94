"""Bubbles of zero-bubble schedules, by simulation, against the theory.

Chains as they are published: equal stages, P microbatches or more, forward f, input gradient i and weight gradient w.
The bubble is the share of the ranks' time in which they idle, and what it is divided by is what it would be

- with the published idle time: (P - 1)(f + i - w) of ZB-H1 where w is at most i (Qi et al. 2023, arXiv:2401.10241), and
  (P - 1) f of ZBV where f = i = w, f that of a chunk (Qi et al. 2024, arXiv:2405.15362: none between a rank's first
  and last action, so what is left is the way to the last rank);
- with a makespan of `lower_bound`, which no schedule goes below, however much it may hold.

Costs are also taken unequal, with a head on the last stage, and stages also in a graph of encoders side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from statistics import mean

from turns import row

from lightning_mm5d.schedule import Graph, Node, build, place, simulate
from lightning_mm5d.schedule.graph import StageKey

SIZES = [(ranks, ranks * times) for ranks, times in product((4, 8, 16), (1, 2, 4))]
EQUAL = (1.0, 1.0, 1.0)
TIMES = (EQUAL, (1.0, 1.1, 0.9), (1.0, 0.9, 1.1))
"""Of forward, input gradient and weight gradient of a rank's share of the layers."""
HEADS = (0.0, 0.3)
"""What the last stage takes for its head in forward, beside its layers; twice of it in backward."""
MORE = 1.5
"""Times the activations that the zero-bubble schedules hold, where ``auto`` may hold more."""
AIM = "1.05"

Make = Callable[[int, int, tuple[float, float, float], float, str], Graph]


def chain(ranks: int, microbatches: int, times: tuple[float, float, float], head: float, schedule: str) -> Graph:
    """A language model in as many equal stages as the schedule wants."""
    chunks = 2 if schedule == "zbv" else 1
    forward, gradient, weight = (time / chunks for time in times)
    depth = ranks * chunks
    nodes = [
        Node(
            stage=StageKey("language", stage),
            rank=rank,
            microbatches=tuple(range(microbatches)),
            forward_cost=forward + head * (stage == depth - 1),
            backward_cost=gradient + weight + 2 * head * (stage == depth - 1),
            weight_cost=weight + head * (stage == depth - 1),
        )
        for stage, rank in enumerate(place(schedule, depth, ranks))
    ]
    return Graph(tuple(nodes), tuple(pairwise(node.stage for node in nodes)))


def encoders(ranks: int, microbatches: int, times: tuple[float, float, float], head: float, schedule: str) -> Graph:
    """The same, with the first quarter of the ranks running two encoders side by side."""
    forward, gradient, weight = times
    language = chain(ranks - ranks // 4, microbatches, times, head, schedule)
    vision = max(ranks // 8, 1)
    towers = {"vision": range(vision), "audio": range(vision, ranks // 4)}
    nodes = [
        Node(
            stage=StageKey(name, index),
            rank=rank,
            microbatches=tuple(range(microbatches)),
            forward_cost=forward,
            backward_cost=gradient + weight,
            weight_cost=weight if index else None,
        )
        for name, ranks in towers.items()
        for index, rank in enumerate(ranks)
    ]
    edges = [*language.edges]
    for name, ranks in towers.items():
        stages = [StageKey(name, index) for index in range(len(ranks))]
        edges += [*pairwise(stages), *((stage, StageKey("language", 0)) for stage in stages[-1:])]
    moved = (replace(node, rank=node.rank + ranks // 4) for node in language.nodes)
    return Graph((*nodes, *moved), tuple(edges))


def bubble(graph: Graph, makespan: float) -> float:
    """The share of the ranks' time that is not work."""
    work = sum(len(node.microbatches) * (node.forward_cost + node.backward_cost) for node in graph.nodes)
    return 1 - work / len(graph.ranks) / makespan


def over_published(schedule: str, times: Iterable[tuple[float, float, float]]) -> Iterator[float]:
    """Bubbles of chains without a head over those with the published idle time."""
    for costs, (ranks, microbatches) in product(times, SIZES):
        forward, gradient, weight = costs
        idle = (ranks - 1) * (forward / 2 if schedule == "zbv" else max(forward + gradient - weight, forward))
        graph = chain(ranks, microbatches, costs, 0.0, schedule)
        makespan = simulate(build(schedule, graph), graph).makespan
        yield bubble(graph, makespan) / bubble(graph, microbatches * sum(costs) + idle)


def over_bound(make: Make, schedule: str, placement: str, more: float = 1.0) -> Iterator[float]:
    """Bubbles over those of the lower bound; ``auto`` may hold ``more`` times what the placement's schedule does."""
    for times, head, (ranks, microbatches) in product(TIMES, HEADS, SIZES):
        graph = make(ranks, microbatches, times, head, placement)
        held = max(simulate(build(placement, graph), graph).peak_activations.values())
        makespan = simulate(build(schedule, graph, max_activations=int(more * held)), graph).makespan
        yield bubble(graph, makespan) / bubble(graph(graph))


def show(figure: str, ratios: Iterable[float]) -> None:
    """Print the row of the worst ratio."""
    ratios = list(ratios)
    row(figure, max(ratios), AIM, f"mean {mean(ratios):.3f} of {len(ratios)}")


def main() -> None:
    show("zero_bubble, chain: bubble over ZB-H1's", over_published("zero_bubble", TIMES))
    show("zbv, chain, f = i = w: bubble over ZBV's", over_published("zbv", [EQUAL]))
    for what, make in (("chain", chain), ("encoders side by side", encoders)):
        for placement in ("zero_bubble", "zbv"):
            where = "in a V" if placement == "zbv" else "a stage a rank"
            show(f"{placement}, {what}: bubble over the lower bound's", over_bound(make, placement, placement))
            show(f"auto, {what}, {where}: the same", over_bound(make, "auto", placement))
            show(
                f"auto, {what}, {where}, {MORE} times the activations: the same",
                over_bound(make, "auto", placement, MORE),
            )


if __name__ == "__main__":
    main()
