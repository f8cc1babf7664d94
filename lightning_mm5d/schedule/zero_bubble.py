"""``zero_bubble`` and ``zbv``: backwards in halves, so that weight gradients fill the bubbles.

Only the input-gradient half is waited for elsewhere. The weight-gradient half runs where nothing else is ready, or
where the rank may hold no more activations. On a chain with a stage a rank that is ZB-H1 (Qi et al. 2023,
arXiv:2401.10241): no rank holds more than the first one under ``1f1b``, and ranks idle for (P - 1)(f + i - w)
where w is at most i, instead of (P - 1)(f + i + w).

``zbv`` is the same on a graph whose chunks lie in a V: stage k of 2P on rank min(k, 2P - 1 - k) (Qi et al. 2024,
arXiv:2405.15362). The rank that ends the forward of a microbatch is the one that began it, so that activations even
out, and with f = i = w ranks idle for the (P - 1) f of the first forwards only, f that of a chunk.

Stages that pass no gradient on, and those of which nothing is trained, run their backwards whole.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.greedy import Rules
from lightning_mm5d.schedule.interleaved import chunks, warm_up
from lightning_mm5d.schedule.plain import in_flight_limits, per_instance

PATIENCE = 0.5
"""A weight gradient is not begun where a gradient arrives before half of it would be done."""
STRETCHES = ((1.2, 1.4), (1.4, 1.4))
"""Gradients taken to be longer than they are: of few rhythms, those that suited most graphs."""


def zero_bubble(graph: Graph) -> list[Rules]:
    """Split backwards under several rules of what comes first, or none split at all; all within `held_limits`."""
    plain = Rules(in_flight=in_flight_limits(graph), held=held_limits(graph))
    halves = replace(plain, split=True, patience=PATIENCE)
    shorter, longer = STRETCHES
    return [
        *(replace(halves, eager=eager, lazy=lazy) for lazy in (False, True) for eager in (True, False)),
        replace(halves, eager=True, lazy=True, patience=0.0),
        replace(halves, eager=True, lazy=True, patience=0.0, stretch=shorter),
        *(replace(halves, eager=eager, stretch=longer) for eager in (True, False)),
        plain,
    ]


def held_limits(graph: Graph) -> dict[int, int]:
    """For each rank the activations that it may hold.

    As many as the pipeline is deep, times the loss replicas that the rank serves, as the first stage does under
    ``1f1b``; or what fills the pipeline behind all chunks of the rank, where that is more.
    """
    depth = 1 + max((graph.distance_to_end(stage) for stage in graph.stages), default=0)
    found = {}
    for rank in graph.ranks:
        firsts = [mine[0] for mine in chunks(graph, rank)]
        deep = max((per_instance(graph, stage, depth) for stage in firsts), default=0)
        found[rank] = max(deep, warm_up(graph, rank))
    return found
