"""Says where the tensor that a rank holds lies in the full one.

A rank holds a parameter in one of three forms: the full tensor; its *local* tensor, which tensor parallelism has
sharded; or its *own* rows of the local tensor, where data parallel ranks share it. The shape tells which form it is,
because a shard is shorter than what it is cut from.

Examples in this file are of a ``[8, 4]`` weight with ``tp_size=2`` along dim 0 whose local ``[4, 4]`` tensors two ranks
share, for the first of the ranks with rows 4 to 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from lightning_mm5d.plan.data_shards import DataShard, DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.shards import Range, Shard

Box = tuple[Range, ...]  # one (start, stop) for each dim


class Part(NamedTuple):
    """Where a part of a rank's tensor lies in it, ``((0, 2), (0, 4))``, and in the full one, ``((4, 6), (0, 4))``."""

    held: Box
    full: Box


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a tensor.

    Attributes:
        full: shape of the full tensor: ``(8, 4)``.
        local: shape of the local tensor: ``(4, 4)``.
        own: shape of the rank's own rows, or of the local tensor where they are not shared: ``(2, 4)``.
        shard: how tensor parallelism shards it; None where it does not.
        index: of the rank's tensor parallel shard: 1.
        rows: which rows are the rank's own; None where the tensor is not shared.
    """

    full: tuple[int, ...]
    local: tuple[int, ...]
    own: tuple[int, ...]
    shard: Shard | None
    index: int
    rows: DataShard | None

    def parts(self, shape: Sequence[int]) -> list[Part]:
        """Return the parts of a tensor of `shape`, which is one of the three."""
        if tuple(shape) == self.full:
            return [Part(whole_box(self.full), whole_box(self.full))]
        if self.shard is None:
            parts = [Part(whole_box(self.local), whole_box(self.full))]
        else:
            parts, offset, dim = [], 0, self.shard.dim
            for start, stop in self.shard.ranges[self.index]:
                held = (offset, offset + stop - start)
                full = with_range(whole_box(self.full), dim, (start, stop))
                if (across := self.shard.across) is not None:
                    full = with_range(full, across.dim, across.ranges[self.index])
                parts.append(Part(with_range(whole_box(self.local), dim, held), full))
                offset += stop - start
        if self.rows is None or tuple(shape) != self.own:
            return parts
        dim, (first, last) = self.rows.dim, self.rows.ranges[self.rows.place]
        found = []
        for part in parts:
            low, high = max(first, part.held[dim][0]), min(last, part.held[dim][1])
            start = part.full[dim][0] + low - part.held[dim][0]
            if low < high:
                rows = (low - first, high - first)
                found.append(
                    Part(with_range(part.held, dim, rows), with_range(part.full, dim, (start, start + high - low)))
                )
        return found

    def cut(self, full: Tensor, held: Tensor) -> Tensor:
        """Write the rank's part of a full tensor to `held`, which has one of the three forms; return it."""
        for part in self.parts(held.shape):
            narrowed(held, part.held).copy_(narrowed(full, part.full))
        return held

    def own_part(self, tensor: Tensor) -> Tensor:
        """Return the rank's own rows of its local tensor, or a tensor that is no local one as it is."""
        return self.rows.rows(tensor) if self.rows is not None and tensor.shape == self.local else tensor

    def view(self, tensor: Tensor, part: Part) -> Tensor:
        """Return a part of the local tensor as a view of `tensor`, which has one of the three forms."""
        box = part.full if tensor.shape == self.full else part.held
        if self.rows is not None and tensor.shape == self.own:
            first = self.rows.ranges[self.rows.place][0]
            start, stop = box[self.rows.dim]
            box = with_range(box, self.rows.dim, (start - first, stop - first))
        return narrowed(tensor, box)


class Holdings:
    """What the ranks of a plan hold of the tensors of a module.

    Args:
        plan: all stages.
        root: the LightningModule, or a copy of it, which says which names are tied.
    """

    def __init__(self, plan: Plan, root: nn.Module) -> None:
        self._plan, self._shards = plan, DataShards(plan)
        first: dict[int, str] = {}
        tensors = root.named_parameters(remove_duplicate=False) if self._shards.exist else ()
        # rows are those of the first name of a tied parameter
        self._first = {name: first.setdefault(id(tensor), name) for name, tensor in tensors}

    def of(self, name: str, rank: int, shape: Sequence[int]) -> Holding:
        """Return what `rank`, which holds it, holds of a parameter or buffer that has `shape` in some form."""
        rows = self._rows(name, rank)
        shard = self._plan.division.shards.get(name)
        full = local = self.full_shape(name, shape)
        index = 0
        if shard is not None:
            index = self._plan.ownership.shard_index(name, rank)
            local = shard.local_shape(full, index)
        return Holding(full, local, rows.own_shape(local) if rows else local, shard, index, rows)

    def full_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the full tensor, given that of any form of it."""
        if name in self._first and name in self._plan.shapes:
            return self._plan.shapes[name]
        shard = self._plan.division.shards.get(name)
        return tuple(shape) if shard is None else shard.full_shape(shape)

    def keepers(self, name: str) -> tuple[int, ...]:
        """Return the ranks whose own rows make up a tensor: its primary ranks, and those that share with them."""
        primary, shard = self._plan.ownership.primary_ranks(name), self._plan.division.shards.get(name)
        chosen = primary[:1] if shard is None else [primary[index] for index in shard.distinct]
        found: list[int] = []
        for rank in chosen:
            rows = self._rows(name, rank)
            found += (rank,) if rows is None else rows.block
        return tuple(found)

    def _rows(self, name: str, rank: int) -> DataShard | None:
        return self._shards.of(self._first[name], rank) if name in self._first else None


def narrowed(tensor: Tensor, box: Sequence[Range]) -> Tensor:
    """Return a view of a box of `tensor`."""
    for dim, (start, stop) in enumerate(box):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, length) for length in shape)


def with_range(box: Box, dim: int, held: Range) -> Box:
    """Return a box with another range along `dim`."""
    return (*box[:dim], held, *box[dim + 1 :])
