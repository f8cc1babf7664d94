"""``interleaved``: several chunks of a modality on each worker, which shortens the pipeline's ramps.

Stage k of a modality lies on worker k mod P (Narayanan et al. 2021, arXiv:2104.04473). Each chunk runs P
microbatches, then the worker's next chunk has its turn. A worker holds as many activations as stages follow its first
chunk, plus as many as follow its last one, plus one: Megatron's warm-up, told by distances so that it holds in a graph
of stages too. On a chain of P workers with v chunks each and M microbatches, a multiple of P, workers idle for
(P - 1)(f + b) / v, with f and b of all chunks of a worker.

Modalities with one stage on a worker run as under ``1f1b``.
"""

from __future__ import annotations

import math
from collections import Counter

from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.greedy import Rules
from lightning_mm5d.schedule.plain import in_flight_limits, per_instance


def interleaved(graph: Graph) -> list[Rules]:
    """Chunks in turns of P microbatches, or of one, which is better where M is no multiple of P."""
    limits = in_flight_limits(graph)
    chunked = {stage for worker in graph.workers for mine in chunks(graph, worker) if len(mine) > 1 for stage in mine}
    in_flight = {stage: limit for stage, limit in limits.items() if stage not in chunked}
    if not chunked:
        return [Rules(in_flight=limits)]
    held = {worker: warm_up(graph, worker) for worker in graph.workers}
    return [Rules(in_flight=in_flight, held=held, eager=True, groups=groups) for groups in (turns(graph), {})]


def chunks(graph: Graph, worker: int) -> list[list[str]]:
    """The stages on ``worker`` that run backwards, by modality, in the order of the pipeline."""
    found: dict[str, list[str]] = {}
    for stage in graph.stages_of(worker):
        if graph.has_backward(stage):
            found.setdefault(stage.rpartition(".")[0], []).append(stage)
    return list(found.values())


def turns(graph: Graph) -> dict[str, int]:
    """For each stage that shares its worker with others of its modality, the number of such workers in a row, P."""
    depths = Counter(stage.rpartition(".")[0] for stage in graph.stages)
    found: dict[str, int] = {}
    for worker in graph.workers:
        for mine in chunks(graph, worker):
            if len(mine) > 1:
                turn = math.ceil(depths[mine[0].rpartition(".")[0]] / len(mine))
                found |= {stage: max(turn, found.get(stage, 1)) for stage in mine}
    return found


def warm_up(graph: Graph, worker: int) -> int:
    """The most activations that ``worker`` holds under ``interleaved``: what fills the pipeline behind it."""
    total = 0
    for mine in chunks(graph, worker):
        first, last = (graph.distance_to_end(stage) for stage in (mine[0], mine[-1]))
        total += per_instance(graph, mine[0], first + 1 if len(mine) == 1 else first + last + 1)
    return total
