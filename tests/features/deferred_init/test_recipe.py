"""Recipes are those of the operations that a traced tensor went through, and read what a region needs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_mm5d.features.deferred_init.pretrained import Stored, TracedTensor
from lightning_mm5d.storage.tensor_file import TensorFile

SHAPE = (4, 6, 2)
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nothing": lambda a, b: a[...],
    "cast": lambda a, b: a.to(device="cpu", dtype=torch.bfloat16),
    "chunk": lambda a, b: torch.chunk(a, 2, dim=0)[1].contiguous(),
    "split": lambda a, b: torch.split(a, [1, 2, 3], dim=1)[2],
    "slice": lambda a, b: a[:, -4:-1],
    "every other row": lambda a, b: a[::2],
    "concatenate": lambda a, b: torch.cat([a, b, a], dim=1),
    "concatenate other dtypes": lambda a, b: torch.cat([a, b.half()], dim=0),
    "stack": lambda a, b: torch.stack([a, b], dim=1),
    "unbind": lambda a, b: torch.unbind(a, dim=1)[3],
    "pick": lambda a, b: a[2],
    "transpose": lambda a, b: torch.transpose(a, 0, 2).contiguous(),
    "permute": lambda a, b: a.permute(2, 0, 1),
    "flatten": lambda a, b: a.reshape(a.shape[0], -1),
    "unflatten": lambda a, b: a.view(2, 2, 6, 2),
    "squeeze": lambda a, b: torch.chunk(a, 4, dim=0)[1].squeeze(0),
    "unsqueeze": lambda a, b: a.unsqueeze(1),
    "interleave": lambda a, b: a.reshape(4, 3, 2, 2).transpose(1, 2).reshape(4, 6, 2),
    "experts": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1).to(torch.float16),
    "arithmetic": lambda a, b: (a + b) * 2,
    "arithmetic in half of it": lambda a, b: torch.cat([a - 1, b], dim=0)[1:5],
}


@pytest.fixture
def file(tmp_path: Path) -> TensorFile:
    tensors = {"a": torch.arange(48.0).view(SHAPE), "b": -torch.arange(48.0).view(SHAPE), "scalar": torch.tensor(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    return TensorFile(tmp_path / "model.safetensors")


def traced(file: TensorFile, name: str) -> TracedTensor:
    return TracedTensor(Stored(file.shape(name), file.dtype(name), file, name))


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_region_of_a_traced_operation_reads_its_values(
    file: TensorFile, operation: Callable[[Tensor, Tensor], Tensor]
) -> None:
    expected = operation(file.read("a"), file.read("b"))
    made = operation(traced(file, "a"), traced(file, "b"))
    assert isinstance(made, TracedTensor)
    assert made.shape == expected.shape
    assert made.dtype == expected.dtype
    recipe = pickle.loads(pickle.dumps(made.recipe))
    assert torch.equal(recipe.read(), expected)
    for region in product(*([(0, size), (1, size), (0, size - 1), (1, 1)] for size in expected.shape)):
        read = recipe.read(region)
        assert read.is_contiguous()
        assert torch.equal(read, expected[tuple(slice(*bounds) for bounds in region)])


def test_a_scalar_is_read(file: TensorFile) -> None:
    assert traced(file, "scalar").to(torch.float64).recipe.read([]) == 7.0  # type: ignore[attr-defined]


def test_only_the_sources_of_a_region_are_read(file: TensorFile) -> None:
    experts = torch.cat([torch.stack([traced(file, "a"), traced(file, "b")]), torch.stack([traced(file, "b")] * 2)], 1)
    before = file.bytes_read
    experts.recipe.read([(1, 2), (4, 8), (0, 6), (0, 2)])  # type: ignore[attr-defined]
    assert file.bytes_read - before == 48 * 4


def test_writing_into_a_tensor_in_a_file_is_refused(file: TensorFile) -> None:
    with pytest.raises(NotImplementedError, match="writes into a weight that has not been read"):
        traced(file, "a").mul_(2)


def test_asking_for_a_value_of_a_tensor_in_a_file_is_refused(file: TensorFile) -> None:
    with pytest.raises(NotImplementedError, match="asks for the value of a weight"):
        torch.equal(traced(file, "a"), traced(file, "b"))
