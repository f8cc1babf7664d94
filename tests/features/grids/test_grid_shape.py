"""Blocks of a grid: they cover a tensor, each part as often as the mode says, for sizes that do not divide too."""

from __future__ import annotations

import pytest
import torch

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.grids.block import AXES, GridShape
from lightning_mm5d.layout.layout import even_ranges
from lightning_mm5d.sharded.shards import Shard

SHAPES = {
    "2d": GridShape("2d", 1, 2),
    "2d, 3 x 3": GridShape("2d", 1, 3),
    "2.5d": GridShape("2.5d", 2, 2),
    "3d": GridShape("3d", 2, 2),
}


@pytest.mark.parametrize("mode", SHAPES)
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("is_conv", [False, True])
def test_blocks_cover_a_weight_once_for_each_layer_of_the_depth(mode: str, kind: str, is_conv: bool) -> None:
    shape = SHAPES[mode]
    dim = int((kind == "row") != is_conv)
    units = Shard(dim, 11, tuple((held,) for held in even_ranges(11, shape.side)))
    size = [7, 7]
    size[dim] = 11
    whole = torch.arange(77).view(size)
    shard = shape.weight(kind, units, 1 - dim, 7)  # type: ignore[arg-type]
    blocks = [shard.cut(whole, index) for index in range(shape.size)]
    assert torch.equal(shard.merge(blocks), whole)
    assert [tuple(block.shape) for block in blocks] == [shard.local_shape(size, index) for index in range(shape.size)]
    copies = 2 if mode == "2.5d" else 1
    assert sum(block.numel() for block in blocks) == copies * whole.numel()
    for index in range(shape.size):
        assert {len(segment.sharers) for segment in shard.segments(index)} <= {copies}
    distinct = torch.cat([blocks[index].flatten() for index in shard.distinct])
    assert sorted(distinct.tolist()) == list(range(77))


@pytest.mark.parametrize("mode", SHAPES)
@pytest.mark.parametrize("side", ["outside", "inside"])
@pytest.mark.parametrize("total", [0, 1, 5, 16])
def test_rows_and_columns_cover_a_hidden_state_once(mode: str, side: str, total: int) -> None:
    shape = SHAPES[mode]
    seen = torch.zeros(total, shape.side, dtype=torch.int)
    for index in range(shape.size):
        start, stop = shape.rows(side, index, total)  # type: ignore[arg-type]
        seen[start:stop, shape.columns(side, index)] += 1  # type: ignore[arg-type]
    assert bool((seen == 1).all())


@pytest.mark.parametrize("mode", SHAPES)
def test_lines_cover_the_grid_along_every_axis(mode: str) -> None:
    shape = SHAPES[mode]
    for axis in AXES:
        lines = shape.lines(axis)
        assert sorted(index for line in lines for index in line) == list(range(shape.size))
        for line in lines:
            assert [getattr(shape.places[index], axis) for index in line] == list(range(len(line)))
    assert [shape.index(place) for place in shape.places] == list(range(shape.size))


def test_a_scale_is_held_by_all_ranks_of_its_columns() -> None:
    shape = SHAPES["3d"]
    shard = shape.vector("outside", shape.even(5))
    assert shard.lengths == (3, 3, 2, 2, 3, 3, 2, 2)
    assert shard.segments(0)[0].sharers == (0, 1, 4, 5)


def test_one_rank_or_one_dim_is_no_grid() -> None:
    assert GridShape.of(Modality(tp_size=4)) is None
    assert GridShape.of(Modality(tensor={"tp_mode": "2d"})) is None
    assert GridShape.of(Modality(tp_size=27, tensor={"tp_mode": "3d"})) == GridShape("3d", 3, 3)
