"""How one tensor is divided over the ranks of a tensor parallel group, and how its parts become whole again.

Nothing has to divide: a shard is a list of index ranges along one dim, of any lengths, so vocabularies, widths and
heads are dealt out unevenly where they must, fused projections are divided part by part, and ranks that need the same
key and value heads hold the same ranges.

It refuses nothing: its ranges are made by `even` and `heads_of`, or checked by who makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Range = tuple[int, int]


class HeadRanges(NamedTuple):
    """The heads of one rank: ranges of query heads, and of the key and value heads that they attend with."""

    query: Range
    key_value: Range


class Segment(NamedTuple):
    """Part of a rank's shard: `length` rows from `start` on that the ranks at `sharers` hold alike."""

    start: int
    length: int
    sharers: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A tensor of which each rank of a group holds some index ranges along one dim.

    Args:
        dim: what is divided.
        size: length of that dim of the whole tensor.
        ranges: per rank ``(start, stop)`` in the whole tensor, in the order in which the rank holds them.
    """

    dim: int
    size: int
    ranges: tuple[tuple[Range, ...], ...]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Length of the dim on each rank."""
        return tuple(sum(stop - start for start, stop in held) for held in self.ranges)

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Return a copy of what `rank` holds of `whole`."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]], self.dim)

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor; `parts` has one for each rank."""
        shape = [*parts[0].shape]
        shape[self.dim] = self.size
        whole = parts[0].new_empty(shape)
        for part, held in zip(parts, self.ranges, strict=True):
            self.put(whole, part, held)
        return whole

    def put(self, whole: Tensor, part: Tensor, held: Sequence[Range]) -> None:
        """Write what one rank holds, its ranges `held`, to `whole`."""
        offset = 0
        for start, stop in held:
            whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, offset, stop - start))
            offset += stop - start

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The parts of a rank's shard by who else holds them; neighbours with the same holders are one."""
        edges = sorted({edge for held in self.ranges for one in held for edge in one})
        found: list[Segment] = []
        offset = 0
        for start, stop in self.ranges[rank]:
            inner = [edge for edge in edges if start < edge < stop]
            for low, high in pairwise([start, *inner, stop]):
                sharers = tuple(
                    other
                    for other, held in enumerate(self.ranges)
                    if any(first <= low and high <= last for first, last in held)
                )
                if found and found[-1].sharers == sharers and found[-1].start + found[-1].length == offset:
                    found[-1] = found[-1]._replace(length=found[-1].length + high - low)
                elif high > low:
                    found.append(Segment(offset, high - low, sharers))
                offset += high - low
        return tuple(found)


def even(size: int, num_ranks: int) -> tuple[Range, ...]:
    """Divide ``range(size)`` over ranks, what is left over to the first ones; ranks may get nothing."""
    lengths = [size // num_ranks + (rank < size % num_ranks) for rank in range(num_ranks)]
    return tuple(pairwise(accumulate(lengths, initial=0)))


def heads_of(query: int, key_value: int, num_ranks: int) -> tuple[HeadRanges, ...] | None:
    """Divide attention heads over ranks, so that on each rank all key and value heads serve as many query heads.

    With as many key and value heads as ranks, or more, these are dealt out with the query heads that they serve. With
    fewer, each goes to several ranks, which divide its query heads.

    Args:
        query: number of query heads, a multiple of `key_value`.
        key_value: number of key and value heads.
        num_ranks: of the group.

    Returns:
        Per rank its heads; None where there are fewer query heads than ranks, or the ranks of a key and value head
        are more than its query heads.
    """
    groups = query // key_value
    if key_value >= num_ranks:
        return tuple(HeadRanges((a * groups, b * groups), (a, b)) for a, b in even(key_value, num_ranks))
    found: list[HeadRanges] = []
    for head, (first, last) in enumerate(even(num_ranks, key_value)):
        if last - first > groups:
            return None
        for a, b in even(groups, last - first):
            found.append(HeadRanges((head * groups + a, head * groups + b), (head, head + 1)))
    return tuple(found)


def scaled(held: Range, width: int, offset: int = 0) -> Range:
    """The rows of the units in `held`, each `width` rows, from `offset` on."""
    return offset + held[0] * width, offset + held[1] * width


def joined(parts: Iterable[Sequence[Range]], dim: int, size: int) -> Shard:
    """A shard whose every rank holds one range of each of `parts`, ranges per rank; empty ones are left out."""
    per_rank = zip(*parts, strict=True)
    ranges = tuple(tuple(one for one in held if one[0] < one[1]) or (held[0],) for held in per_rank)
    return Shard(dim, size, ranges)
