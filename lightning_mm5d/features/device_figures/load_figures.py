"""Figures of the rows that experts have had in a step, of all layers of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_mm5d.expert_parallel.expert_layer import Load


class LoadFigures(NamedTuple):
    """Of all layers with experts on one rank, in one step; all are 0 where no tokens travelled.

    Attributes:
        expert_tokens_mean: rows of an expert.
        expert_tokens_max_over_mean: rows of the expert that had most, over the mean of its layer; of the layer where it
            is largest.
        rank_tokens_mean: rows of the experts of a rank, in one layer.
        rank_tokens_max_over_mean: of ranks, as of experts.
    """

    expert_tokens_mean: float = 0.0
    expert_tokens_max_over_mean: float = 0.0
    rank_tokens_mean: float = 0.0
    rank_tokens_max_over_mean: float = 0.0

    @classmethod
    def of(cls, loads: Iterable[Load]) -> LoadFigures:
        """The figures of some layers."""
        used = [load for load in loads if sum(load.by_expert)]
        if not used:
            return cls()
        experts, ranks = [load.by_expert for load in used], [load.by_rank for load in used]
        return cls(_mean(experts), _worst(experts), _mean(ranks), _worst(ranks))


def _mean(layers: Sequence[Sequence[int]]) -> float:
    return sum(map(sum, layers)) / sum(map(len, layers))


def _worst(layers: Sequence[Sequence[int]]) -> float:
    return max(max(layer) * len(layer) / sum(layer) for layer in layers)
