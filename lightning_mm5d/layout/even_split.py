"""How a number of items is split evenly: lengths differ by at most one, and the first ones are the longer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def even_lengths(size: int, count: int) -> list[int]:
    """Return how many of `size` items each of `count` ranks gets: ``even_lengths(7, 3) == [3, 2, 2]``."""
    return [size // count + (index < size % count) for index in range(count)]


def even_ranges(size: int, count: int) -> list[tuple[int, int]]:
    """Return ``(start, stop)`` of each of them: ``even_ranges(7, 3) == [(0, 3), (3, 5), (5, 7)]``."""
    return list(pairwise(accumulate(even_lengths(size, count), initial=0)))


def even_blocks(size: int, count: int, block: int) -> list[tuple[int, int]]:
    """Return `even_ranges` of blocks of items, the last of which may have fewer: their starts are multiples of `block`.

    ``even_blocks(50, 3, 16) == [(0, 32), (32, 48), (48, 50)]``
    """
    return [(min(a * block, size), min(b * block, size)) for a, b in even_ranges(-(-size // block), count)]


def shared_out(size: int, weights: Sequence[float]) -> list[int]:
    """Return how many of `size` items each rank gets in proportion to its weight: ``shared_out(14, [4, 3]) == [8, 6]``.

    Each gets one at least, so `size` is at least their number; what is left over goes to the largest remainders.
    """
    exact = [size * weight / sum(weights) for weight in weights]
    found = [max(1, int(one)) for one in exact]
    while sum(found) != size:
        step = 1 if sum(found) < size else -1
        spare = [index for index, count in enumerate(found) if step > 0 or count > 1]
        found[max(spare, key=lambda index: step * (exact[index] - found[index]))] += step
    return found
