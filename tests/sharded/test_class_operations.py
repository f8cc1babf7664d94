"""Functions over the classes of sharded logits give the values and gradients of the full tensor and gather nothing.

Layout of all tests with processes: ranks 0-1 hold 3 and 2 of 5 classes, or ranks 0-2 hold 3, 0 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mm5d import ConfigError, vocabulary_shard
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.tensor import Sharded
from ranks import run_ranks
from sharded.tensor_cases import LENGTHS, SHAPES, close, make, random, start

LABELS = torch.tensor([[0, 4, 2, 3], [1, 1, 4, 0]])
TEACHER = torch.rand(SHAPES[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(3)).softmax(-1)


def log_likelihood(x: Tensor) -> Tensor:
    """As preference losses take it."""
    return x.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)).squeeze(-1)


SCALARS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1) * 2 + x.sum() + x.sum(dim=(0, -1), keepdim=True).mean(),
    "mean": lambda x: torch.mean(x, 2, True).exp() + x.mean(),
    "count": lambda x: (x > 1).sum(-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1) ** 2 + torch.logsumexp(x, dim=2, keepdim=True).mean(),
    "logsumexp of minus infinity": lambda x: torch.logsumexp(torch.where(x > x.detach() - 1, -torch.inf, x), -1),
    "log-likelihood": log_likelihood,
    "gather": lambda x: x.gather(dim=2, index=LABELS.unsqueeze(-1).expand(-1, -1, 3)),
    "distillation": lambda x: (F.softmax(x, dim=-1) * (F.log_softmax(x, dim=-1) - x)).sum(-1),
    "low precision": lambda x: F.softmax(x.bfloat16(), -1, dtype=torch.float32).pow(2).sum(-1),
}


def compared(rank: int, world: int) -> None:
    group, asked = start(world), 0
    for name, function in SCALARS.items():
        x, local, whole = make(-1, group)
        gathers = AssertionError(f"{name} gathers logits") if world == 2 else None
        with patch.object(TensorGroup, "gather", side_effect=gathers) if gathers else nullcontext():
            found = function(x * 1)
        expected = function(whole * 1)
        asked += 1
        assert found.dtype == expected.dtype, name
        torch.testing.assert_close(found, expected, rtol=1e-6 if name == "low precision" else 1e-12, atol=1e-12)
        if not expected.requires_grad or name.endswith("infinity"):
            continue
        weights = random(*expected.shape, seed=7).to(expected.dtype)
        (found * weights).sum().backward()
        (expected * weights).sum().backward()
        own = group.local_of(whole.grad, -1, LENGTHS[world])
        off = 1e-3 if name == "low precision" else 1e-12
        torch.testing.assert_close(local.grad, own, rtol=off, atol=off)
    assert asked == len(SCALARS)


@pytest.mark.parametrize("world", [2, 3])
def test_functions_over_classes_equal_those_of_the_full_tensor(world: int) -> None:
    run_ranks(world, compared, world)


def refused(rank: int, world: int) -> None:
    x, _, whole = make(-1, start(world))
    for tensor in (x, whole):
        with pytest.raises(RuntimeError, match="out of bounds"):
            tensor.gather(-1, torch.full((2, 4, 1), 5))
    close(x.sum(1).full(), whole.sum(1))
    assert isinstance(x.softmax(-1), Sharded)


def test_an_index_of_no_class_is_refused_as_by_torch() -> None:
    run_ranks(2, refused, 2)


def own_loss(logits: Tensor, scale: Tensor) -> Tensor:
    """A cross entropy with a trained temperature and a penalty, over the shard."""
    shard = vocabulary_shard(logits)
    local = shard.logits * shard.copy(scale)
    top = shard.max(local.amax(-1, keepdim=True))
    normaliser = shard.sum((local - top).exp().sum(-1)).log() + top.squeeze(-1)
    held = (shard.start <= LABELS) & (shard.stop > LABELS)
    places = (LABELS - shard.start).clamp(0, shard.stop - shard.start - 1)
    label = shard.sum(torch.where(held, local.gather(-1, places.unsqueeze(-1)).squeeze(-1), 0.0))
    assert shard.size == 5
    return (normaliser - label).mean() + 1e-2 * (normaliser**2).mean()


def trained(rank: int) -> None:
    group = start(2)
    x, local, whole = make(-1, group)
    ours, theirs = (torch.tensor(1.3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found, expected = own_loss(x * 1, ours), own_loss(whole * 1, theirs)
    assert vocabulary_shard(x).logits.shape == local.shape
    close(found, expected)
    scaled = whole * theirs
    penalty = 1e-2 * scaled.logsumexp(-1).pow(2).mean()
    close(found, F.cross_entropy(scaled.flatten(0, 1), LABELS.flatten()) + penalty)
    found.backward()
    expected.backward()
    close(local.grad, group.local_of(whole.grad, -1, LENGTHS[2]))
    close(ours.grad, theirs.grad)


def test_a_loss_over_the_shard_is_that_of_the_full_logits() -> None:
    run_ranks(2, trained)


def test_what_is_no_tensor_has_no_shard() -> None:
    not_logits: Any = {"logits": TEACHER}
    with pytest.raises(ConfigError, match="vocabulary_shard: got 'dict'"):
        vocabulary_shard(not_logits)
