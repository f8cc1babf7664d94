"""Splits a backward: input gradients (dgrad) first, weight gradients (wgrad) of linear layers later.

The stage before waits for input gradients only, so a schedule may run weight gradients when the rank has nothing else
to do. Cutting the autograd graph in two would keep all of it until the weight gradients. Linear layers have nearly all
of them: they compute their input gradient alone and keep their input and the gradient of their output for later. The
input-gradient pass frees everything else, as any backward does (the `WeightGradStore` of Qi et al. 2023,
arXiv:2401.10241).

Products of experts with parts of one tensor do the same (`deferred_products`).

Parameters of other modules (norms, embeddings, convolutions), and weights with hooks, get their gradients in the
input-gradient pass: correct, but not deferred.

Puts off the weight gradients of experts: products with one expert's part of a tensor, or with all of its parts.

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
from transformers.pytorch_utils import Conv1D  # the projections of GPT-2 and its kin

from lightning_mm5d.config.errors import private

_Part = Tensor | Callable[[], Tensor]


class Place(NamedTuple):
    """A part of a weight that a product takes: a view of it.

    Attributes:
        shape: of the weight.
        part: size, strides and offset of the view in it.
        offsets: where the rows of each expert end, of a product over groups of rows; else None.
    """

    shape: torch.Size
    part: tuple[tuple[int, ...], tuple[int, ...], int]
    offsets: Tensor | None = None


class _Term(NamedTuple):
    """``left.T @ right``, a term of the gradient of a weight or of a part of it."""

    left: _Part
    right: _Part
    place: Place | None


class Deferred:
    """The weight gradients of one microbatch in one stage that are still to be computed.

    It is entered around the backward that puts them off. Outside of that, where a step differentiates something by
    itself, layers compute their gradients at once.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._due: dict[int, tuple[nn.Parameter, list[_Term]]] = {}

    def __enter__(self) -> Deferred:
        self.is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False

    def add(self, weight: nn.Parameter, left: Tensor, right: Tensor, place: Place | None = None) -> None:
        """Note that ``left.T @ right`` is a term of the gradient of `weight`; both have a row for each token.

        Args:
            weight: of which it is a term.
            left: one factor.
            right: the other factor.
            place: the part of `weight` whose gradient this is; None for all of it.
        """
        self._due.setdefault(id(weight), (weight, []))[1].append(_Term(left, right, place))

    def take(self, other: Deferred) -> None:
        """Take over what is still to be computed of `other`."""
        for weight, terms in other._due.values():
            self._due.setdefault(id(weight), (weight, []))[1].extend(terms)
        other._due.clear()

    def keep(self, pack: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        """Hold what `pack` returns for each tensor, which gives the tensor when it is called, instead of the tensor."""
        for _, terms in self._due.values():
            terms[:] = [_Term(pack(_tensor(term.left)), pack(_tensor(term.right)), term.place) for term in terms]

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters whose gradients are still to be computed."""
        return [weight for weight, _ in self._due.values()]

    def compute(self) -> None:
        """Compute the weight gradients and add them to ``.grad``, as a backward would, one weight at a time."""
        while self._due:
            _, (weight, terms) = self._due.popitem()
            total: Tensor | None = None
            while terms:
                left, right, place = terms.pop()
                total = _added(total, _tensor(left), _tensor(right), place)
            assert total is not None
            torch.autograd.backward(weight, total.to(weight.dtype))


def _added(total: Tensor | None, left: Tensor, right: Tensor, place: Place | None) -> Tensor:
    """Add ``left.T @ right`` to `total`, at its place."""
    if place is None:
        return left.t() @ right if total is None else total.addmm_(left.t(), right)
    if total is None:
        total = right.new_zeros(place.shape)
    part = total.as_strided(*place.part)
    if place.offsets is not None:
        part += F.grouped_mm(left.t(), right, offs=place.offsets)
    elif left.dim() == 2:
        part.addmm_(left.t(), right)
    else:
        part.baddbmm_(left.transpose(1, 2), right)
    return total


def _tensor(part: _Part) -> Tensor:
    return part if isinstance(part, Tensor) else part()


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias``, or ``x @ weight + bias``, x ``[rows, in]``; leaves the weight gradient to `Deferred`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, due: Deferred, is_conv: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        # beside what is saved, which checkpointing replaces by a copy that is no parameter
        ctx.weight, ctx.due, ctx.is_conv = weight, due, is_conv
        return F.linear(x, weight.t() if is_conv else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        x, weight = x.to(gradient.dtype), weight.to(gradient.dtype)  # autocast ran the forward in the gradient's dtype
        wgrad = None
        if ctx.due.is_open and not torch.is_grad_enabled():
            # a copy: a parameter may have taken the same memory for its gradient, and later microbatches add to that
            rows = gradient.clone()
            ctx.due.add(ctx.weight, *((x, rows) if ctx.is_conv else (rows, x)))
        elif wants_weight:
            wgrad = (x.t() @ gradient if ctx.is_conv else gradient.t() @ x).to(ctx.weight.dtype)
        dgrad = gradient @ (weight.t() if ctx.is_conv else weight) if wants_input else None
        return dgrad, wgrad, gradient.sum(0) if wants_bias else None, None, None


def is_linear(module: nn.Module) -> bool:
    """Whether `module` computes what `deferred_linear` computes, and nothing has replaced its forward."""
    if "forward" in vars(module):
        return False
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def defers(module: nn.Module, x: Tensor) -> bool:
    """Whether a linear layer puts its weight gradient off.

    Not where its weight is frozen, complex or computed from other parameters; nor where no gradient goes on to its
    input `x`; nor where hooks on the weight wait for its gradient, because autograd would call them without one.
    """
    weight = module.weight
    return (
        isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and x.requires_grad
        and torch.is_grad_enabled()
        and not has_hooks(weight)
        and not weight.is_complex()
    )


def has_hooks(weight: nn.Parameter) -> bool:
    """Whether hooks wait for the gradient of a weight, which autograd would call without one."""
    return bool(private(weight, "_backward_hooks") or private(weight, "_post_accumulate_grad_hooks"))


def deferred_linear(module: nn.Module, x: Tensor, bias: Tensor | None, due: Deferred) -> Tensor:
    """Return what the linear layer `module` computes of `x` ``[..., in]`` with its weight and `bias`: ``[..., out]``.

    `due` collects the gradient of its weight.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))  # what is kept for the backward is as small as it would be without
    # flat, because what a function returns must not be a view for operations in place to be allowed on it
    flat = _Linear.apply(x.reshape(-1, x.shape[-1]), module.weight, bias, due, type(module).forward is Conv1D.forward)
    return flat.view(*x.shape[:-1], flat.shape[-1])


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
        product = _product(func, args, kwargs, self._due) if torch.is_grad_enabled() else None
        return func(*args, **kwargs) if product is None else product


