"""The way of one input into column layers and their products with it, cut so that a backward hides its communication.

A backward through the layers that share an input runs in this order. Autograd keeps it by the numbers of its nodes: of
those that are ready it runs the latest first.

1. `_Product`: the products for the gradient of the input, one for each layer.
2. `_Start`: the start of the sum of these gradients over ranks.
3. `_Weights`: the weight gradients, while the sum is under way.
4. `_End`: the wait for the sum.

Results do not depend on this order. Where a split backward puts weight gradients off, step 3 only notes them.

With sequence shards the sum is scattered, and each rank keeps its shard of the input alone: step 1 starts to gather
the others again and step 3 waits for them.

Where shards travel around a ring, the first layer multiplies them as they come, and the others take what has been
gathered by then. A backward keeps this order where step 3 computes the weight gradients of all layers. Where it does
not (frozen layers, adapters, gradients that are put off), nothing hides the sum but the products themselves: step 2
computes them shard by shard, while the sum travels.

Shapes: ``[..., in]`` inputs, ``[..., out]`` results, weights ``[out, in]``, or ``[in, out]`` of a Conv1D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mm5d.sharded.class_operations import padded_rows, without_padding
from lightning_mm5d.sharded.collectives import TensorGroup, Wait, view, with_length
from lightning_mm5d.sharded.remote_value import same_origin
from lightning_mm5d.sharded.sequence import ring_gather, ring_sum_scattered
from lightning_mm5d.sharded.torch_internals import (
    ends_graph,
    is_held_once,
    number_in_backward,
    number_of_backward,
    renumber_in_backward,
)

Sharding = tuple[int, tuple[int, ...]]  # the sharded dim, and its length on each rank


class Due(Protocol):
    """Weight gradients that are put off while it `is_open`."""

    is_open: bool

    def add(self, weight: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Note that ``left.T @ right`` is a term of the gradient of `weight`."""


PutsOff = Callable[[nn.Module, Tensor], "Due | None"]  # of a layer and its input


class Entrance:
    """One input of column layers, in a forward.

    Args:
        x: replicated, or this rank's shard of the sequence.
        group: the tensor parallel ranks.
        sharding: of `x`; None where it is replicated.
        rings: whether shards travel around a ring beside products.
        first: the layer whose product comes first; None if something else needs the input before.

    Attributes:
        entered: the full input for work on sharded weights; its gradients, which are partial, are summed.
    """

    def __init__(
        self,
        x: Tensor,
        group: TensorGroup,
        sharding: Sharding | None = None,
        *,
        rings: bool = False,
        first: nn.Module | None = None,
    ) -> None:
        self._traffic = _Traffic(group, sharding, rings=rings and sharding is not None and sharding[0] < -1)
        self._shard = None if sharding is None else x.detach()
        self._number: int | None = None  # of weight gradients in a backward
        self._own_dtype: Tensor | None = None
        if x.requires_grad and torch.is_grad_enabled():
            end = _End.apply(x, self._traffic)
            self._number = number_in_backward(end)
            renumber_in_backward(end, max(self._number - 1, 0))
            entered = _Start.apply(end, self._traffic, first)
        else:
            with torch.no_grad():
                entered = x if sharding is None else self._traffic.full(x, first)
        self.entered = same_origin(entered, x)

    def product(
        self, module: nn.Module, bias: Tensor | None, is_conv: bool, due: Due | None, multiple: int = 1
    ) -> Tensor:
        """Return what a linear layer computes of the input.

        Args:
            module: the layer, whose weight is this rank's.
            bias: of this rank.
            is_conv: whether the weight is ``[in, out]``.
            due: takes the weight gradient while it is open; None where it is never put off.
            multiple: of which a padded weight ``[out, in]`` has a number of rows; above 1 the layer is not the `first`.
        """
        weight: Any = module.weight
        plain, weights = self._plain(), None
        out = weight.shape[1 if is_conv else 0]
        if torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad)):
            saved_input, shape = plain if self._shard is None else None, (*plain.shape[:-1], out + -out % multiple)
            weights = _Weights.apply(weight, bias, saved_input, shape, self._traffic, is_conv, due)
            if self._number is not None:
                renumber_in_backward(weights, self._number)
        if self._shard is not None:
            self._shard = self._shard.to(plain.dtype)  # cast once for all layers, as the input in full
        shard = None if weights is None else self._shard
        layer = weight, bias, is_conv, due, multiple
        product = _Product.apply(self.entered, weights, plain, shard, layer, self._traffic)
        return without_padding(same_origin(product, self.entered), -1, out)

    def _plain(self) -> Tensor:
        """The input outside of the graph, in the dtype that autocast chooses: cast once for all layers."""
        if self._own_dtype is None:
            self._own_dtype = autocast(self.entered.detach())
        return self._own_dtype


