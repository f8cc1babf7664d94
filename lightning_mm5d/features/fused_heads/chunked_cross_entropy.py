"""Cross entropy of a linear layer's result, computed for a few rows at a time.

The logits of a language model are often the largest tensor of its step: in float32 they and their gradient take 8 bytes
for each token and class. Here only the logits of one chunk of rows exist at a time. The backward computes them again
from the hidden states, which costs one more matrix product: the head computes four where it computed three. A chunk has
as many rows as make its logits about as large as all hidden states, as in Liger Kernel (Hsu et al. 2024,
arXiv:2410.10989).

N rows, D width, C classes, of which this rank has C_r (all without tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mm5d.sharded.cross_entropy import cross_entropy
from lightning_mm5d.sharded.padded_rows import Columns, padded_rows, without_padding

Pointwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class RowLosses:
    """What is computed of a chunk of rows.

    Attributes:
        columns: the classes of each rank; None where this rank has all.
        pointwise: functions between the linear layer and the loss, in order.
        options: ``ignore_index`` and ``label_smoothing`` of ``torch.nn.functional.cross_entropy``.
    """

    columns: Columns | None = None
    pointwise: tuple[Pointwise, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def multiple(self) -> int:
        """Of `columns`."""
        return 1 if self.columns is None else self.columns.multiple

    def of(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row, at least float32.

        Args:
            logits: ``[n, C_r]``, and padding after them.
            target: ``[n]``.
        """
        if self.columns is not None:
            logits = without_padding(logits, 1, self.columns.lengths[self.columns.group.index])
        for function in self.pointwise:
            logits = function(logits)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.columns is None:
            return F.cross_entropy(logits, target, reduction="none", **self.options)
        lengths, group = self.columns.lengths, self.columns.group
        start, classes = sum(lengths[: group.index]), sum(lengths)
        return cross_entropy(
            logits, target, start=start, classes=classes, group=group, reduction="none", **self.options
        )


def chunk_rows(rows: int, width: int, classes: int) -> int:
    """Return how many rows a chunk has: a power of two, with logits about as large as ``[rows, width]``.

    >>> chunk_rows(8192, 4096, 131072)
    256
    """
    chunks = max(-(-classes // max(width, 1)), 1)
    return 1 << (max(-(-rows // chunks), 1) - 1).bit_length()


def linear_row_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, compute: RowLosses
) -> Tensor:
    """Return the loss of each row of ``hidden @ weight.T + bias``: ``[N]``, at least float32, 0 where it is ignored.

    Args:
        hidden: ``[N, D]``.
        weight: ``[C_r, D]``, of the dtype of `hidden`.
        bias: ``[C_r]``.
        target: classes ``[N]``, counted over all ranks.
        compute: what is computed of the product. Of this rank's classes, the gradient of `hidden` is partial.
    """
    losses: Tensor = _RowLosses.apply(hidden, weight, bias, target, compute)
    return losses


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, compute: RowLosses
    ) -> Tensor:
        classes = weight.shape[0] if compute.columns is None else sum(compute.columns.lengths)
        ctx.rows, ctx.compute = chunk_rows(hidden.shape[0], hidden.shape[1], classes), compute
        ctx.save_for_backward(hidden, weight, bias, target)
        with _plain(hidden):
            weight = padded_rows(weight, compute.multiple)
            bias = None if bias is None else padded_rows(bias, compute.multiple)
            found = [
                compute.of(F.linear(part, weight, bias), goal)
                for part, goal in zip(hidden.split(ctx.rows), target.split(ctx.rows), strict=True)
            ]
            return torch.cat(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target = ctx.saved_tensors
        own = weight.shape[0]
        weight = padded_rows(weight, ctx.compute.multiple)
        if bias is not None:
            bias = padded_rows(bias, ctx.compute.multiple)
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        # sums over chunks of a narrow dtype would round once a chunk
        wide = torch.promote_types(weight.dtype, torch.float32)
        of_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        with _plain(hidden):
            for start in range(0, len(hidden), ctx.rows):
                rows = slice(start, start + ctx.rows)
                part = hidden[rows]
                logits = F.linear(part, weight, bias).requires_grad_()
                with torch.enable_grad():
                    losses = ctx.compute.of(logits, target[rows])
                (gradient,) = torch.autograd.grad(losses, logits, gradients[0][rows])
                del logits, losses
                if of_hidden is not None:
                    torch.mm(gradient, weight, out=of_hidden[rows])
                if of_weight is not None:
                    if wide == weight.dtype:
                        of_weight.addmm_(gradient.t(), part)
                    else:
                        of_weight += gradient.t() @ part
                if of_bias is not None:
                    of_bias += gradient.sum(0)
        return (
            of_hidden,
            None if of_weight is None else without_padding(of_weight, 0, own).to(weight.dtype),
            None if of_bias is None else without_padding(of_bias, 0, own).to(bias.dtype),
            None,
            None,
        )


def _plain(x: Tensor) -> Any:
    """Enter around work in the dtypes of its tensors."""
    return torch.autocast(x.device.type, enabled=False)
