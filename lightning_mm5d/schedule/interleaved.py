"""``interleaved``: several chunks of a modality on each rank, which shortens the pipeline's ramps.

Stage k of a modality lies on rank k mod P (Narayanan et al. 2021, arXiv:2104.04473). Each chunk runs P microbatches,
then the rank's next chunk has its turn. A rank holds as many activations as stages follow its first chunk, plus as
many as follow its last one, plus one: Megatron's warm-up, written with distances so that it applies to any graph of
stages. On a chain of P ranks with v chunks each and M microbatches, a multiple of P, ranks idle for (P - 1)(f + b) / v,
where f and b are the forward and backward of all chunks of a rank.

Modalities with one stage on a rank run as under ``1f1b``.
"""

from __future__ import annotations

import math
from collections import Counter

from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.greedy import Rules
from lightning_mm5d.schedule.plain import in_flight_limits, one_f_one_b, per_instance
from lightning_mm5d.schedule.stage_key import StageKey


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
    found: dict[str, list[StageKey]] = {}
    for stage in graph.stages_of(rank):
        if graph.has_backward(stage):
            found.setdefault(stage.modality, []).append(stage)
    return list(found.values())


def turns(graph: Graph) -> dict[StageKey, int]:
    """Return P, the pipeline ranks of its modality, for each stage that shares its rank with others of its modality."""
    depths = Counter(stage.modality for stage in graph.stages)
    found: dict[StageKey, int] = {}
    for rank in graph.ranks:
        for mine in chunks(graph, rank):
            if len(mine) > 1:
                turn = math.ceil(depths[mine[0].modality] / len(mine))
                found |= {stage: max(turn, found.get(stage, 1)) for stage in mine}
    return found


def warm_up(graph: Graph, rank: int) -> int:
    """Return the most activations that ``rank`` holds under ``interleaved``: as many as fill the pipeline after it."""
    total = 0
    for mine in chunks(graph, rank):
        first, last = (graph.distance_to_end(stage) for stage in (mine[0], mine[-1]))
        total += per_instance(graph, mine[0], first + 1 if len(mine) == 1 else first + last + 1)
    return total
