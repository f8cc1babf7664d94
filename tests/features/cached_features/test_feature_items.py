"""Inputs are divided into items only where each item's rows of a result are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mm5d.features.cached_features.feature_items import DividedError, Items, items_of
from lightning_mm5d.stage.payload import Packer

IMAGES = torch.arange(1.0, 4 * 3 * 2 * 2 + 1).view(4, 3, 2, 2)


def divided(*arguments: Any) -> Items | None:
    packer = Packer()
    description = [packer.describe(argument) for argument in arguments]
    return items_of(description, packer.tensors)


def blank(images: Tensor, value: float = 0.0) -> Tensor:
    images = images.clone()
    images[1, 2] = value
    return images


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([IMAGES], Items(4)),
        ([IMAGES, torch.ones(4, 5, dtype=torch.bool)], Items(4)),
        ([IMAGES, torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]).bool()], None),
        ([IMAGES, torch.tensor([[2, 2], [2, 2], [2, 2], [2, 4]])], None),
        ([blank(IMAGES)], None),
        ([blank(IMAGES, -1.0)], None),
        ([IMAGES, torch.ones(4, 5)], Items(4)),
        ([IMAGES, torch.rand(4, 5)], Items(4)),
        ([IMAGES, torch.tensor([[1.0, 1], [1, 0], [1, 1], [1, 1]])], None),
        ([IMAGES, torch.tensor([[0.0], [-torch.inf], [0.0], [0.0]]).view(4, 1, 1, 1)], None),
        ([IMAGES, torch.tensor([[3.0, 7], [5, 7], [5, 7], [5, 7]])], None),
        ([IMAGES, torch.tensor([0.5, 1, 1, 1])], None),
        ([[*IMAGES]], None),
        ([[*IMAGES[:3]]], None),
        ([{"images": [{"pixels": IMAGES[0]}]}], None),
        ([IMAGES, [(2, 2)] * 4], None),
        ([IMAGES, {"sizes": ((2, 2), (2, 2), (2, 2), (2, 2))}], None),
        ([IMAGES, (2, 2), {"layer": -2}], Items(4)),
        ([torch.ones(12, 2), torch.tensor([[1, 2, 2], [1, 4, 2]])], Items(2, ((1, 2, 2), (1, 4, 2)))),
        ([torch.rand(12, 2), torch.tensor([[1, 2, 2], [1, 4, 2]])], Items(2, ((1, 2, 2), (1, 4, 2)))),
        ([torch.rand(12, 2), torch.tensor([[1, 2, 2], [1, 4, 2]]), torch.arange(12) < 9], None),
        ([torch.ones(12, 2), torch.tensor([[1, 2, 2], [1, 4, 2]]), [1, 2]], None),
    ],
)
def test_inputs_are_divided_only_where_all_of_them_tell_the_same_items(
    arguments: list[Any], expected: Items | None
) -> None:
    assert divided(*arguments) == expected


def test_rows_of_a_result_are_those_that_items_of_each_size_gave_alone() -> None:
    table = ((1, 2, 2), (1, 4, 2))
    assert [Items(3).bounds(3, (1, 1, 1), item) for item in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert [Items(2, table).bounds(14, (6, 8), item) for item in range(2)] == [(0, 6), (6, 14)]
    for items, rows, own in [(Items(3), 6, (2, 2, 2)), (Items(2), 3, (1, 1)), (Items(2, table), 14, (7, 8))]:
        with pytest.raises(DividedError):
            items.bounds(rows, own, 0)
