"""The schedules with whole backwards and one chunk a rank: ``gpipe`` and ``1f1b``.

``gpipe`` holds back gradients until the rank has run all its forwards (Huang et al. 2019, arXiv:1811.06965):
activations of all microbatches at once, for the simplest order.

``1f1b`` runs gradients first, and holds back forwards of a stage that has as many microbatches in flight as there are
stages from it to the end (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503). In a graph the longest way to
the end counts, so that encoders side by side fill the language model's pipeline together, as in Cornstarch (Jang et
al. 2025, arXiv:2503.11367).
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
    """One forward, one backward, within `in_flight_limits`."""
    return [Rules(in_flight=in_flight_limits(graph))]


def in_flight_limits(graph: Graph) -> dict[str, int]:
    """For each stage that runs backwards, the most microbatches in flight per instance under ``1f1b``.

    A microbatch is in flight from the start of its forward to the end of its backward. The limit is the
    number of stages on the longest way to the end, times the loss replicas per instance, rounded up.
    """
    return {
        stage: per_instance(graph, stage, graph.distance_to_end(stage) + 1)
        for stage in graph.stages
        if graph.has_backward(stage)
    }


def per_instance(graph: Graph, stage: StageKey, count: int) -> int:
    """``count`` microbatches of each loss replica, as the number that each instance of ``stage`` has of them."""
    ends = [end for end in graph.stages if not graph.successors(end)]
    loss_modality = max(len(graph.instances(end)) for end in ends)
    return math.ceil(count * loss_modality / len(graph.instances(stage)))
