"""A backward through a collective is no part of a graph, so a gradient of a gradient through it is refused by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.sharded.collectives import TensorGroup, reduce, reduce_scatter
from lightning_mm5d.sharded.torch_internals import ends_graph
from ranks import run_ranks


def _errors(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    group = TensorGroup(dist.group.WORLD)  # type: ignore[arg-type]
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: group.copied(x),
        lambda x: reduce(x, group),
        lambda x: group.gathered(x, -1, (4, 4)),
        lambda x: group.scattered(x, -1, (2, 2)),
        lambda x: reduce_scatter(x, -1, (2, 2), group),
    ]
    found = []
    for function in functions:
        x = torch.arange(4.0).requires_grad_()
        loss = function(x).pow(3).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        assert gradient.isfinite().all()
        try:
            (loss + gradient.sum()).backward()
        except RuntimeError as error:
            found.append(str(error))
    dist.destroy_process_group()
    return found


def test_a_penalty_on_gradients_through_a_collective_is_no_term_that_vanishes() -> None:
    for errors in run_ranks(2, _errors):
        assert len(errors) == 5
        assert all("differentiate twice" in error for error in errors)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @ends_graph
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2.0 * ctx.saved_tensors[0] * gradients[0]


def test_a_gradient_that_depends_on_what_the_forward_has_saved_is_no_constant() -> None:
    x = torch.arange(3.0).requires_grad_()
    (gradient,) = torch.autograd.grad(_Square.apply(x).sum(), x)
    assert gradient.tolist() == [0.0, 2.0, 4.0]
    (gradient,) = torch.autograd.grad(_Square.apply(x).sum(), x, create_graph=True)
    assert gradient.tolist() == [0.0, 2.0, 4.0]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (x.sum() + gradient.sum()).backward()
