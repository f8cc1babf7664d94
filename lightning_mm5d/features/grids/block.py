"""A hidden state in blocks over a grid of ranks, which acts as the full tensor between layers.

Each rank has some rows (samples) and some columns of a ``[B, S, D]`` tensor. Layers on the grid take the local block;
any other function gets the full tensor, which is gathered for it: code between layers, hooks that collect hidden
states, the norm after the last layer. `scattered` is the way in.

The grid of tensor parallel ranks, and what each of them holds of a hidden state and of a weight: plain data.

A rank has three coordinates ``(a, b, c)`` and the index ``(a * q + b) * q + c``; an *axis* of the grid has the ranks
that differ in one coordinate. What is split over the axes:

==== ============== ======================== ======================== =========================
mode sizes a, b, c  rows, columns outside    rows, columns inside     a weight: even dim, units
==== ============== ======================== ======================== =========================
2d   1, q, q        b, c                     b, c                     b, c into; c, b out of
2.5d depth, q, q    (a, b), c                (a, b), c                as 2d, equal for all a
3d   q, q, q        (a, c), b                (a, b), c                (b, a), c
==== ============== ======================== ======================== =========================

Rows are samples. *Outside* of an attention or a MLP the columns are the hidden width, split evenly; *inside*, between
its first layers (`column`) and its last (`row`), they are units such as heads. Of a weight, the dim of the hidden width
is the even one, the other has the units. After L. Cannon's descendants: 2D is SUMMA as in Optimus (Xu et al. 2021,
arXiv:2104.05343), 2.5D Tesseract (Wang et al. 2021, arXiv:2105.14500), 3D that of Bian et al. 2021 (arXiv:2105.14450).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.grids.fields import grid_side
from lightning_mm5d.layout.layout import even_ranges
from lightning_mm5d.sharded.collectives import TensorGroup, differentiable
from lightning_mm5d.sharded.operations import requires_grad, size_of
from lightning_mm5d.sharded.shards import Across, Range, Shard
from lightning_mm5d.sharded.tensor import Sharded, as_sharded, functions_named, without_graph
from lightning_mm5d.sharded.torch_internals import in_backward

Axis = Literal["a", "b", "c"]
AXES: tuple[Axis, ...] = ("a", "b", "c")
Side = Literal["outside", "inside"]
Kind = Literal["column", "row"]


class Place(NamedTuple):
    """The coordinates of a rank in its grid."""

    a: int
    b: int
    c: int


@dataclass(frozen=True)
class GridShape:
    """A grid of tensor parallel ranks.

    Args:
        mode: ``2d``, ``2.5d`` or ``3d``.
        depth: ranks along the axis ``a``.
        side: ranks along the axes ``b`` and ``c``, q.
    """

    mode: str
    depth: int
    side: int

    @classmethod
    def of(cls, modality: Modality) -> GridShape | None:
        """Return the grid of a modality; None where its layers are sharded along one dim, or not at all."""
        mode, size, depth = modality.tensor.tp_mode, modality.tp_size, modality.tensor.tp_depth
        if mode == "1d" or size == 1:
            return None
        side = grid_side(mode, size, depth)
        return cls(mode, side if mode == "3d" else depth, side)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.depth * self.side**2

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The coordinates of all ranks, by index."""
        sides = range(self.side)
        return tuple(Place(a, b, c) for a in range(self.depth) for b in sides for c in sides)

    def index(self, place: Place) -> int:
        """Return the index of the rank at `place`."""
        return (place.a * self.side + place.b) * self.side + place.c

    def lines(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return the indices of the ranks of every line along an axis."""
        lines: dict[Place, list[int]] = {}
        for index, place in enumerate(self.places):
            lines.setdefault(place._replace(**{axis: 0}), []).append(index)
        return tuple(map(tuple, lines.values()))

    def column_axis(self, side: Side) -> Axis:
        """Return the axis over which columns are split."""
        return "b" if self.mode == "3d" and side == "outside" else "c"

    def row_axis(self, side: Side) -> Axis:
        """Return the axis over which the rows of one ``a`` are split again."""
        return "c" if self.mode == "3d" and side == "outside" else "b"

    def columns(self, side: Side, index: int) -> int:
        """Return which of the q parts of the columns a rank has."""
        return int(getattr(self.places[index], self.column_axis(side)))

    def rows(self, side: Side, index: int, total: int) -> Range:
        """Return which of `total` rows a rank has."""
        place = self.places[index]
        start, stop = even_ranges(total, self.depth)[place.a]
        first, last = even_ranges(stop - start, self.side)[getattr(place, self.row_axis(side))]
        return start + first, start + last

    # --- parameters ---

    def weight(self, kind: Kind, units: Shard, dim: int, size: int) -> Shard:
        """Return who holds which block of a weight.

        Args:
            kind: ``column`` for a way into an attention or a MLP, ``row`` for the way out.
            units: the ranges of each of the q parts of the dim of units.
            dim: that of the hidden width.
            size: of that dim.
        """
        is_3d = self.mode == "3d"
        of_units: Axis = "c" if is_3d or kind == "column" else "b"
        evens = even_ranges(size, self.side)
        ranges = []
        for place in self.places:
            start, stop = evens[place.c if not is_3d and kind == "row" else place.b]
            first, last = even_ranges(stop - start, self.depth)[place.a] if is_3d else (0, stop - start)
            ranges.append((start + first, start + last))
        held = tuple(units.ranges[getattr(place, of_units)] for place in self.places)
        return Shard(units.dim, units.size, held, Across(dim, size, tuple(ranges)))

    def vector(self, side: Side, parts: Shard) -> Shard:
        """Return who holds which of the q `parts` of a bias, or of the scale of a norm: all ranks of its columns."""
        held = tuple(parts.ranges[self.columns(side, index)] for index in range(self.size))
        return Shard(parts.dim, parts.size, held)

    def even(self, size: int) -> Shard:
        """Return the q even parts of the hidden width."""
        return Shard(0, size, tuple((held,) for held in even_ranges(size, self.side)))


@dataclass(frozen=True, eq=False)
class Frame:
    """Where the blocks of a tensor lie: rows along dim 0, columns along another.

    Rows are samples, then copies of the first sample, whose results go nowhere. With fewer samples than ranks along the
    rows each rank without one has a copy, since many modules cannot compute with no samples. In 3D all ranks have
    equally many rows: outside and inside of an attention a rank has other samples, and code of attentions gives the
    number of those that it takes to what it computes from them.

    Args:
        shape: the grid.
        side: outside or inside of an attention or a MLP.
        samples: their number.
        dim: of the columns, negative.
        columns: ranges of each of the q parts.
        size: number of all columns.
        group: all ranks of the grid.
    """

    shape: GridShape
    side: Side
    samples: int
    dim: int
    columns: tuple[Range, ...]
    size: int
    group: TensorGroup

    @property
    def rows(self) -> int:
        """Number of rows of all ranks: samples, and copies."""
        parts = self.shape.depth * self.shape.side
        return -(-self.samples // parts) * parts if self.shape.mode == "3d" else max(self.samples, parts)

    def own_rows(self, full: Tensor, index: int | None = None) -> Tensor:
        """Return a rank's rows of what has one for each sample, by default this rank's; a view where none is a copy."""
        start, stop = self.shape.rows(self.side, self.group.index if index is None else index, self.rows)
        rows = full[start:stop]
        copies = stop - start - len(rows)
        return torch.cat([rows, full[:1].expand(copies, *full.shape[1:])]) if copies else rows

    def place(self, index: int) -> tuple[Range, Range]:
        """Return the rows and the columns of a rank."""
        return self.shape.rows(self.side, index, self.rows), self.columns[self.shape.columns(self.side, index)]

    def local_of(self, full: Tensor, index: int | None = None) -> Tensor:
        """Return a rank's block, by default this rank's; a view where none is a copy."""
        index = self.group.index if index is None else index
        first, last = self.place(index)[1]
        return self.own_rows(full, index).narrow(self.dim, first, last - first)

    def own_gradient(self, full: Tensor) -> Tensor:
        """Return the gradient of this rank's block, given that of the full tensor: zero for copies."""
        gradient = self.local_of(full).clone(memory_format=torch.contiguous_format)
        gradient[max(self.samples - self.place(self.group.index)[0][0], 0) :] = 0
        return gradient

    def gathered(self, local: Tensor) -> Tensor:
        """Return the full tensor, outside of autograd's graph."""
        full_shape = [*local.shape]
        full_shape[0], full_shape[self.dim] = self.rows, self.size
        full = local.new_empty(full_shape)
        of_rows = replace(self, samples=self.rows)
        views = [of_rows.local_of(full, index) for index in range(self.group.size)]
        lengths = [view.numel() for view in views]
        flat = self.group.gather(local.detach().reshape(-1), 0, lengths, exact=True)
        for view, part in zip(views, flat.split(lengths), strict=True):
            view.copy_(part.view(view.shape))
        return full[: self.samples].contiguous()

    def wrapped(self, local: Tensor) -> Block:
        """Return the tensor of which `local` is this rank's block."""
        return as_sharded(local, self, Block)


def even_frame(shape: GridShape, samples: int, size: int, group: TensorGroup) -> Frame:
    """Return the frame of a hidden state of `size` columns between layers."""
    return Frame(shape, "outside", samples, -1, tuple(even_ranges(size, shape.side)), size, group)


def scattered(full: Tensor, frame: Frame) -> Tensor:
    """Return this rank's block of the replicated `full`; the gradients of all blocks are gathered."""

    def local(x: Tensor) -> Tensor:
        return frame.local_of(x).clone(memory_format=torch.contiguous_format)

    return differentiable(full, local, frame.gathered)


class Block(Sharded):
    """A tensor of which this rank has a block; see the module."""

    rules: ClassVar[dict[Any, Callable[..., Any]]] = {}
    travels_local: ClassVar[bool] = False
    sharding: Frame  # type: ignore[assignment]

    def full(self) -> Tensor:
        """The full tensor, plain and replicated: a collective."""
        return differentiable(self.local, self.sharding.gathered, self.sharding.own_gradient)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Of the full tensor."""
        sizes = [*self._raw.shape]
        sizes[0], sizes[self.sharding.dim] = self.sharding.samples, self.sharding.size
        return torch.Size(sizes)


def _of_local(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(args[0].local, *args[1:], **kwargs)


def _itself(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, other = args
    if x is not other:
        return NotImplemented
    return x if torch.is_grad_enabled() else without_graph(x._raw.detach(), x.sharding, Block)


def _register_hook(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, hook = args
    frame: Frame = x.sharding

    def of_local(gradient: Tensor) -> Tensor | None:
        changed = hook(frame.wrapped(gradient))
        if changed is None or isinstance(changed, Block):
            return None if changed is None else changed.local
        return frame.own_gradient(changed)

    return func(x.local, of_local, **kwargs)


def _kept_gradient(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    gradient = func(args[0].local)
    # inside a backward a checkpoint hands it to autograd, which knows the local tensor alone
    return gradient if gradient is None or in_backward() else args[0].sharding.wrapped(gradient)


def _repr(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    frame = args[0].sharding
    return f"Block({tuple(args[0].shape)}, rows and columns {frame.place(frame.group.index)}: {args[0].local!r})"


_TELLING = """
    dtype device layout grad_fn is_leaf is_cuda is_cpu is_meta is_sparse is_nested is_quantized is_mps is_xpu
    is_floating_point is_complex is_inference get_device dim ndim ndimension retain_grad retains_grad
"""
Block.rules |= dict.fromkeys(functions_named(_TELLING, Tensor), _of_local)
Block.rules |= {
    Tensor.requires_grad.__get__: requires_grad,  # type: ignore[attr-defined]
    Tensor.shape.__get__: lambda func, args, kwargs: args[0].shape,  # type: ignore[attr-defined]
    Tensor.size: size_of,
    Tensor.numel: lambda func, args, kwargs: args[0].shape.numel(),
    Tensor.nelement: lambda func, args, kwargs: args[0].shape.numel(),
    Tensor.__len__: lambda func, args, kwargs: args[0].shape[0],
    Tensor.view_as: _itself,
    Tensor.register_hook: _register_hook,
    Tensor.grad.__get__: _kept_gradient,  # type: ignore[union-attr]
    Tensor.__repr__: _repr,
}
