"""How a number of items is split evenly: lengths differ by at most one, and the first ones are the longer."""

from __future__ import annotations

from itertools import accumulate, pairwise


def even_lengths(size: int, count: int) -> list[int]:
    """Return how many of `size` items each of `count` ranks gets: ``even_lengths(7, 3) == [3, 2, 2]``."""
    return [size // count + (index < size % count) for index in range(count)]


def even_ranges(size: int, count: int) -> list[tuple[int, int]]:
    """Return ``(start, stop)`` of each of them: ``even_ranges(7, 3) == [(0, 3), (3, 5), (5, 7)]``."""
    return list(pairwise(accumulate(even_lengths(size, count), initial=0)))
