"""Pipelines that cut the same layers in different places have one list of stages."""

from __future__ import annotations

import random
from itertools import accumulate

from lightning_mm5d.layout.even_split import even_lengths
from lightning_mm5d.partition.unlike import common_stages


def test_layers_are_cut_wherever_a_pipeline_cuts_them() -> None:
    stages, ranks = common_stages([[3, 3, 3, 3], [4, 4, 4]])
    assert stages == [3, 1, 2, 2, 1, 3]
    assert ranks == ((0, 1, 1, 2, 2, 3), (0, 0, 1, 1, 2, 2))


def test_equal_pipelines_and_a_modality_without_layers_have_their_own_stages() -> None:
    assert common_stages([[2, 2], [2, 2]]) == ([2, 2], ((0, 1), (0, 1)))
    assert common_stages([[4], [1, 3]]) == ([1, 3], ((0, 0), (0, 1)))
    assert common_stages([[0], [0]]) == ([0], ((0,), (0,)))


def test_each_rank_runs_its_layers() -> None:
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randrange(1, 30)
        pipelines = [even_lengths(count, rng.randrange(1, count + 1)) for _ in range(rng.randrange(1, 4))]
        stages, ranks = common_stages(pipelines)
        assert list(accumulate(stages))[-1] == count
        for sizes, placed in zip(pipelines, ranks, strict=True):
            held = [0] * len(sizes)
            for rank, layers in zip(placed, stages, strict=True):
                held[rank] += layers
            assert held == sizes
            assert list(placed) == sorted(placed)
