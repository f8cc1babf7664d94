"""Which numbers of ranks form a grid, and what a grid refuses."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import path_of
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.grids.fields import grid_side
from lightning_mm5d.schedule.builders import check_fields


def checked(**fields: Any) -> None:
    check_fields({"modalities": {"language": Modality(**fields)}, "num_microbatches": 4})


@pytest.mark.parametrize(("mode", "size", "depth"), [("2d", 4, 1), ("2d", 9, 1), ("2.5d", 8, 2), ("3d", 27, 1)])
def test_squares_and_cubes_are_grids(mode: str, size: int, depth: int) -> None:
    checked(tp_mode=mode, tp_size=size, tp_depth=depth)
    assert grid_side(mode, size, depth) == {4: 2, 9: 3, 8: 2, 27: 3}[size]


def test_a_depth_of_one_is_a_square() -> None:
    checked(tp_mode="2.5d", tp_size=4)


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"tp_mode": "2d", "tp_size": 6}, "The nearest are 4 or 9"),
        ({"tp_mode": "2d", "tp_size": 2}, "The nearest are 4 or 9"),
        ({"tp_mode": "3d", "tp_size": 16}, "The nearest are 8 or 27"),
        ({"tp_mode": "2.5d", "tp_size": 16, "tp_depth": 3}, "The nearest are 12 or 27"),
        ({"tp_mode": "2.5d", "tp_size": 2, "tp_depth": 2}, "The nearest are 8 or 18"),
    ],
)
def test_other_sizes_are_refused_with_the_nearest(fields: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix) as caught:
        checked(**fields)
    assert "modalities.language.tp_size" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"cp_size": 2}, "cp_size"),
        ({"ep_size": 2}, "ep_size"),
        ({"compile": True}, "compile"),
        ({"communication_dtype": {"tensor_parallel": "bfloat16"}}, "communication_dtype"),
        ({"tp_depth": 2}, "tp_depth"),
        ({"tp_depth": 0}, "tp_depth"),
    ],
)
def test_what_does_not_go_with_a_grid_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"modalities.language.{path_of(name)}"):
        checked(tp_mode="2d", tp_size=4, **fields)


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"1d, 2d, 2\.5d, 3d"):
        checked(tp_mode="4d", tp_size=4)
