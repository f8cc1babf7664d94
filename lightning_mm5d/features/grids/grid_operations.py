"""Products and norms of hidden states that are in blocks on a grid: SUMMA for 2D and 2.5D, gathers for 3D.

Of ``Y = X W`` a rank has a block of each. In 2D and 2.5D (van de Geijn and Watts 1997) panel l of ``X`` comes from
column l along the row of ranks, panel l of ``W`` from row l along the column of ranks, and each rank adds up the
products of the panels. The backward has the same loop: the panels come again, ``dY W`` of a panel is summed to the rank
that has this part of ``X``, ``X^T dY`` to the one that has this part of ``W``. The next panels travel during a product,
and sums during the next one.

In 3D (Agarwal et al. 1995) a rank gathers its rows of ``X`` and its block of ``W``, multiplies once, and the results
are summed and scattered, by rows of finer split; the axes of rows and of results change places with each layer.

Shapes: inputs ``[rows, ..., in]``, weights ``[out, in]``, or ``[in, out]`` of a Conv1D; all of them local.

The input of a norm is split over columns, and the ranks that have a row share its mean. A norm counts as known where
its own forward gives what the formula gives of random numbers; so it does not matter what its class is called, or
whether its scale is kept less one. Any other module is computed on the full width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.sharded.collectives import TensorGroup, Wait, differentiable
from lightning_mm5d.sharded.torch_internals import ends_graph

Sums = Callable[[Tensor], Tensor]
_EPSILONS = ("eps", "variance_epsilon", "epsilon")


# --- products ---


class Line(TensorGroup):
    """The ranks of one line of the grid."""

    def start_broadcast(self, local: Tensor, shape: Sequence[int], source: int) -> Wait:
        """Start to send `local` of the rank at `source` to all; return what waits for it and returns it.

        Args:
            local: what this rank would send.
            shape: of what the rank at `source` sends.
            source: index in the line.
        """
        buffer = local.detach().contiguous() if self.index == source else local.new_empty(tuple(shape))
        return self._start(partial(dist.broadcast, group_src=source), buffer)

    def start_sum_to(self, part: Tensor, target: int) -> Wait:
        """Start to sum `part` over the line to the rank at `target`; it takes the memory of `part`."""
        return self._start(partial(dist.reduce, group_dst=target), part.contiguous())

    def _start(self, collective: Callable[..., Any], buffer: Tensor) -> Wait:
        if self.is_silent or not buffer.numel():
            return lambda: buffer
        work = collective(buffer, group=self.group, async_op=True)
        self.moved += buffer.nbytes * (self.size - 1) / self.size  # all ranks but the last pass it on
        return self._after(work, lambda: buffer)


@dataclass(frozen=True)
class Panels:
    """A linear layer in 2D or 2.5D.

    Attributes:
        row: the ranks that have the other columns of these rows: the axis ``c``.
        column: the ranks that have the other rows of these columns: the axis ``b``.
        lengths: of the q parts of the layer's inputs.
        is_conv: whether the weight is ``[in, out]``.
    """

    row: Line
    column: Line
    lengths: tuple[int, ...]
    is_conv: bool

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return _Summa.apply(x, weight, self)

    def start(self, x: Tensor | None, weight: Tensor | None, panel: int) -> tuple[Wait | None, Wait | None]:
        """Start to fetch a panel of the inputs, and one of the weights; None where it is not needed."""
        of_x = of_w = None
        length = self.lengths[panel]
        if x is not None:
            of_x = self.row.start_broadcast(x, (*x.shape[:-1], length), panel)
        if weight is not None:
            shape = (length, weight.shape[1]) if self.is_conv else (weight.shape[0], length)
            of_w = self.column.start_broadcast(weight, shape, panel)
        return of_x, of_w

    def all(self, x: Tensor | None, weight: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield the panels of inputs and of weights ``[out, panel]``; the next one is under way meanwhile."""
        following = self.start(x, weight, 0)
        for panel in range(len(self.lengths)):
            arriving = following
            if panel + 1 < len(self.lengths):
                following = self.start(x, weight, panel + 1)
            of_x, of_w = (None if wait is None else wait() for wait in arriving)
            yield of_x, of_w.t() if of_w is not None and self.is_conv else of_w


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, panels: Panels) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.panels = panels
        out = weight.shape[1] if panels.is_conv else weight.shape[0]
        y = x.new_zeros(_rows(x), out)
        for of_x, of_w in panels.all(x, weight):
            assert of_x is not None
            assert of_w is not None
            y.addmm_(of_x.reshape(y.shape[0], of_x.shape[-1]), of_w.t())
        return y.view(*x.shape[:-1], out)

    @staticmethod
    @ends_graph
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        panels: Panels = ctx.panels
        wants_x, wants_weight, _ = ctx.needs_input_grad
        rows = gradient.reshape(_rows(gradient), gradient.shape[-1])
        gradients: list[Tensor | None] = [None, None]
        due: tuple[Wait | None, Wait | None] = (None, None)

        def settle(panel: int) -> None:
            for kind, (wait, line) in enumerate(zip(due, (panels.row, panels.column), strict=True)):
                if wait is not None:
                    total = wait()
                    gradients[kind] = total if line.index == panel else gradients[kind]

        for panel, (of_x, of_w) in enumerate(panels.all(x if wants_weight else None, weight if wants_x else None)):
            to_x = to_weight = None
            if of_w is not None:
                to_x = panels.row.start_sum_to(rows @ of_w, panel)
            if of_x is not None:
                inputs = of_x.reshape(rows.shape[0], of_x.shape[-1])
                part = inputs.t() @ rows if panels.is_conv else rows.t() @ inputs
                to_weight = panels.column.start_sum_to(part, panel)
            settle(panel - 1)
            due = to_x, to_weight
        settle(len(panels.lengths) - 1)
        return gradients[0] if gradients[0] is None else gradients[0].view(x.shape), gradients[1], None


