"""Puts off the weight gradients of experts: products with one expert's part of a tensor, or with all of its parts.

Experts are code of the model's own, which multiplies rows with views of a parameter ``[experts, ...]``: one expert at a
time, or over groups of rows. `DeferredProducts` is entered around such code. It computes the products that it knows by
a function that leaves the gradient of the weight to `Deferred`: ``linear``, ``matmul`` and its other names, ``bmm``,
and ``grouped_mm``.

Other products, as with weights that are gathered for each row (``batched_mm``) or computed from several parameters,
get their gradients in the input-gradient pass: correct, but not deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_mm5d.config.errors import private
from lightning_mm5d.stage.deferred import Deferred, Place, has_hooks

_MATMULS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm}
_grouped = private(torch, "_grouped_mm")  # what functional.grouped_mm calls


class DeferredProducts(TorchFunctionMode):
    """Entered around experts, whose products put their weight gradients off.

    Args:
        due: takes them.
    """

    def __init__(self, due: Deferred) -> None:
        super().__init__()
        self._due = due

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        product = _product(func, args, kwargs) if torch.is_grad_enabled() else None
        return func(*args, **kwargs) if product is None else _computed(product, self._due)


class _Product(NamedTuple):
    """Rows times a part of a parameter.

    Attributes:
        rows: ``[..., in]``, or ``[experts, rows, in]`` of a batched product.
        view: of the parameter: ``[in, out]`` or ``[experts, in, out]``.
        bias: that is added.
        parameter: that `view` is a view of.
        offsets: where the rows of each expert end, of a product over groups of rows.
    """

    rows: Tensor
    view: Tensor
    bias: Tensor | None
    parameter: nn.Parameter
    offsets: Tensor | None = None


def _product(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> _Product | None:
    """Return what a function multiplies, where the gradient of its weight can be put off."""
    bias, offsets = None, None
    if func is F.linear:
        if len(args) < 2 or kwargs.keys() - {"bias"}:
            return None
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
    elif func in _MATMULS:
        if kwargs or len(args) != 2:
            return None
    elif func is _grouped:
        offsets = kwargs.get("offs")
        if len(args) != 2 or offsets is None or any(kwargs[key] is not None for key in kwargs.keys() - {"offs"}):
            return None
    else:
        return None
    rows, weight = args[:2]
    parameter = _parameter_of(weight)
    if parameter is None or not isinstance(rows, Tensor) or not rows.requires_grad:
        return None
    view = weight.transpose(-2, -1) if func is F.linear and weight.dim() == 2 else weight
    # a product over groups of rows, or of as many batches as there are experts, or of all rows with one expert
    dims = (2, 3) if offsets is not None else (3, 3) if view.dim() == 3 else (rows.dim(), 2)
    if (rows.dim(), view.dim()) != dims or rows.dim() < 2 or (dims == (3, 3) and len(rows) != len(view)):
        return None
    return _Product(rows, view, bias, parameter, offsets)


def _parameter_of(weight: Any) -> nn.Parameter | None:
    """Return the parameter that `weight` is a view of, where its gradient can be put off."""
    if not isinstance(weight, Tensor):
        return None
    found = weight if isinstance(weight, nn.Parameter) else private(weight, "_base")
    if not isinstance(found, nn.Parameter) or not found.requires_grad or not weight.requires_grad or has_hooks(found):
        return None
    overlaps = any(stride == 0 and size > 1 for size, stride in zip(weight.shape, weight.stride(), strict=True))
    is_same = weight.dtype == found.dtype and not found.is_complex()
    return found if found.is_contiguous() and is_same and not overlaps and _is_plain(found) else None


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter


def _computed(product: _Product, due: Deferred) -> Tensor:
    rows, view, bias, parameter, offsets = product
    kind = rows.device.type
    if offsets is None and torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))  # what is kept for the backward is as small as without
    offset = int(view.storage_offset() - parameter.storage_offset())
    place = Place(parameter.shape, (tuple(view.shape), tuple(view.stride()), offset), offsets)
    flat = rows if view.dim() == 3 else rows.reshape(-1, rows.shape[-1])
    result = _Multiply.apply(flat, view, bias, parameter, place, due)
    return result if view.dim() == 3 else result.view(*rows.shape[:-1], result.shape[-1])


class _Multiply(torch.autograd.Function):
    """``rows @ view + bias``; leaves the gradient of the view to `Deferred`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, view: Tensor, bias: Tensor | None, parameter: nn.Parameter, place: Place, due: Deferred
    ) -> Tensor:
        ctx.save_for_backward(rows, view)
        # beside what is saved, which checkpointing replaces by a copy that is no parameter
        ctx.parameter, ctx.place, ctx.due = parameter, place, due
        if place.offsets is not None:
            return F.grouped_mm(rows, view, offs=place.offsets)
        return torch.bmm(rows, view) if view.dim() == 3 else F.linear(rows, view.t(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, view = ctx.saved_tensors
        wants_rows, wants_view, wants_bias, *_ = ctx.needs_input_grad
        offsets, own, below = ctx.place.offsets, None, None
        rows, view = rows.to(gradient.dtype), view.to(gradient.dtype)  # autocast ran the forward in this dtype
        if ctx.due.is_open and not torch.is_grad_enabled():
            # a copy: a parameter may have taken the same memory for its gradient, and later microbatches add to that
            ctx.due.add(ctx.parameter, rows, gradient.clone(), ctx.place)
        elif wants_view:
            left = rows.transpose(-2, -1)
            own = left @ gradient if offsets is None else F.grouped_mm(left, gradient, offs=offsets)
            own = own.to(ctx.parameter.dtype)
        if wants_rows:
            across = view.transpose(-2, -1)
            below = gradient @ across if offsets is None else F.grouped_mm(gradient, across, offs=offsets)
        return below, own, gradient.sum(0) if wants_bias else None, None, None, None
