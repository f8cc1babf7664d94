"""How short a schedule of a graph can be at best: what no order of actions gets below."""

from __future__ import annotations

from graphlib import TopologicalSorter

from lightning_mm5d.schedule.graph import Graph


def lower_bound(graph: Graph) -> float:
    """A makespan that no schedule of ``graph`` goes below, in the unit of its costs; messages take no time.

    A worker cannot start before the first microbatch reaches one of its stages. It then has all its work to do. After
    that the last gradient it made must still pass the stages before, unless weight gradients came last.
    """
    head: dict[str, float] = {}  # time before the stage's first forward can start
    tail: dict[str, float] = {}  # time for a gradient that the stage has passed on to come through
    forward = {stage: min(node.forward_cost for node in graph.instances(stage)) for stage in graph.stages}
    gradient = {
        stage: min(node.backward_cost - (graph.weight_cost(node) if graph.splits(node) else 0.0) for node in nodes)
        for stage in graph.stages
        for nodes in [graph.instances(stage)]
    }
    order = list(TopologicalSorter({stage: graph.predecessors(stage) for stage in graph.stages}).static_order())
    for stage in order:
        sources = graph.predecessors(stage)
        head[stage] = max((head[src] + forward[src] for src in sources), default=0.0)
        tail[stage] = max((tail[src] + gradient[src] for src in sources if graph.has_backward(src)), default=0.0)
    bound = max((head[stage] + forward[stage] + gradient[stage] + tail[stage] for stage in order), default=0.0)
    for worker in graph.workers:
        mine = [node for node in graph.nodes if node.worker == worker and node.microbatches]
        if mine:
            work = sum(len(node.microbatches) * (node.forward_cost + node.backward_cost) for node in mine)
            last = min(0.0 if graph.splits(node) else tail[node.stage] for node in mine)
            bound = max(bound, min(head[node.stage] for node in mine) + work + last)
    return bound if graph.microbatches else 0.0
