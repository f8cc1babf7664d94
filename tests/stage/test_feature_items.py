"""Inputs are divided into items only where each item's rows of a result are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mm5d.stage.feature_items import DividedError, Items, items_of
from lightning_mm5d.stage.payload import Packer

IMAGES = torch.arange(1.0, 4 * 3 * 2 * 2 + 1).view(4, 3, 2, 2)


def divided(*arguments: Any) -> Items | None:
    packer = Packer()
    description = [packer.describe(argument) for argument in arguments]
    return items_of(description, packer.tensors)


def blank(images: Tensor) -> Tensor:
    images = images.clone()
    images[1, 2] = 0.0
    return images


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([IMAGES], Items(4)),
        ([IMAGES, torch.ones(4, 5, dtype=torch.bool)], Items(4)),
        ([IMAGES, torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]).bool()], None),
        ([IMAGES, torch.tensor([[2, 2], [2, 2], [2, 2], [2, 4]])], None),
        ([blank(IMAGES)], None),
        ([[*IMAGES]], None),
        ([[*IMAGES[:3]]], None),
        ([{"images": [{"pixels": IMAGES[0]}]}], None),
        ([IMAGES, [(2, 2)] * 4], None),
        ([IMAGES, {"sizes": ((2, 2), (2, 2), (2, 2), (2, 2))}], None),
        ([IMAGES, (2, 2), {"layer": -2}], Items(4)),
        ([torch.ones(12, 2), torch.tensor([[1, 2, 2], [1, 4, 2]])], Items(2, (4, 8))),
        ([torch.ones(12, 2), torch.tensor([[1, 2, 2], [1, 4, 2]]), [1, 2]], None),
    ],
)
def test_inputs_are_divided_only_where_all_of_them_tell_the_same_items(
    arguments: list[Any], expected: Items | None
) -> None:
    assert divided(*arguments) == expected


def test_rows_of_a_result_are_in_proportion_to_what_one_item_gave() -> None:
    assert [Items(3).bounds(6, (2, 1), item) for item in range(3)] == [(0, 2), (2, 4), (4, 6)]
    assert Items(2, (4, 8)).bounds(3, (2, 8), 1) == (1, 3)
    assert Items(2, (4, 8)).bounds(2, (1, 8), 1) == (1, 2)  # one row for each item
    for items, rows, alone in [(Items(2), 6, (2, 1)), (Items(2, (4, 8)), 6, (3, 8)), (Items(2, (3, 9)), 2, (2, 12))]:
        with pytest.raises(DividedError):
            items.bounds(rows, alone, 0)
