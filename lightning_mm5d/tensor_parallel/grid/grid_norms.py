"""Norms whose input is split over columns: which norms are known, and how their ranks share a mean.

A norm counts as known where its own forward gives what the formula gives of random numbers; so it does not matter what
its class is called, or whether its scale is kept less one. Any other module is computed on the full width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.sharded.collectives import TensorGroup, differentiable

Sums = Callable[[Tensor], Tensor]
_EPSILONS = ("eps", "variance_epsilon", "epsilon")


@dataclass(frozen=True)
class Norm:
    """How a norm computes ``(x - mean) * rsqrt(variance + epsilon) * (weight + offset) + bias`` along the last dim.

    Attributes:
        width: of the full input.
        epsilon: beside the variance.
        centers: whether it subtracts the mean.
        offset: of its weight.
        narrows: whether it computes float64 in float32.
    """

    width: int
    epsilon: float
    centers: bool
    offset: float = 0.0
    narrows: bool = False

    def statistics(self, x: Tensor, sums: Sums) -> tuple[Tensor | None, Tensor]:
        """Return the mean, where it is subtracted, and ``rsqrt(variance + epsilon)`` of each row of `x`.

        Args:
            x: some columns, in the dtype of the computation.
            sums: adds up over ranks what is summed over their columns.
        """
        mean = None
        if self.centers:
            mean = sums(x.sum(-1, keepdim=True)) / self.width
            x = x - mean
        return mean, torch.rsqrt(sums(x.square().sum(-1, keepdim=True)) / self.width + self.epsilon)

    def wide(self, x: Tensor) -> Tensor:
        """Return `x` in the dtype of the computation."""
        return x.float() if self.narrows or x.dtype in (torch.float16, torch.bfloat16) else x

    def of(self, x: Tensor, weight: Tensor, bias: Tensor | None, sums: Sums) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the norm of `x` in the dtype of the computation, the mean and the scale of its rows."""
        wide = self.wide(x)
        mean, scale = self.statistics(wide, sums)
        wide = (wide if mean is None else wide - mean) * scale
        if not (self.centers or self.offset):
            wide = wide.to(x.dtype)  # Llama's scale multiplies what has the dtype of the input again
        wide = wide * (weight.to(wide.dtype) + self.offset)
        return wide if bias is None else wide + bias.to(wide.dtype), mean, scale


def norm_of(module: nn.Module) -> Norm | None:
    """Return how a module norms its input along the last dim; None where it is no norm that is known."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    epsilon: Any = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    if weight is None or weight.dim() != 1 or parameters.keys() > {"weight", "bias"} or next(module.children(), None):
        return None
    width = len(weight)
    if type(module) is nn.RMSNorm and epsilon is None:
        epsilon = torch.finfo(weight.dtype).eps
    if not isinstance(epsilon, float):
        return None
    if type(module) is nn.LayerNorm:
        return Norm(width, epsilon, centers=True)
    generator = torch.Generator().manual_seed(0)
    held = {
        name: torch.rand(width, dtype=torch.float64, generator=generator) + 0.5
        for name, parameter in parameters.items()
        if parameter is not None
    }
    x = torch.randn(3, width, dtype=torch.float64, generator=generator) + 0.25
    try:
        with torch.no_grad(), kept_random_state():
            found = functional_call(module, held, (x,))
    except Exception:  # not a module of one tensor
        return None
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return None
    for centers in (False, True):
        for offset in (0.0, 1.0):
            for narrows in (False, True):
                norm = Norm(width, epsilon, centers, offset, narrows)
                expected, _, _ = norm.of(x, held["weight"], held.get("bias"), lambda total: total)
                if torch.allclose(found.double(), expected.double(), rtol=1e-6 if narrows else 1e-12, atol=1e-12):
                    return norm
    return None


def normed(module: Any, x: Tensor, norm: Norm, line: TensorGroup) -> Tensor:
    """Return this rank's columns of the norm of an `x` that is split over the columns of `line`."""
    kind = x.device.type
    # autocast runs a layer norm in float32, and its result stays so
    dtype = torch.float32 if norm.centers and torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype
    made: Tensor = _Normed.apply(x, module.weight, getattr(module, "bias", None), norm, line, dtype)
    return made


class _Normed(torch.autograd.Function):
    """A norm that keeps its input and two numbers of each row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, line: TensorGroup, dtype: torch.dtype
    ) -> Tensor:
        made, mean, scale = norm.of(x, weight, bias, line.sum)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.norm, ctx.line, ctx.bias_dtype = norm, line, None if bias is None else bias.dtype
        return made.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        norm: Norm = ctx.norm
        of_x = of_weight = of_bias = None
        wide = norm.wide(x)
        wide = (wide if mean is None else wide - mean) * scale
        dtype = torch.promote_types(wide.dtype, gradient.dtype)
        wide, gradient = wide.to(dtype), gradient.to(dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * wide).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            scaled = gradient * (weight.to(dtype) + norm.offset)
            terms = [(scaled * wide).sum(-1), scaled.sum(-1)] if norm.centers else [(scaled * wide).sum(-1)]
            along, *means = ctx.line.sum(torch.stack(terms), in_place=True).div_(norm.width).unsqueeze(-1)
            scaled = scaled - wide * along
            of_x = ((scaled - means[0] if means else scaled) * scale).to(x.dtype)
        return of_x, of_weight, of_bias, None, None, None


def on_full_width(module: nn.Module, x: Tensor, lengths: tuple[int, ...], line: TensorGroup) -> Tensor:
    """Return this rank's columns of what `module` makes of the full width; its parameters' gradients are partial."""
    full = differentiable(
        x, lambda own: line.gather(own, -1, lengths), lambda gradient: line.sum_scattered(gradient, -1, lengths)
    )
    return line.local_of(type(module).forward(module, full), -1, lengths).contiguous()
