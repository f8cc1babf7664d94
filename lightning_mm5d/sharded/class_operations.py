"""Losses of logits of which each rank of a tensor parallel group holds the columns of some classes.

**Cross entropy.** The logits of a language model are often the largest tensor of its step. As in Megatron-LM (Shoeybi
et al. 2019, arXiv:1909.08053) no rank ever holds the full tensor: for each row the ranks exchange the greatest logit,
the sum of exponentials relative to it, and the logit of the target. These travel in one gather and are merged equally
on all ranks, so that all have the same loss to the bit; the backward is local.

N rows, C classes, R ranks; rank r holds C_r columns (any number, also none), one after the other in the order of ranks.

It refuses what ``torch.nn.functional.cross_entropy`` refuses, class weights, and probabilities as targets.

**Sums, softmaxes and lookups** along the last dim, the classes. Losses of a user's own are made of few functions: the
log-softmax and a lookup of the labels, a log-sum-exp, sums over the classes. As in the cross entropy, each rank
computes with its classes, and ranks exchange what has one entry per row: the greatest logit and the sum of exponentials
relative to it, the sum, or the entry that was looked up. No rank holds the full tensor. Sums of low precision are added
up in float32.

Where arguments do not fit, or a rank has no class, the operation that the function had before computes the result.

**A rank's part of logits** is for losses that a user writes over shards of the vocabulary. Such a loss is the same code
in every layout: where a rank has all classes, its shard is the full tensor, and sums over ranks return their argument.
Where context parallel ranks share the tokens, logits are gathered, and the shard is the full tensor too.

**Padding.** Rows of zeros come after those of a head's weight, so that its products have sizes that kernels of GPUs
want. They exist within a product alone. No parameter has them, and their columns are cut off before anybody sees the
logits.

C classes of this rank, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.collectives import TensorGroup, reduce
from lightning_mm5d.sharded.tensor import NotYetComputed, Sharded, as_sharded
from lightning_mm5d.sharded.torch_internals import assert_on_device, backward_frees_graph, ends_graph


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
        is_here = counts & (target >= start) & (target < start + columns)
        column = torch.where(is_here, target - start, 0).unsqueeze(1)
        empty = logits.new_zeros(rows)
        top = logits.amax(1) if columns else empty - torch.inf
        base = torch.where(top == -torch.inf, 0.0, top)
        softmax = (logits - base.unsqueeze(1)).exp_()
        chosen = torch.where(is_here, logits.gather(1, column).squeeze(1), 0.0) if columns else empty
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
        ctx.save_for_backward(softmax.to(local.dtype), column, is_here, counts)
        ctx.smoothing, ctx.classes = smoothing, classes
        return losses

    @staticmethod
    @ends_graph
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        softmax, column, is_here, counts = ctx.saved_tensors
        of_rows = gradients[0].masked_fill(~counts, 0.0).unsqueeze(1)
        # With the graph goes the softmax, and this may take its memory.
        last = backward_frees_graph()
        scale = of_rows.to(softmax.dtype)
        gradient = softmax.mul_(scale) if last else softmax * scale
        if softmax.shape[1]:
            at_target = of_rows * is_here.unsqueeze(1) * (ctx.smoothing - 1)
            gradient.scatter_add_(1, column, at_target.to(gradient.dtype))
        if ctx.smoothing:
            gradient -= (of_rows * (ctx.smoothing / ctx.classes)).to(gradient.dtype)
        return gradient, *[None] * 6


Rule = Callable[..., Any]


def along_classes(name: str, otherwise: Rule | None = None) -> Rule:
    """Return the rule of a function among `RULES`, which asks `otherwise` about arguments that do not fit."""

    def rule(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        x = args[0]
        if type(x) is Sharded and x.sharding.dim == -1 and isinstance(x.group, TensorGroup) and 0 not in x.lengths:
            result = RULES[name](func, args, kwargs)
            if result is not NotImplemented:
                return result
        return NotImplemented if otherwise is None else otherwise(func, args, kwargs)

    return rule


def _reduction(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``sum(dim, keepdim)`` and ``mean(dim, keepdim)``."""
    x: Sharded = args[0]
    options = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | dict(kwargs)
    dims = _dims(options.get("dim"), x.local.dim())
    if dims is None or len(args) > 3 or options.keys() - {"dim", "keepdim", "dtype"}:
        return NotImplemented
    dtype = _dtype(func, x, {"dim": dims, **options, "keepdim": False})
    total = x.local.sum(dims, keepdim=bool(options.get("keepdim")), dtype=_precise(dtype))
    total = reduce(total, x.group, is_fresh=True)
    if func.__name__ == "mean":
        total = total / math.prod(x.shape[dim] for dim in dims)
    return total.to(dtype)