def _product(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], due: Deferred) -> Tensor | None:
    """Return the product that a function computes, where `due` can take the gradient of its weight; else None."""
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
    return _computed(rows, view, bias, parameter, offsets, due)


def _parameter_of(weight: Any) -> nn.Parameter | None:
    """Return the parameter that `weight` is a view of, where its gradient can be put off."""
    if not isinstance(weight, Tensor):
        return None
    owner = weight if isinstance(weight, nn.Parameter) else private(weight, "_base")
    if not isinstance(owner, nn.Parameter) or not owner.requires_grad or not weight.requires_grad or has_hooks(owner):
        return None
    overlaps = any(stride == 0 and size > 1 for size, stride in zip(weight.shape, weight.stride(), strict=True))
    is_same = weight.dtype == owner.dtype and not owner.is_complex()
    return owner if owner.is_contiguous() and is_same and not overlaps and type(owner) is nn.Parameter else None


def _computed(
    rows: Tensor, view: Tensor, bias: Tensor | None, parameter: nn.Parameter, offsets: Tensor | None, due: Deferred
) -> Tensor:
    """Return rows times a part of a parameter, plus a bias.

    Args:
        rows: ``[..., in]``, or ``[experts, rows, in]`` of a batched product.
        view: of the parameter: ``[in, out]`` or ``[experts, in, out]``.
        bias: that is added.
        parameter: that `view` is a view of.
        offsets: where the rows of each expert end, of a product over groups of rows.
        due: takes the gradient of `view`.
    """
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
        offsets, wgrad, dgrad = ctx.place.offsets, None, None
        rows, view = rows.to(gradient.dtype), view.to(gradient.dtype)  # autocast ran the forward in this dtype
        if ctx.due.is_open and not torch.is_grad_enabled():
            # a copy: a parameter may have taken the same memory for its gradient, and later microbatches add to that
            ctx.due.add(ctx.parameter, rows, gradient.clone(), ctx.place)
        elif wants_view:
            left = rows.transpose(-2, -1)
            wgrad = left @ gradient if offsets is None else F.grouped_mm(left, gradient, offs=offsets)
            wgrad = wgrad.to(ctx.parameter.dtype)
        if wants_rows:
            across = view.transpose(-2, -1)
            dgrad = gradient @ across if offsets is None else F.grouped_mm(gradient, across, offs=offsets)
        return dgrad, wgrad, gradient.sum(0) if wants_bias else None, None, None, None
