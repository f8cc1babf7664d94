"""Divides rows of layers over ranks, where the first rank of one row also takes the ends of others, exactly.

The boundary between two modalities need not be one between two ranks: an encoder's last layers and the language
model's first ones may share a rank. Then none of them can be balanced alone, since what one leaves to the shared rank
is what the other must make room for.

The largest load is found by bisection over whole numbers. A bound can be kept if filling up keeps it: a colocated row
fills its own ranks from its first layer on, the owner fills its ranks from its last layer back, and the layers left
over from both are the least that the shared rank can have. (Bisection for one row: S. H. Bokhari, *Partitioning
problems in parallel, pipelined, and distributed computing*, 1988.) Callers make sure that there is a layer for every
part.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_mm5d.partition.balance import balance

Sums = tuple[int, ...]
"""What a row costs before each of its layers, from 0, and as a whole at the end."""


class Division(NamedTuple):
    """Who gets what.

    Attributes:
        loads: of all ranks: those of the owner, the shared one first, then the own ones of each colocated row.
        owner: layers of each of the owner's parts.
        colocated: layers of each colocated row's parts, the last of which shares the owner's first rank.
    """

    loads: tuple[int, ...]
    owner: tuple[int, ...]
    colocated: tuple[tuple[int, ...], ...]

    @property
    def busiest(self) -> int:
        """The largest load."""
        return max(self.loads)


@dataclass(frozen=True)
class Group:
    """A row and those that end on its first rank.

    Args:
        owner: the row.
        parts: ranks that it is divided over.
        colocated: for each further row, its sums and how many ranks it has to itself before the shared one.
        beside: for each of the owner's ranks, the load that it has in any case, not rising from rank to rank; none by
            default. (Were it to rise, filling up could leave a large layer to a rank that has no room for it.)
    """

    owner: Sums
    parts: int
    colocated: tuple[tuple[Sums, int], ...] = ()
    beside: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert list(self.beside) == sorted(self.beside, reverse=True), self.beside

    @property
    def total(self) -> int:
        """All loads together."""
        return self.owner[-1] + sum(sums[-1] for sums, _ in self.colocated) + sum(self.beside)

    @property
    def ranks(self) -> int:
        """Number of ranks, shared and own."""
        return self.parts + sum(own for _, own in self.colocated)

    def within(self, bound: int) -> Division | None:
        """Return a division whose loads are at most `bound`; None where there is none."""
        beside = self.beside or (0,) * self.parts
        stops = [len(self.owner) - 1]
        for part in range(self.parts - 1, 0, -1):
            start = max(bisect_left(self.owner, self.owner[stops[0]] - bound + beside[part]), part)
            if start >= stops[0]:
                return None
            stops.insert(0, start)
        shared = self.owner[stops[0]] + beside[0]
        colocated: list[list[int]] = []
        for sums, own in self.colocated:
            ends = [0]
            for left in range(own, 0, -1):
                end = min(bisect_right(sums, sums[ends[-1]] + bound) - 1, len(sums) - 1 - left)
                if end <= ends[-1]:
                    return None
                ends.append(end)
            shared += sums[-1] - sums[ends[-1]]
            colocated.append([*ends, len(sums) - 1])
        return self._division([0, *stops], colocated) if shared <= bound else None

    def divide(self, limit: int | None = None) -> Division | None:
        """Return a division with the smallest largest load; None where that is above `limit`."""
        limit = self.total if limit is None else limit
        least = -(-self.total // self.ranks)
        found = self.within(limit) if least <= limit else None
        if found is None:
            return None
        while least < found.busiest:
            middle = (least + found.busiest) // 2
            better = self.within(middle)
            if better is None:
                least = middle + 1
            else:
                found = better
        return found

    def evened(self, division: Division) -> Division:
        """Return the division with what lies on unshared ranks spread evenly, its largest load being kept.

        Filling up leaves the last rank of a row with the rest.
        """
        first = division.owner[0]
        colocated = []
        for (sums, _), sizes in zip(self.colocated, division.colocated, strict=True):
            upto = sum(sizes[:-1])
            colocated.append([0, *accumulate([*_even(sums, 0, upto, len(sizes) - 1), sizes[-1]])])
        owner = [0, *accumulate([first, *_even(self.owner, first, len(self.owner) - 1, self.parts - 1)])]
        found = self._division(owner, colocated)
        return found if found.busiest <= division.busiest else division

    def _division(self, owner: Sequence[int], colocated: Sequence[Sequence[int]]) -> Division:
        """Where each row's parts begin and end, as a division."""
        beside = self.beside or (0,) * self.parts
        loads = [self.owner[b] - self.owner[a] + more for (a, b), more in zip(pairwise(owner), beside, strict=True)]
        for (sums, _), ends in zip(self.colocated, colocated, strict=True):
            *own, shared = (sums[b] - sums[a] for a, b in pairwise(ends))
            loads[0] += shared
            loads += own
        sizes = [tuple(b - a for a, b in pairwise(ends)) for ends in (owner, *colocated)]
        return Division(tuple(loads), sizes[0], tuple(sizes[1:]))


def fewest(sums: Sums, bound: int) -> int | None:
    """Return how few ranks a row needs where none may have more than `bound`; None where a layer has more."""
    start, parts = 0, 0
    while start < len(sums) - 1:
        end = bisect_right(sums, sums[start] + bound) - 1
        if end == start:
            return None
        start, parts = end, parts + 1
    return parts


def _even(sums: Sums, start: int, stop: int, parts: int) -> list[int]:
    return balance([b - a for a, b in pairwise(sums[start : stop + 1])], parts) if parts else []
