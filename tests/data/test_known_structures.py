"""Batches of a structure that is known are cut without looking for packed rows, and as if these were looked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.microbatch import split
from lightning_mm5d.data.packed_images import PackedTokens


@pytest.mark.parametrize(
    "fields",
    [
        {"x": (4, 3), "labels": (4,), "mask": (4, 4, 2)},
        {"input_ids": (4, 6), "position_ids": (3, 4, 6)},
        {"input_ids": (4, 6), "position_ids": (4, 4, 6)},
        {"input_ids": (4, 6), "pixel_values": (4, 3, 2, 2)},
        {"images": (4, 3, 2, 2), "num_images": (4,)},
        {"x": (4, 3), "other": (5, 3)},
    ],
)
def test_batches_of_a_known_structure_are_cut_as_the_first(fields: dict[str, tuple[int, ...]]) -> None:
    known: Any = {}
    tokens = PackedTokens(image=1)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        batch = {name: torch.randint(0, 3, shape, generator=generator) for name, shape in fields.items()}
        if "num_images" in batch:
            batch["num_images"] = torch.tensor([2, 0, 1, 1]) if seed else torch.ones(4, dtype=torch.long)
        try:
            expected = split(batch, 2, image_tokens=tokens)
        except ConfigError:
            with pytest.raises(ConfigError):
                split(batch, 2, image_tokens=tokens, known=known)
            continue
        cut = split(batch, 2, image_tokens=tokens, known=known)
        assert [part.samples for part in cut] == [part.samples for part in expected]
        for part, other in zip(cut, expected, strict=True):
            assert part.batch.keys() == other.batch.keys()
            for name, value in other.batch.items():
                assert part.batch[name] is None if value is None else torch.equal(part.batch[name], value)


def test_a_known_structure_of_rows_alone_is_read_once() -> None:
    known: Any = {}
    for _ in range(2):
        split({"x": torch.zeros(5, 2), "labels": torch.zeros(5)}, 2, known=known)
        split({"x": torch.zeros(5, 2), "counts": torch.ones(5, dtype=torch.long)}, 2, known=known)
    assert known == {(("x", "labels"), 5, 2, 1): [0, 3, 5], (("x", "counts"), 5, 2, 1): None}
