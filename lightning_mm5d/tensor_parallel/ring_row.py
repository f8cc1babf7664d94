"""A row layer whose results are summed over ranks and scattered along the sequence, shard by shard.

The sum of one shard travels around the ring while the product for the next one is computed. The backward is the mirror
image: gradients of the shards travel while the rows at hand are multiplied for the gradient of the input. The gathered
rows give the weight gradient afterwards, or later where a split backward puts it off.

Shapes: inputs ``[..., S, in]``, results ``[..., S of this rank, out]``; weights ``[out, in]``, or ``[in, out]`` of a
Conv1D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.remote_value import same_origin
from lightning_mm5d.sharded.sequence_ring import ring_gather, ring_sum_scattered
from lightning_mm5d.tensor_parallel.entrance import Due, Sharding, autocast, weight_gradient


def ring_row(module: nn.Module, x: Tensor, sharding: Sharding, group: TensorGroup, due: Due | None) -> Tensor:
    """Return this rank's shard of what a row layer computes of `x`, without its bias.

    Args:
        module: the layer, whose weight is this rank's.
        x: the columns of its input that this rank has.
        sharding: of the sequence of results.
        group: the tensor parallel ranks.
        due: takes the weight gradient while it is open; None where it is never put off.
    """
    layer = sharding, group, not isinstance(module, nn.Linear), due
    return same_origin(_RingRow.apply(autocast(x), module.weight, *layer), x)


class _RingRow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        sharding: Sharding,
        group: TensorGroup,
        is_conv: bool,
        due: Due | None,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        # beside what is saved, which checkpointing replaces by a copy that is no parameter
        ctx.weight, ctx.due = weight, due
        ctx.sharding, ctx.group, ctx.is_conv, ctx.columns = sharding, group, is_conv, x.shape[-1]
        (dim, lengths), cast = sharding, autocast(weight)
        rows = cast.t() if is_conv else cast

        def part(start: int, length: int) -> Tensor:
            return F.linear(x.narrow(dim, start, length).contiguous(), rows)

        return ring_sum_scattered(part, dim, lengths, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_input, wants_weight, *_ = ctx.needs_input_grad
        dim, lengths = ctx.sharding
        below: Tensor | None = None
        if wants_input:
            weight = weight.to(gradient.dtype)  # autocast ran the forward in the gradient's dtype
            weight = weight.t() if ctx.is_conv else weight
            shape = [*gradient.shape[:-1], ctx.columns]
            shape[dim] = sum(lengths)
            below = gradient.new_empty(shape)

        def multiply(rows: Tensor, start: int) -> None:
            if below is not None:
                below.narrow(dim, start, rows.shape[dim]).copy_(rows @ weight)

        full, own = ring_gather(gradient, dim, lengths, ctx.group, multiply), None
        if wants_weight:
            rows = full.reshape(-1, full.shape[-1])
            own = weight_gradient(ctx.weight, rows, x, is_conv=ctx.is_conv, due=ctx.due, is_own=True)
        return below, own, None, None, None, None
