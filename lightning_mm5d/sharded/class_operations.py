"""Sums, softmaxes and lookups along the last dim of a tensor whose last dim is sharded: the classes of logits.

Losses of a user's own are made of few functions: the log-softmax and a lookup of the labels, a log-sum-exp, sums over
the classes. As in the cross entropy, each rank computes with its classes, and ranks exchange what has one entry per
row: the greatest logit and the sum of exponentials relative to it, the sum, or the entry that was looked up. No rank
holds the full tensor. Sums of low precision are added up in float32.

Where arguments do not fit, or a rank has no class, the operation that the function had before computes the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.sharded.collectives import TensorGroup, reduce
from lightning_mm5d.sharded.tensor import Sharded, as_sharded
from lightning_mm5d.sharded.torch_internals import assert_on_device

Rule = Callable[..., Any]
FUNCTIONS = ("sum", "mean", "logsumexp", "softmax", "log_softmax", "gather")
"""Functions that have rules here."""


def along_classes(name: str, otherwise: Rule | None = None) -> Rule:
    """Return the rule of one of `FUNCTIONS`, which asks `otherwise` about arguments that do not fit."""

    def rule(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        x = args[0]
        if type(x) is Sharded and x.sharding.dim == -1 and isinstance(x.group, TensorGroup) and 0 not in x.lengths:
            found = _RULES[name](func, args, kwargs)
            if found is not NotImplemented:
                return found
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
    found = _log_sum_exp(x.local, x.group).to(_dtype(func, x, options))
    return found if options.get("keepdim") else found.squeeze(-1)


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
    found = wide - x.group.copied(_log_sum_exp(wide, x.group))
    return as_sharded((found.exp() if func.__name__ == "softmax" else found).to(dtype), x.sharding)


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
    found = x.local.gather(-1, place.masked_fill(elsewhere, 0)).masked_fill(elsewhere, 0)
    return reduce(found, group, is_fresh=True)


_RULES: dict[str, Rule] = {
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
        type(one) is not int or not -count <= one < count for one in dims
    ):
        return None
    found = [one if one < 0 else one - count for one in dims]
    return found if -1 in found and len(set(found)) == len(found) else None


def _dtype(func: Callable[..., Any], x: Sharded, options: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a function's result, which autocast may choose."""
    example: Tensor = func(x.local.detach().new_zeros((1,) * x.local.dim()), **options)
    return example.dtype


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
