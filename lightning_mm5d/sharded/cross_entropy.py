"""Cross entropy of logits of which each rank of a tensor parallel group holds the columns of some classes.

The logits of a language model are often the largest tensor of its step. As in Megatron-LM (Shoeybi et al. 2019,
arXiv:1909.08053) no rank ever holds the full tensor: for each row the ranks exchange the greatest logit, the sum of
exponentials relative to it, and the logit of the target. These travel in one gather and are merged equally on all
ranks, so that all have the same loss to the bit; the backward is local.

N rows, C classes, R ranks; rank r holds C_r columns (any number, also none), one after the other in the order of ranks.

It refuses what ``torch.nn.functional.cross_entropy`` refuses, class weights, and probabilities as targets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.torch_internals import assert_on_device, backward_frees_graph


def cross_entropy(
    local: Tensor,
    target: Tensor,
    *,
    start: int,
    classes: int,
    group: TensorGroup,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss, replicated, with the meaning and the dtype of ``torch.nn.functional.cross_entropy``.

    Args:
        local: logits of this rank's classes, ``[N, C_r]``.
        target: classes, counted over all ranks, ``[N]``, replicated.
        start: first class of this rank.
        classes: number of classes of all ranks, C.
        group: the ranks.
        ignore_index: target of rows that do not count.
        reduction: ``"mean"`` over the rows that count, ``"sum"``, or ``"none"``.
        label_smoothing: share of the target that is spread over all classes.

    Returns:
        A scalar, or ``[N]`` without reduction. Its gradient must be replicated.

    Raises:
        ValueError: the shapes do not fit together, or the reduction or the smoothing is unknown to torch.
        IndexError: a target is no class (on a GPU an assertion on the device, as in torch).
    """
    if local.dim() != 2 or target.shape != local.shape[:1]:
        raise ValueError(
            f"Expected logits [N, C] and target [N], got {tuple(local.shape)} and {tuple(target.shape)} on this rank"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    counts = target != ignore_index
    check_targets(target, counts, classes)
    device = local.device.type
    dtype = torch.float32 if torch.is_autocast_enabled(device) and local.dtype != torch.float64 else local.dtype
    loss: Tensor = _CrossEntropy.apply(local, target, counts, start, classes, group, label_smoothing)
    if reduction == "mean":
        loss = loss.sum() / counts.sum()
    elif reduction == "sum":
        loss = loss.sum()
    return loss.to(dtype)


def check_targets(target: Tensor, counts: Tensor, classes: int) -> None:
    """Refuse targets that are no class, on all ranks.

    Args:
        target: of all rows, ``[N]``.
        counts: which of them count, ``[N]``.
        classes: their number.

    Raises:
        IndexError: on CPU; on a GPU an assertion on the device fails.
    """
    wrong = counts & ((target < 0) | (target >= classes))
    if target.is_cuda:
        assert_on_device(~wrong.any())  # asking here would wait for the device
    elif target.device.type == "cpu" and bool(wrong.any()):
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")


class _CrossEntropy(torch.autograd.Function):
    """The losses of all rows ``[N]``, at least float32; zero where `counts` is not set."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        target: Tensor,
        counts: Tensor,
        start: int,
        classes: int,
        group: TensorGroup,
        smoothing: float,
    ) -> Tensor:
        rows, columns = local.shape
        precise = torch.promote_types(local.dtype, torch.float32)
        logits = local.to(precise)
        own = counts & (target >= start) & (target < start + columns)
        column = torch.where(own, target - start, 0).unsqueeze(1)
        empty = logits.new_zeros(rows)
        top = logits.amax(1) if columns else empty - torch.inf
        base = torch.where(top == -torch.inf, 0.0, top)
        softmax = (logits - base.unsqueeze(1)).exp_()
        chosen = torch.where(own, logits.gather(1, column).squeeze(1), 0.0) if columns else empty
        told = torch.stack([top, softmax.sum(1), chosen, *([logits.sum(1)] if smoothing else [])])
        merged = group.gather(told.unsqueeze(0), 0, [1] * group.size, exact=True)  # [R, 3 or 4, N]
        tops, totals = merged[:, 0], merged[:, 1]
        highest = tops.amax(0)
        total = (totals * (tops - highest).exp()).sum(0)
        losses = total.log() + highest
        level = losses
        losses = losses - merged[:, 2].sum(0)
        if smoothing:
            losses = losses * (1 - smoothing) + (level - merged[:, 3].sum(0) / classes) * smoothing
        losses = losses.masked_fill_(~counts, 0.0)
        softmax.mul_(((top - highest).exp() / total).unsqueeze(1))
        ctx.save_for_backward(softmax.to(local.dtype), column, own, counts)
        ctx.smoothing, ctx.classes = smoothing, classes
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        softmax, column, own, counts = ctx.saved_tensors
        of_rows = gradients[0].masked_fill(~counts, 0.0).unsqueeze(1)
        # With the graph goes the softmax, and this may take its memory.
        last = backward_frees_graph()
        scale = of_rows.to(softmax.dtype)
        gradient = softmax.mul_(scale) if last else softmax * scale
        if softmax.shape[1]:
            at_target = of_rows * own.unsqueeze(1) * (ctx.smoothing - 1)
            gradient.scatter_add_(1, column, at_target.to(gradient.dtype))
        if ctx.smoothing:
            gradient -= (of_rows * (ctx.smoothing / ctx.classes)).to(gradient.dtype)
        return gradient, *[None] * 6