class _Below(NamedTuple):
    """A product for the gradient of the input, still to be computed.

    Attributes:
        rows: the gradient of a layer's result.
        weight: ``[out, in]``.
        hides_sum: whether the layer's weight gradient is computed after it.
    """

    rows: Tensor
    weight: Tensor
    hides_sum: bool


class _Traffic:
    """What is under way for one input; nodes of a graph hold it, so it holds no tensor of a forward."""

    def __init__(self, group: TensorGroup, sharding: Sharding | None, *, rings: bool = False) -> None:
        self._group, self.sharding, self.rings = group, sharding, rings
        self._sum: Wait | None = None
        self._gather: Wait | None = None
        self._full: Tensor | None = None
        self._users = 0  # weight gradients to come that need the gathered input
        self._first: Tensor | None = None  # until its layer takes it
        self._below: list[_Below] = []
        self._backward = -1  # that they are of

    def full(self, x: Tensor, first: nn.Module | None) -> Tensor:
        """Return `x` in full; in a ring compute the product of the layer `first` meanwhile."""
        if self.sharding is None:
            return view(x)
        if first is None or not self.rings:
            return self._group.gather(x, *self.sharding)
        dim, lengths = self.sharding
        of_layer: Any = first
        weight = autocast(of_layer.weight)
        weight = weight if isinstance(first, nn.Linear) else weight.t()
        bias = None if of_layer.bias is None else autocast(of_layer.bias)
        shape = with_length([*x.shape[:-1], weight.shape[0]], dim, sum(lengths))

        def multiply(rows: Tensor, start: int) -> None:
            product = F.linear(autocast(rows), weight, bias)
            if self._first is None:
                self._first = product.new_empty(shape)
            self._first.narrow(dim, start, rows.shape[dim]).copy_(product)

        return ring_gather(x, dim, lengths, self._group, multiply)

    def first(self) -> Tensor | None:
        """Return the product that was computed beside the gather, once."""
        product, self._first = self._first, None
        return product

    def start_gather(self, shard: Tensor) -> None:
        """Start to gather the input again, for one more weight gradient."""
        assert self.sharding is not None
        self._users += 1
        if self._gather is None and self._full is None:
            self._gather = self._group.start_gather(shard, *self.sharding)

    def gathered(self) -> Tensor:
        """Return the input for a weight gradient; the last one lets go of it."""
        if self._gather is not None:
            self._full, self._gather = self._gather(), None
        full = self._full
        assert full is not None
        self._users -= 1
        if not self._users:
            self._full = None
        return full

    def add_below(self, product: _Below) -> None:
        """Leave a product to `ring_sum`."""
        if self._backward != number_of_backward():  # another one may have ended before
            self._below, self._backward = [], number_of_backward()
        self._below.append(product)

    def ring_sum(self, gradient: Tensor | None, dtype: torch.dtype) -> None:
        """Compute the products for the gradient of the input, and start to sum it over ranks.

        Args:
            gradient: of the input, without these products.
            dtype: of the input.
        """
        assert self.sharding is not None
        dim, lengths = self.sharding
        products, self._below = self._below if self._backward == number_of_backward() else [], []

        def part(start: int, length: int) -> Tensor:
            total = None if gradient is None else gradient.narrow(dim, start, length).clone()
            for rows, weight, _ in products:
                product = (rows.narrow(dim, start, length).contiguous() @ weight).to(dtype)
                total = product if total is None else total.add_(product)
            assert total is not None
            return total

        if all(product.hides_sum for product in products):
            self._sum = self._group.start_sum_scattered(part(0, sum(lengths)), dim, lengths)
        else:
            summed = ring_sum_scattered(part, dim, lengths, self._group)
            self._sum = lambda: summed

    def start_sum(self, gradient: Tensor) -> Tensor:
        """Start to sum the gradient of the input over ranks; return a stand-in for the sum."""
        if self.sharding is None:
            self._sum = self._group.start_sum(gradient, in_place=is_held_once(gradient))
            return gradient.new_zeros(()).expand(gradient.shape)
        dim, lengths = self.sharding
        self._sum = self._group.start_sum_scattered(gradient, dim, lengths)
        return gradient.new_zeros(()).expand(with_length(gradient.shape, dim, lengths[self._group.index]))

    def end_sum(self) -> Tensor:
        """Return the gradient of the input."""
        assert self._sum is not None
        wait, self._sum = self._sum, None
        return wait()


class _End(torch.autograd.Function):
    """Nothing in a forward; step 4 of a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, traffic: _Traffic) -> Tensor:
        ctx.traffic = traffic
        ctx.set_materialize_grads(False)
        return view(x)

    @staticmethod
    @ends_graph
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor, None]:
        return ctx.traffic.end_sum(), None


class _Start(torch.autograd.Function):
    """The input in full; step 2 of a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, traffic: _Traffic, first: nn.Module | None) -> Tensor:
        ctx.traffic, ctx.dtype = traffic, x.dtype
        ctx.set_materialize_grads(not traffic.rings)
        return traffic.full(x, first)

    @staticmethod
    @ends_graph
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        if ctx.traffic.rings:
            ctx.traffic.ring_sum(gradient, ctx.dtype)
            return None, None, None
        return ctx.traffic.start_sum(gradient), None, None


