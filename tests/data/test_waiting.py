"""A tensor that waits in host memory is right wherever it is read, and is not read by what only asks for its form."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mm5d.data.lazy import Waiting
from lightning_mm5d.data.microbatch import Microbatch, split

CPU = torch.device("cpu")


def waiting(moves: list[int]) -> tuple[Waiting, Tensor]:
    host = torch.arange(24.0).view(4, 6)
    real = host.clone()  # what a copy on a device is

    def move() -> Tensor:
        moves.append(1)
        return real

    return Waiting(host, CPU, move), host


def dealt(x: Tensor) -> list[Microbatch]:
    return split({"x": x, "labels": torch.ones(4)}, 2, dealer=lambda rows, sizes: [[0, 2], [1, 3]])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


ASKING: dict[str, Callable[[Any], Any]] = {
    "form": lambda x: (x.shape, x.dtype, x.device, x.ndim, x.dim(), len(x), x.size(0), x.numel(), x.requires_grad),
    "none": lambda x: x is None,
    "versions": lambda x: (x._version, x.is_inference()),
    "where it is": lambda x: x.to("cpu") is x and x.to(CPU, non_blocking=True) is x and x.to(device=CPU) is x,
    "slices": lambda x: x[1:3][:, None, 2:4].shape,
    "views": lambda x: [
        y.shape for y in (x.flatten(), x.view(2, 2, 6), torch.reshape(x, (-1, 2)), x.permute(1, 0), x[None])
    ],
    "microbatches": lambda x: [part.batch["x"].shape for part in split({"x": x, "labels": torch.ones(4)}, 2)],
    "dealt microbatches": lambda x: [part.batch["x"].shape for part in dealt(x)],
}
READING: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: x + 1,
    "a slice": lambda x: x[1:3] * 2,
    "a view": lambda x: x.transpose(0, 1).unsqueeze(0) * 2,
    "another dtype of its bytes": lambda x: x.view(torch.int32),
    "a number": lambda x: float(x[0, 1]),
    "a list": lambda x: x.tolist(),
    "numpy": lambda x: np.asarray(x),
    "a dealt microbatch": lambda x: dealt(x)[1].batch["x"] * 1,
    "an index": lambda x: x[torch.tensor([0, 2])],
    "a mask": lambda x: x[x > 3],
    "joining": lambda x: torch.cat([x, x]),
    "functions": lambda x: F.linear(x, torch.ones(2, 6)),
    "a dtype": lambda x: x.to(torch.float64),
    "a like one": lambda x: torch.zeros_like(x),
    "an autograd function": Doubled.apply,
    "iteration": lambda x: [*x],
    "a copy": copy.deepcopy,
    "a pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "vmap": torch.vmap(lambda x: x * 2),
    "comparison": lambda x: bool((x == x).all()),
}


@pytest.mark.parametrize("how", ASKING)
def test_asking_for_its_form_moves_nothing(how: str) -> None:
    moves: list[int] = []
    tensor, host = waiting(moves)
    assert ASKING[how](tensor) == ASKING[how](host)
    assert not moves


@pytest.mark.parametrize("how", READING)
def test_reading_it_gives_what_the_tensor_gives(how: str) -> None:
    moves: list[int] = []
    tensor, host = waiting(moves)
    got, expected = READING[how](tensor), READING[how](host)
    assert type(got) is type(expected)
    assert str(got) == str(expected)
    assert moves == [1]
    READING[how](tensor)
    assert moves == [1], "it moves once"


def test_writes_to_a_slice_are_seen_in_the_whole() -> None:
    tensor, _ = waiting([])
    part = tensor[1:3]
    tensor.view(2, 12)[0, 0] = 0
    part.add_(100)
    tensor[0, 0] = 7
    assert float(tensor.sum()) == 276 + 1200 + 7
    assert float(tensor[:2][0, 0]) == 7
