"""Divides rows of layers over ranks with the smallest possible largest load, also where rows share a rank.

An encoder's last layers and the language model's first layers may share a rank. The two rows must then be balanced
together, because the shared rank has the load of both.

Bisection over whole numbers finds the smallest bound that all ranks can keep. A greedy filling tests a bound: a
colocated row fills its own ranks from its first layer on, the owner fills its ranks from its last layer back, and the
remaining layers are the least load that the shared rank can have. (Bisection for one row: S. H. Bokhari, *Partitioning
problems in parallel, pipelined, and distributed computing*, 1988.) Callers make sure that every part gets a layer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_mm5d.partition.balance import balance

Sums = tuple[int, ...]
"""Prefix sums of a row's costs, from 0: a row of costs 2, 1, 4 is (0, 2, 3, 7)."""


class Division(NamedTuple):
    """The layers and the load of each rank.

    Attributes:
        loads: load of each rank: first the owner's ranks, the shared one first, then the own ranks of each colocated
            row.
        owner: number of layers of each of the owner's parts.
        colocated: for each colocated row the number of layers of its parts; the last part is on the shared rank.
    """

    loads: tuple[int, ...]
    owner: tuple[int, ...]
    colocated: tuple[tuple[int, ...], ...]

    @property
    def busiest(self) -> int:
        """The largest load of a rank."""
        return max(self.loads)


@dataclass(frozen=True)
class Group:
    """A row, and the colocated rows whose last part is on its first rank.

    Args:
        owner: the row.
        parts: number of the owner's ranks.
        colocated: for each colocated row, its sums and the number of its own ranks before the shared one.
        beside: constant load of each of the owner's ranks, descending; none by default. (With an ascending load the
            filling could leave a large layer to a rank without room for it.)
    """

    owner: Sums
    parts: int
    colocated: tuple[tuple[Sums, int], ...] = ()
    beside: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert list(self.beside) == sorted(self.beside, reverse=True), self.beside

    @property
    def total(self) -> int:
        """The sum of all loads."""
        return self.owner[-1] + sum(sums[-1] for sums, _ in self.colocated) + sum(self.beside)

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.parts + sum(own for _, own in self.colocated)

    def within(self, bound: int) -> Division | None:
        """Return a division with all loads at most `bound`, or None if there is none."""
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
        """Return a division with the smallest possible largest load, or None if that is above `limit`."""
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
        """Return the division with layers spread evenly over ranks that are not shared; the largest load stays.

        Filling alone leaves the last rank of a row with too little.
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
        """The division for the ends of each row's parts, from 0 to the number of layers."""
        beside = self.beside or (0,) * self.parts
        loads = [self.owner[b] - self.owner[a] + more for (a, b), more in zip(pairwise(owner), beside, strict=True)]
        for (sums, _), ends in zip(self.colocated, colocated, strict=True):
            *own, shared = (sums[b] - sums[a] for a, b in pairwise(ends))
            loads[0] += shared
            loads += own
        sizes = [tuple(b - a for a, b in pairwise(ends)) for ends in (owner, *colocated)]
        return Division(tuple(loads), sizes[0], tuple(sizes[1:]))


def fewest(sums: Sums, bound: int) -> int | None:
    """Return the fewest ranks that keep `bound` for one row, or None if a single layer costs more."""
    start, parts = 0, 0
    while start < len(sums) - 1:
        end = bisect_right(sums, sums[start] + bound) - 1
        if end == start:
            return None
        start, parts = end, parts + 1
    return parts


def _even(sums: Sums, start: int, stop: int, parts: int) -> list[int]:
    return balance([b - a for a, b in pairwise(sums[start : stop + 1])], parts) if parts else []