def _logsumexp(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x: Sharded = args[0]
    options = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | dict(kwargs)
    if len(args) > 3 or options.keys() - {"dim", "keepdim"} or _dims(options.get("dim", ()), x.local.dim()) != [-1]:
        return NotImplemented
    log_sums = _log_sum_exp(x.local, x.group).to(_dtype(func, x, options))
    return log_sums if options.get("keepdim") else log_sums.squeeze(-1)


def _softmax(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``softmax(dim)`` and ``log_softmax(dim)``: sharded as their argument."""
    x: Sharded = args[0]
    options = dict(zip(("dim",), args[1:], strict=False)) | dict(kwargs)
    if len(args) > 2 or options.keys() - {"dim", "dtype", "_stacklevel"} or type(options.get("dim")) is not int:
        return NotImplemented
    if _dims(options["dim"], x.local.dim()) != [-1]:
        return NotImplemented
    dtype = _dtype(func, x, {"dim": -1, "dtype": options.get("dtype")})
    wide = x.local.to(_precise(dtype))
    log_softmax = wide - x.group.copied(_log_sum_exp(wide, x.group))
    return as_sharded((log_softmax.exp() if func.__name__ == "softmax" else log_softmax).to(dtype), x.sharding)


def _gather(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``gather(dim, index)``: ``[..., K]`` indices of classes, replicated as the result is."""
    x: Sharded = args[0]
    options = dict(zip(("dim", "index"), args[1:], strict=False)) | dict(kwargs)
    index = options.get("index")
    if len(args) > 3 or options.keys() != {"dim", "index"} or type(index) is not Tensor or index.dtype != torch.int64:
        return NotImplemented
    if _dims(options["dim"], x.local.dim()) != [-1] or index.dim() != x.local.dim():
        return NotImplemented
    lengths, size, group = x.lengths, x.sharding.size, x.group
    wrong = (index < 0) | (index >= size)
    if index.is_cuda:
        assert_on_device(~wrong.any())  # asking here would wait for the device
    elif bool(wrong.any()):
        return NotImplemented  # torch's own error
    place = index - sum(lengths[: group.index])
    elsewhere = (place < 0) | (place >= x.local.shape[-1])
    values = x.local.gather(-1, place.masked_fill(elsewhere, 0)).masked_fill(elsewhere, 0)
    return reduce(values, group, is_fresh=True)


RULES: dict[str, Rule] = {
    "sum": _reduction,
    "mean": _reduction,
    "logsumexp": _logsumexp,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "gather": _gather,
}


def _log_sum_exp(local: Tensor, group: TensorGroup) -> Tensor:
    """The log-sum-exp over the classes of all ranks, ``[..., 1]``, replicated and at least float32."""
    wide = local.to(_precise(local.dtype))
    top = group.max(wide.detach().amax(-1, keepdim=True))
    top = top.masked_fill(top.isinf(), 0.0)
    return reduce((wide - top).exp().sum(-1, keepdim=True), group, is_fresh=True).log() + top


def _dims(dim: Any, count: int) -> list[int] | None:
    """The dims of a reduction, negative; None where the classes are not among them."""
    dims = range(-count, 0) if dim is None else [dim] if type(dim) is int else dim
    if not isinstance(dims, list | tuple | range) or any(
        type(dim) is not int or not -count <= dim < count for dim in dims
    ):
        return None
    negative = [dim if dim < 0 else dim - count for dim in dims]
    return negative if -1 in negative and len(set(negative)) == len(negative) else None


def _dtype(func: Callable[..., Any], x: Sharded, options: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a function's result, which autocast may choose."""
    example: Tensor = func(x.local.detach().new_zeros((1,) * x.local.dim()), **options)
    return example.dtype


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


@dataclass(frozen=True)
class Columns:
    """The classes of each tensor parallel rank, one after the other.

    Attributes:
        lengths: their number on each rank.
        group: the ranks.
        multiple: of which the number of columns in a product is one, with columns of zeros that are cut off again.
    """

    lengths: tuple[int, ...]
    group: TensorGroup
    multiple: int = 1


def padded_rows(x: Tensor, multiple: int) -> Tensor:
    """Return `x` ``[C, ...]`` with zeros after its rows, up to a multiple of `multiple`; itself where it is one."""
    missing = -x.shape[0] % multiple
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, missing)) if missing else x


def without_padding(x: Tensor, dim: int, length: int) -> Tensor:
    """Return the first `length` entries of `x` along `dim`, a view; `x` itself where these are all."""
    return x if x.shape[dim] == length else x.narrow(dim, 0, length)


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """The classes of one rank. Made by `vocabulary_shard`.

    Attributes:
        logits: of this rank's classes, ``[..., stop - start]``: a plain tensor, to which gradients flow.
        start: first class of this rank.
        stop: the class after its last one.
        size: number of classes of all ranks.
    """

    logits: Tensor
    start: int
    stop: int
    size: int
    _group: TensorGroup | None = None

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' `x`, equal on all of them; its gradient is that of each summand."""
        return x if self._group is None else reduce(x, self._group)

    def max(self, x: Tensor) -> Tensor:
        """Return the maximum over the ranks' `x`, element by element and without a gradient."""
        return x.detach() if self._group is None else self._group.max(x)

    def copy(self, x: Tensor) -> Tensor:
        """Return `x`, equal on all ranks, for work on `logits`: its gradients, which are partial, are summed."""
        return x if self._group is None else self._group.copied(x)


def vocabulary_shard(logits: Tensor) -> VocabularyShard:
    """Return this rank's classes of `logits`, their range, and sums over the ranks that share the vocabulary.

    All ranks that share it must call the same of its methods in the same order. The loss that comes of it must be equal
    on all of them.

    Args:
        logits: as a head returned them, ``[..., C]``; on one process any tensor.

    Raises:
        ConfigError: `logits` is no tensor.
    """
    if not isinstance(logits, Tensor):
        rule = "It takes the logits of a head, a tensor with the classes in its last dim"
        raise ConfigError("vocabulary_shard", type(logits).__name__, rule, "Pass output.logits")
    if isinstance(logits, NotYetComputed):
        logits = logits.computed()
    if not isinstance(logits, Sharded):
        return VocabularyShard(logits=logits, start=0, stop=logits.shape[-1], size=logits.shape[-1])
    dim, lengths, size, group = logits.sharding
    if dim != -1 or not isinstance(group, TensorGroup):
        return vocabulary_shard(logits.full())
    start = sum(lengths[: group.index])
    return VocabularyShard(logits=logits.local, start=start, stop=start + lengths[group.index], size=size, _group=group)
