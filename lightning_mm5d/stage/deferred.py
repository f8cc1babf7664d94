"""Puts off the weight gradients of linear layers, so that a backward can pass gradients on first.

A schedule that runs backwards in halves needs a first half that computes input gradients only, and a second one that
nobody waits for. Cutting the autograd graph in two would keep all of it until the second half. So linear layers, whose
weight gradients are nearly all of that half's work, compute their input gradient alone in the first half and keep what
the weight gradient takes: their input and the gradient of their output. Everything else is freed by the first half, as
by any backward (as in the `WeightGradStore` of Qi et al. 2023, arXiv:2401.10241).

Parameters of other modules (norms, embeddings, convolutions, experts in one tensor) get their gradients in the first
half: right, but not put off. It refuses a second differentiation of the layers that it stands in for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D  # the projections of GPT-2 and its kin


class Deferred:
    """The weight gradients of one microbatch in one stage that are still to be computed."""

    def __init__(self) -> None:
        self._due: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def add(self, weight: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Note that ``left.T @ right`` is part of the gradient of `weight`; both have a row per token."""
        self._due.append((weight, left, right))

    def compute(self) -> None:
        """Add all that is due to the gradients, as a backward would: hooks on parameters run."""
        totals: dict[nn.Parameter, Tensor] = {}
        while self._due:
            weight, left, right = self._due.pop(0)
            gradient = (left.t() @ right).to(weight.dtype)
            totals[weight] = totals[weight] + gradient if weight in totals else gradient
        if totals:
            torch.autograd.backward(list(totals), list(totals.values()))


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias``, or ``x @ weight + bias``, that leaves the weight gradient to `Deferred`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: nn.Module, due: Deferred, is_conv: bool
    ) -> Tensor:
        # the weight comes detached: were it an input, hooks on it would be told of a gradient of None
        ctx.save_for_backward(x, weight)
        ctx.module, ctx.due, ctx.is_conv = module, due, is_conv
        return F.linear(x, weight.t() if is_conv else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        inputs = x.reshape(-1, x.shape[-1]).to(gradient.dtype)  # autocast ran the forward in the gradient's dtype
        ctx.due.add(ctx.module.weight, *((inputs, rows) if ctx.is_conv else (rows, inputs)))
        wants_input, _, wants_bias, *_ = ctx.needs_input_grad
        weight = weight.to(gradient.dtype)
        below = gradient.matmul(weight.t() if ctx.is_conv else weight) if wants_input else None
        return below, None, rows.sum(0) if wants_bias else None, None, None, None


def is_linear(module: nn.Module) -> bool:
    """Whether `module` computes what `deferred_linear` computes, and nothing has replaced its forward."""
    if "forward" in vars(module):
        return False
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def defers(module: nn.Module, x: Tensor) -> bool:
    """Whether a linear layer puts its weight gradient off.

    Not where its weight is frozen or computed from other parameters, nor where no gradient goes on to its input `x`.
    """
    weight = module.weight
    return isinstance(weight, nn.Parameter) and weight.requires_grad and x.requires_grad and torch.is_grad_enabled()


def deferred_linear(module: nn.Module, x: Tensor, due: Deferred) -> Tensor:
    """Return what the linear layer `module` returns for `x` ``[..., in]``: ``[..., out]``; its weight goes to `due`."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, nn.Parameter)
    return _Linear.apply(x, weight.detach(), bias, module, due, type(module).forward is Conv1D.forward)
