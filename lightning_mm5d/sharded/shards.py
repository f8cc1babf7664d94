"""Which index ranges of a parameter each rank of a tensor parallel group holds, and how they are cut and merged.

The ranges lie along one dim and have any lengths. So vocabularies, widths and heads may be assigned unevenly, each
projection of a fused weight is sharded by itself, and ranks that need the same key and value heads hold the same
ranges. Ranks that form a grid hold blocks: of these rows one range along a second dim, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mm5d.layout.layout import even_ranges

Range = tuple[int, int]


class HeadRanges(NamedTuple):
    """The heads of one rank: ranges of query heads, and of the key and value heads that they attend with."""

    query: Range
    key_value: Range


class Segment(NamedTuple):
    """Rows of a rank's shard: `length` of them from `start` on, which the ranks at `sharers` hold too."""

    start: int
    length: int
    sharers: tuple[int, ...]


@dataclass(frozen=True)
class Across:
    """The second sharded dim of a tensor in blocks; the ranges of two ranks are equal or have no index in common.

    Args:
        dim: the second dim.
        size: length of that dim of the full tensor.
        ranges: per rank ``(start, stop)`` in the full tensor.
    """

    dim: int
    size: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Shard:
    """A tensor of which each rank of a group holds some index ranges along one dim.

    Args:
        dim: the sharded dim.
        size: length of that dim of the full tensor.
        ranges: per rank ``(start, stop)`` in the full tensor, in the order in which the rank holds them.
        across: the ranges along a second dim, of tensors in blocks.
    """

    dim: int
    size: int
    ranges: tuple[tuple[Range, ...], ...]
    across: Across | None = None

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Length of the dim on each rank."""
        return tuple(sum(stop - start for start, stop in held) for held in self.ranges)

    @cached_property
    def distinct(self) -> tuple[int, ...]:
        """The ranks with rows that no rank before them holds; their local tensors make up the full one."""
        ranks = range(len(self.ranges))
        return tuple(rank for rank in ranks if any(held.sharers[0] == rank for held in self.segments(rank)))

    def is_full(self, tensor: Tensor) -> bool:
        """Whether `tensor` has the length of the full one; a local tensor of that length is equal to it."""
        across = self.across
        return tensor.shape[self.dim] == self.size and (across is None or tensor.shape[across.dim] == across.size)

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the full tensor, given that of the full or a local one."""
        full = [*shape]
        full[self.dim] = self.size
        if self.across is not None:
            full[self.across.dim] = self.across.size
        return tuple(full)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of what `rank` holds, given that of the full tensor."""
        local = [*shape]
        local[self.dim] = self.lengths[rank]
        if self.across is not None:
            start, stop = self.across.ranges[rank]
            local[self.across.dim] = stop - start
        return tuple(local)

    def is_beside(self, rank: int, other: int) -> bool:
        """Whether two ranks hold the same range along the second dim, so that equal rows are equal parts."""
        return self.across is None or self.across.ranges[rank] == self.across.ranges[other]

    def beside(self, full: Tensor, rank: int) -> Tensor:
        """Return a view of `full` with the range of `rank` along the second dim."""
        if self.across is None:
            return full
        start, stop = self.across.ranges[rank]
        return full.narrow(self.across.dim, start, stop - start)

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """Return a copy of what `rank` holds of `full`."""
        full = self.beside(full, rank)
        return torch.cat([full.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]], self.dim)

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full tensor, given the local tensor of each rank."""
        full = shards[0].new_empty(self.full_shape(shards[0].shape))
        for rank, local in enumerate(shards):
            self.put(self.beside(full, rank), local, self.ranges[rank])
        return full

    def put(self, full: Tensor, local: Tensor, held: Sequence[Range]) -> None:
        """Write the local tensor of the rank that holds the ranges `held` to `full`, of blocks to what is `beside`."""
        offset = 0
        for start, stop in held:
            full.narrow(self.dim, start, stop - start).copy_(local.narrow(self.dim, offset, stop - start))
            offset += stop - start

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """A rank's shard in segments of rows that the same ranks hold."""
        edges = sorted({edge for held in self.ranges for span in held for edge in span})
        segments: list[Segment] = []
        offset = 0
        for start, stop in self.ranges[rank]:
            inner = [edge for edge in edges if start < edge < stop]
            for low, high in pairwise([start, *inner, stop]):
                sharers = tuple(
                    other
                    for other, held in enumerate(self.ranges)
                    if self.is_beside(rank, other) and any(first <= low and high <= last for first, last in held)
                )
                if segments and segments[-1].sharers == sharers and segments[-1].start + segments[-1].length == offset:
                    segments[-1] = segments[-1]._replace(length=segments[-1].length + high - low)
                elif high > low:
                    segments.append(Segment(offset, high - low, sharers))
                offset += high - low
        return tuple(segments)


def heads_of(query: int, key_value: int, num_ranks: int) -> tuple[HeadRanges, ...] | None:
    """Assign attention heads to ranks, so that on each rank all key and value heads serve equally many query heads.

    With as many key and value heads as ranks, or more, these are assigned with the query heads that they serve. With
    fewer, each goes to several ranks, which share its query heads.

    Args:
        query: number of query heads, a multiple of `key_value`.
        key_value: number of key and value heads.
        num_ranks: of the group.

    Returns:
        Per rank its heads; None where there are fewer query heads than ranks, or more ranks of a key and value head
        than it has query heads.
    """
    groups = query // key_value
    if key_value >= num_ranks:
        return tuple(HeadRanges((a * groups, b * groups), (a, b)) for a, b in even_ranges(key_value, num_ranks))
    heads: list[HeadRanges] = []
    for head, (first, last) in enumerate(even_ranges(num_ranks, key_value)):
        if last - first > groups:
            return None
        for a, b in even_ranges(groups, last - first):
            heads.append(HeadRanges((head * groups + a, head * groups + b), (head, head + 1)))
    return tuple(heads)


def scaled(held: Range, width: int, offset: int = 0) -> Range:
    """Return the range of rows of a range of units, each `width` rows, the first of which starts at `offset`."""
    return offset + held[0] * width, offset + held[1] * width


def joined(projections: Iterable[Sequence[Range]], dim: int, size: int) -> Shard:
    """Return the shard of a fused weight: each rank holds its range of each projection; empty ranges are left out."""
    per_rank = zip(*projections, strict=True)
    ranges = tuple(tuple(span for span in held if span[0] < span[1]) or (held[0],) for held in per_rank)
    return Shard(dim, size, ranges)
