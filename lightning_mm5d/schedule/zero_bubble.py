"""``zero_bubble`` and ``zbv``: split backwards, so that weight gradients fill the bubbles.

Other stages wait for the input gradient only. A weight gradient runs where the rank has nothing else to do, or where it
may hold no more activations. On a chain with one stage a rank this is ZB-H1 (Qi et al. 2023, arXiv:2401.10241): no rank
holds more than the first one under ``1f1b``, and ranks idle for (P - 1)(f + i - w) where w is at most i, instead of
(P - 1)(f + i + w), with f, i and w of a forward, an input gradient and a weight gradient.

``zbv`` is the same on a graph whose chunks lie in a V: stage k of 2P on rank min(k, 2P - 1 - k) (Qi et al. 2024,
arXiv:2405.15362). The rank that starts the forward of a microbatch also ends it, which evens out activations. With
f = i = w of a chunk, ranks idle for (P - 1) f only, during the first forwards.

Stages that pass no gradient on and stages in which nothing is trained run full backwards.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.greedy import Rules
from lightning_mm5d.schedule.interleaved import chunks, warm_up
from lightning_mm5d.schedule.plain import in_flight_limits, per_instance

PATIENCE = 0.5
"""A weight gradient waits if a gradient arrives within this share of its duration."""
STRETCHES = ((1.2, 1.4), (1.4, 1.4))
"""Values of `Rules.stretch` that shortened the schedules of the most graphs, of the few that were tried."""


def zero_bubble(graph: Graph) -> list[Rules]:
    """Split backwards in several orders, and full backwards, all within `held_limits`."""
    plain = Rules(in_flight=in_flight_limits(graph), held=held_limits(graph))
    split = replace(plain, split=True, patience=PATIENCE)
    shorter, longer = STRETCHES
    return [
        *(replace(split, eager=eager, lazy=lazy) for lazy in (False, True) for eager in (True, False)),
        replace(split, eager=True, lazy=True, patience=0.0),
        replace(split, eager=True, lazy=True, patience=0.0, stretch=shorter),
        *(replace(split, eager=eager, stretch=longer) for eager in (True, False)),
        plain,
    ]


def held_limits(graph: Graph) -> dict[int, int]:
    """Return for each rank the most activations that it may hold.

    It is the depth of the pipeline times the loss replicas that the rank serves, as for the first stage under ``1f1b``;
    or `warm_up`, where that is more.
    """
    depth = 1 + max((graph.distance_to_end(stage) for stage in graph.stages), default=0)
    found = {}
    for rank in graph.ranks:
        firsts = [mine[0] for mine in chunks(graph, rank)]
        deep = max((per_instance(graph, stage, depth) for stage in firsts), default=0)
        found[rank] = max(deep, warm_up(graph, rank))
    return found
