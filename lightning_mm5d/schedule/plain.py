"""The schedules with full backwards and one chunk a rank: ``gpipe`` and ``1f1b``.

``gpipe`` runs backwards after the rank's last forward (Huang et al. 2019, arXiv:1811.06965). Its order is the simplest,
and a rank holds the activations of all microbatches at once.

``1f1b`` alternates. A stage starts no forward while as many of its microbatches are in flight as there are stages from
it to the end (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503). In a graph the longest path to the end counts,
so that encoders side by side fill the language model's pipeline together, as in Cornstarch (Jang et al. 2025,
arXiv:2503.11367).

Within this limit forwards come first. A rank that ran all backwards that have arrived would hold back the next forward,
for which all later ranks wait.
"""

from __future__ import annotations

import math

from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.greedy import Rules
from lightning_mm5d.schedule.stage_key import StageKey


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
    ranks = [{node.replica: node.rank for node in graph.instances(one)} for one in (stage, other)]
    return stage.modality != other.modality or ranks[0] != ranks[1]


def per_instance(graph: Graph, stage: StageKey, count: int) -> int:
    """Return how many microbatches each instance of ``stage`` has if each loss replica has ``count``; rounded up."""
    ends = [end for end in graph.stages if not graph.successors(end)]
    loss_replicas = max(len(graph.instances(end)) for end in ends)
    return math.ceil(count * loss_replicas / len(graph.instances(stage)))