class _Product(torch.autograd.Function):
    """A linear layer; step 1 of a backward. What its result gets goes on to `weights`, a stand-in for its weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor | None,
        plain: Tensor,
        shard: Tensor | None,
        layer: tuple[Tensor, Tensor | None, bool, Due | None, int],
        traffic: _Traffic,
    ) -> Tensor:
        weight, bias, is_conv, due, multiple = layer
        ctx.save_for_backward(weight if x.requires_grad else None, shard)
        ctx.is_conv, ctx.traffic, ctx.due, ctx.multiple = is_conv, traffic, due, multiple
        ctx.is_trained = weights is not None and weight.requires_grad
        if (product := traffic.first()) is not None:
            return product
        bias = None if bias is None else padded_rows(bias, multiple)
        weight = weight if multiple == 1 else autocast(weight)  # before it is padded, which autocast would cast again
        return F.linear(plain, weight.t() if is_conv else padded_rows(weight, multiple), bias)

    @staticmethod
    @ends_graph
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, shard = ctx.saved_tensors
        if shard is not None:
            ctx.traffic.start_gather(shard)
        below = None
        if ctx.needs_input_grad[0]:
            weight = weight.to(gradient.dtype)  # autocast ran the forward in the gradient's dtype
            weight = weight.t() if ctx.is_conv else padded_rows(weight, ctx.multiple)
            if ctx.traffic.rings:
                is_put_off = ctx.due is not None and ctx.due.is_open
                ctx.traffic.add_below(_Below(gradient, weight, ctx.is_trained and not is_put_off))
            else:
                below = gradient @ weight
        return below, gradient if ctx.needs_input_grad[1] else None, None, None, None, None


class _Weights(torch.autograd.Function):
    """A stand-in for the weights of a layer, ``[..., out and padding]`` without memory; step 3 of a backward."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: nn.Parameter,
        bias: Tensor | None,
        x: Tensor | None,
        shape: tuple[int, ...],
        traffic: _Traffic,
        is_conv: bool,
        due: Due | None,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        # beside what is saved, which checkpointing replaces by a copy that is no parameter
        ctx.weight, ctx.bias_dtype = weight, None if bias is None else bias.dtype
        ctx.traffic, ctx.is_conv, ctx.due = traffic, is_conv, due
        ctx.out = weight.shape[1 if is_conv else 0]
        return autocast(torch.zeros((), dtype=weight.dtype, device=weight.device)).expand(shape)

    @staticmethod
    @ends_graph
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        wants_weight, wants_bias, *_ = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = None
        if ctx.traffic.sharding is not None:
            x = ctx.traffic.gathered()
        if wants_weight:
            of_weight = weight_gradient(ctx.weight, rows, x, is_conv=ctx.is_conv, due=ctx.due, out=ctx.out)
        of_bias = without_padding(rows.sum(0), 0, ctx.out).to(ctx.bias_dtype) if wants_bias else None
        return of_weight, of_bias, None, None, None, None, None


def autocast(x: Tensor) -> Tensor:
    """Return `x` in the dtype that autocast chooses for products."""
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if is_cast else x


def weight_gradient(
    weight: nn.Parameter,
    rows: Tensor,
    x: Tensor,
    *,
    is_conv: bool,
    due: Due | None,
    is_own: bool = False,
    out: int | None = None,
) -> Tensor | None:
    """Return the gradient of a layer's weight; None where it is put off.

    Args:
        weight: ``[out, in]``, or ``[in, out]`` of a Conv1D.
        rows: gradient of the layer's result, ``[rows, out]``.
        x: input, ``[..., in]``.
        is_conv: whether the weight is ``[in, out]``.
        due: takes the gradient while it is open; None where it is never put off.
        is_own: whether nobody else holds the memory of `rows`.
        out: number of results of the layer, where `rows` may have padding after them.
    """
    x, out = x.reshape(-1, x.shape[-1]), rows.shape[1] if out is None else out
    if due is None or not due.is_open:
        return (x.t() @ rows if is_conv else without_padding(rows.t() @ x, 0, out)).to(weight.dtype)
    # a copy: a bias may have taken the same memory for its gradient, and later microbatches add to that
    due_rows = without_padding(rows if is_own else rows.clone(), 1, out)
    due.add(weight, *((x, due_rows) if is_conv else (due_rows, x)))
    return None


def fits(module: nn.Module) -> bool:
    """Whether an `Entrance` computes the layer `module`; torch's own functions compute the others."""
    weight: Any = module.weight
    return weight.is_floating_point() and type(weight) in (Tensor, nn.Parameter)
