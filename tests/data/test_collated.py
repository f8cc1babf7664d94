"""A batch is split as its collate function makes it of samples, also where sizes equal their number by chance."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_mm5d.data.microbatch import batch_samples, split

FIELDS: dict[str, Callable[[int, int], Any]] = {
    "vector": lambda size, index: torch.full((size,), float(index)),
    "image": lambda size, index: torch.full((3, size, 5), float(index)),
    "points": lambda size, index: torch.full((size, 2), index),
    "number": lambda _, index: index,
    "text": lambda _, index: f"text {index}",
    "texts": lambda size, index: [f"{place} of {index}" for place in range(size)],
    "numbers": lambda size, index: [index + place for place in range(size)],
    "pair": lambda size, index: (torch.full((size,), float(index)), index),
    "images": lambda size, index: [torch.full((size, 3), float(index + place)) for place in range(2)],
    "nested": lambda size, index: {"points": torch.full((size, 2), index), "name": f"{index}"},
}
EVIDENT: dict[str, Callable[[int, int], Any]] = {
    "unlike sizes": lambda _, index: torch.full((1 + index % 3, 2), float(index)),
    "objects": lambda _, index: {"boxes": torch.full((1 + index % 3, 4), float(index)), "label": index},
    **{name: FIELDS[name] for name in ("number", "numbers", "pair", "nested")},
}
"""What a list of has no other meaning than one for each sample."""


def stacked(values: list[Any]) -> Any:
    is_stack = isinstance(values[0], Tensor) and len({value.shape for value in values}) == 1
    return torch.stack(values) if is_stack else [*values]


COLLATES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple of tuples": lambda samples: tuple(zip(*samples, strict=True)),
    "dict of lists": lambda samples: {name: [*values] for name, values in enumerate(zip(*samples, strict=True))},
    "what can be is stacked": lambda samples: tuple(stacked([*values]) for values in zip(*samples, strict=True)),
}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and found.shape == expected.shape and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def check(collate: Callable[[list[Any]], Any], samples: list[Any], parts: int) -> None:
    batch, size = collate(samples), len(samples) // parts
    assert batch_samples(batch) == len(samples)
    for index, part in enumerate(split(batch, parts)):
        assert same(part.batch, collate(samples[index * size : (index + 1) * size]))


@pytest.mark.parametrize("collate", [name for name in COLLATES if "stacked" not in name])
def test_lists_are_split_by_samples_where_one_of_them_can_list_nothing_else(collate: str) -> None:
    for field, evident, count in product(FIELDS.values(), EVIDENT.values(), (2, 4, 6)):
        for size in (2, count):
            samples = [(field(size, index), evident(size, index)) for index in range(count)]
            check(COLLATES[collate], samples, count // 2 if count > 2 else 2)


def test_lists_beside_tensors_are_split_by_samples() -> None:
    collate = COLLATES["what can be is stacked"]
    for field, evident, count in product(FIELDS.values(), EVIDENT.values(), (4, 6)):
        for size in (2, count):
            samples = [(torch.ones(1), field(size, index), evident(size, index)) for index in range(count)]
            batch, half = collate(samples), count // 2
            for index, part in enumerate(split(batch, 2)):
                own = slice(index * half, (index + 1) * half)
                assert all(same([*part.batch[at]], [*batch[at][own]]) for at in range(3))


def test_what_default_collate_makes_is_split_by_samples() -> None:
    names = [name for name in FIELDS if name not in ("pair", "nested")]
    for first, second, count in product(names, [name for name in names if name != "texts"], (2, 4, 6)):
        for size in (2, count):
            samples = [(FIELDS[first](size, index), FIELDS[second](size, index)) for index in range(count)]
            batch, half = default_collate(samples), count // 2
            for index, part in enumerate(split(batch, 2)):
                assert same(part.batch, default_collate(samples[index * half : (index + 1) * half]))


def seen(count: int) -> dict[str, torch.Tensor]:
    return {"boxes": torch.rand(count, 4), "labels": torch.arange(count)}


@pytest.mark.parametrize("counts", [(2, 2), (1, 1), (3, 3), (2, 1), (4, 2, 1, 3), (4, 4, 4, 4)], ids=str)
def test_images_beside_dicts_of_what_is_seen_in_each_are_split_by_samples(counts: tuple[int, ...]) -> None:
    images = [torch.rand(3, 4 + index, 5) for index in range(len(counts))]
    targets, same = [seen(count) for count in counts], torch.rand(len(counts), 3, 4, 5)
    captions = [f"caption {index}" for index in range(len(counts))]
    batches: list[Any] = [(images, targets), (tuple(images), tuple(targets)), (same, targets), (images, captions)]
    batches += [
        {"images": images, "targets": targets},
        {"images": same, "targets": targets},
        (images, targets, captions),
    ]
    for batch in batches:
        assert batch_samples(batch) == len(counts)
        fields = list(batch.values() if isinstance(batch, dict) else batch)
        for index, part in enumerate(split(batch, len(counts))):
            found = list(part.batch.values() if isinstance(part.batch, dict) else part.batch)
            assert len(found) == len(fields)
            for field, rows in zip(fields, found, strict=True):
                assert len(rows) == 1
                assert rows[0] is field[index] or torch.equal(rows[0], field[index])


@pytest.mark.parametrize("samples", [2, 4, 6])
def test_texts_are_split_by_samples_where_there_are_by_chance_as_many_fields(samples: int) -> None:
    pairs = [f"question {index}" for index in range(samples)], [f"answer {index}" for index in range(samples)]
    choices = [{"x": torch.tensor(index), "choices": [f"{index}{one}" for one in "abcd"]} for index in range(samples)]
    collated = default_collate(choices)
    first, second = split(pairs, 2)
    assert (first.batch[1], second.batch[1]) == (pairs[1][: samples // 2], pairs[1][samples // 2 :])
    for batch in (
        default_collate(list(zip(*pairs, strict=True))),
        collated["choices"],
        (collated["x"], collated["choices"]),
    ):
        for part in split(batch, 2):
            texts = part.batch[1] if isinstance(batch, tuple) else part.batch
            assert {len(one) for one in texts} == {samples // 2}


def test_a_list_of_two_samples_of_two_parts_each_is_split_by_samples() -> None:
    batch = [(torch.rand(3, 4, 5), seen(2)) for _ in range(2)]
    assert [part.batch[0][0] is one[0] for part, one in zip(split(batch, 2), batch, strict=True)] == [True, True]
