"""Digests are equal for equal samples, and name the field that differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mm5d.features.sample_proof import digests


@dataclass
class Pair:
    image: Any
    label: Any


class Graph:
    """A batch of a class of its own, with tensors inside."""

    def __init__(self, nodes: Any) -> None:
        self.nodes, self.key = nodes, object()


def _batch(kind: str, value: float) -> Any:
    large = torch.arange(3 * 2**18).reshape(3, -1).to(torch.float32)
    large[2, 1:] += value
    return {
        "floats": torch.tensor([1.0, value]),
        "bfloat16": torch.tensor([[value]], dtype=torch.bfloat16),
        "flags": torch.tensor([True, bool(value)]),
        "scalar": torch.tensor(value),
        "complex": torch.tensor([1j * value]).conj(),
        "large": large,
        "not contiguous": large.T,
        "strings": ["a", f"{value}"],
        "number": value,
        "nothing": None if value else 0,
        "bytes": bytes([int(value)]),
        "set": {"a", "b", f"{value}"},
        "array": np.array([value, 2.0]),
        "array of rows": np.arange(2**18).reshape(2, -1) * value,
        "ragged": [torch.zeros(2), torch.full((3,), value)],
        "dataclass": Pair(torch.zeros(1), torch.tensor([value])),
        "tuple": (torch.zeros(1), {"inner": [torch.tensor([value])]}),
        "object": Graph(torch.tensor([value])),
        "shape": torch.zeros(int(value) + 1),
        "dtype": torch.zeros(2, dtype=torch.float64 if value else torch.float32),
        "empty": torch.zeros(0, int(value)),
        "elsewhere": torch.zeros(int(value) + 1, device="meta"),
    }[kind]


KINDS = (
    *("floats", "bfloat16", "flags", "scalar", "complex", "large", "array", "strings", "number", "nothing", "bytes"),
    *("set", "ragged", "dataclass", "tuple", "object", "shape", "dtype", "empty", "elsewhere"),
)


@pytest.mark.parametrize("kind", [*KINDS, "not contiguous", "array of rows"])
def test_a_digest_changes_with_the_value_and_with_nothing_else(kind: str) -> None:
    assert digests({"x": _batch(kind, 0.0)}) == digests({"x": _batch(kind, 0.0)})
    changed, first = digests({"x": _batch(kind, 1.0)}), digests({"x": _batch(kind, 0.0)})
    assert changed != first
    assert all(path.startswith("batch['x']") for path in changed)


def test_fields_are_named_by_their_paths_and_shapes() -> None:
    found = digests({"images": [torch.zeros(2, 3)], "pair": Pair(torch.zeros(1, dtype=torch.int64), "text")})
    assert {path: form for path, (_, form) in found.items()} == {
        "batch['images'][0]": "float32[2, 3]",
        "batch['pair']['image']": "int64[1]",
        "batch['pair']['label']": "str",
    }


def test_what_has_no_value_of_its_own_is_left_out() -> None:
    assert digests({"x": object(), "y": len}) == {}