@dataclass(frozen=True)
class Cube:
    """A linear layer in 3D.

    Attributes:
        input_line: the axis of the inputs' columns, over which results are summed.
        output_line: the axis of the results' columns, over which rows of the inputs are gathered.
        depth: the axis ``a``, over which blocks of weights are gathered.
        rows: length of each part of this ``a``'s rows.
        lengths: of the parts of this block of the weight, along the dim of the hidden width.
        dim: that one.
        is_conv: whether the weight is ``[in, out]``.
    """

    input_line: Line
    output_line: Line
    depth: Line
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    dim: int
    is_conv: bool

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return _Product3D.apply(x, weight, self)


class _Product3D(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cube: Cube) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.cube = cube
        all_x = cube.output_line.start_gather(x, 0, cube.rows, exact=True)
        all_weight = cube.depth.start_gather(weight, cube.dim, cube.lengths, exact=True)
        full, block = all_x(), all_weight()
        return cube.input_line.sum_scattered(full @ (block if cube.is_conv else block.t()), 0, cube.rows)

    @staticmethod
    @ends_graph
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        cube: Cube = ctx.cube
        wants_x, wants_weight, _ = ctx.needs_input_grad
        all_gradients: Wait = cube.input_line.start_gather(gradient, 0, cube.rows, exact=True)
        all_weight = cube.depth.start_gather(weight, cube.dim, cube.lengths, exact=True) if wants_x else None
        all_x = cube.output_line.start_gather(x, 0, cube.rows, exact=True) if wants_weight else None
        full = all_gradients()
        of_x: Wait | None = None
        of_weight: Wait | None = None
        if all_weight is not None:
            block = all_weight()
            below = full @ (block.t() if cube.is_conv else block)
            of_x = cube.output_line.start_sum_scattered(below, 0, cube.rows)
        if all_x is not None:
            rows, inputs = full.reshape(_rows(full), full.shape[-1]), all_x()
            inputs = inputs.reshape(rows.shape[0], inputs.shape[-1])
            part = inputs.t() @ rows if cube.is_conv else rows.t() @ inputs
            of_weight = cube.depth.start_sum_scattered(part, cube.dim, cube.lengths)
        return (of_x and of_x()), (of_weight and of_weight()), None


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


# --- norms ---


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
            output = functional_call(module, held, (x,))
    except Exception:  # not a module of one tensor
        return None
    if not isinstance(output, Tensor) or output.shape != x.shape:
        return None
    for centers, offset, narrows in product((False, True), (0.0, 1.0), (False, True)):
        norm = Norm(width, epsilon, centers, offset, narrows)
        expected, _, _ = norm.of(x, held["weight"], held.get("bias"), lambda total: total)
        if torch.allclose(output.double(), expected.double(), rtol=1e-6 if narrows else 1e-12, atol=1e-12):
            return norm
    return None


def normed(module: Any, x: Tensor, norm: Norm, line: TensorGroup) -> Tensor:
    """Return this rank's columns of the norm of an `x` that is split over the columns of `line`."""
    kind = x.device.type
    # autocast runs a layer norm in float32, and its result stays so
    dtype = torch.float32 if norm.centers and torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype
    return _Normed.apply(x, module.weight, getattr(module, "bias", None), norm, line, dtype)


class _Normed(torch.autograd.Function):
    """A norm that keeps its input and two numbers of each row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, line: TensorGroup, dtype: torch.dtype
    ) -> Tensor:
        output, mean, scale = norm.of(x, weight, bias, line.sum)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.norm, ctx.line, ctx.bias_dtype = norm, line, None if bias is None else bias.dtype
        return output.to(dtype)

    @staticmethod
    @ends_graph
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
        x, lambda local: line.gather(local, -1, lengths), lambda gradient: line.sum_scattered(gradient, -1, lengths)
    )
    return line.local_of(type(module).forward(module, full), -1, lengths).contiguous()
