"""Compares functions of a sharded tensor with those of the full one.

Ranks 0-1 hold 3 and 2 of 5, ranks 0-2 hold 3, 0 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.tensor import Sharded, from_local
from ranks import run_ranks

LENGTHS = {2: (3, 2), 3: (3, 0, 2)}
SHAPES = {-1: (2, 4, 5), -2: (2, 5, 4), -3: (5, 2, 4)}
WORLDS = pytest.mark.parametrize("world", [2, 3])
Function = Callable[..., Any]


def start(world: int) -> TensorGroup:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    assert dist.get_world_size() == world
    return TensorGroup(dist.group.WORLD)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))) + 0.5


def make(dim: int, group: TensorGroup, seed: int = 0) -> tuple[Sharded, Tensor, Tensor]:
    """A sharded tensor, the leaf that is its local one, and the full one."""
    whole = random(*SHAPES[dim], seed=seed).requires_grad_()
    lengths = LENGTHS[group.size]
    local = group.local_of(whole.detach(), dim, lengths).clone().requires_grad_()
    return from_local(local, dim, lengths, group), local, whole


def close(found: Tensor, expected: Tensor | None) -> None:
    assert not isinstance(found, Sharded)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def compare(group: TensorGroup, dim: int, function: Function, stays: bool | None, *others: Tensor) -> None:
    """Call `function` on the sharded and on the full tensor (and `others`), and compare values and gradients."""
    x, local, whole = make(dim, group)
    theirs = [other.clone().requires_grad_(other.is_floating_point()) for other in others]
    ours = [other.clone().requires_grad_(other.is_floating_point()) for other in others]
    before = group.moved
    found = function(x * 1, *ours)
    expected = function(whole * 1, *theirs)
    if stays is not None:
        assert isinstance(found, Sharded) == stays, f"{function} stays sharded: {not stays}"
        assert (group.moved == before) == stays
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    value = found.full() if isinstance(found, Sharded) else found
    close(value, expected)
    if not expected.requires_grad:
        assert not found.requires_grad
        return
    weights = random(*expected.shape, seed=7).to(expected.dtype)
    (value * weights).sum().backward()
    (expected * weights).sum().backward()
    close(local.grad, group.local_of(whole.grad, dim, LENGTHS[group.size]))
    for mine, other in zip(ours, theirs, strict=True):
        if other.grad is not None:
            close(mine.grad, other.grad)


def each(rank: int, world: int, cases: list[tuple[int, Function, bool | None, list[Tensor]]]) -> None:
    group = start(world)
    for dim, function, stays, others in cases:
        compare(group, dim, function, stays, *others)


def run(world: int, *cases: tuple[int, Function, bool | None, list[Tensor]]) -> None:
    run_ranks(world, each, world, list(cases))
