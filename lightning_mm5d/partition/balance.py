"""Splits a row of layers into consecutive parts whose largest is as small as can be, exactly.

A pipeline runs at the pace of its slowest stage, so the largest part counts first. Many splits share the best largest
part; the sum of squares chooses the most even one among them, and a tie gives the left-over layers to the earlier
parts. Costs are compared as whole numbers, without rounding: every rank must find the same split.

The largest part is found by bisection over the sums of runs of layers, the split by dynamic programming over the
number of parts, where the end of the best first part moves one way only (F. F. Yao, *Efficient dynamic programming
using quadrangle inequalities*, 1980).

The caller has checked that there is a layer for every part.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate


def balance(costs: Sequence[float], parts: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Return how many layers each part gets, at least one each.

    Args:
        costs: of each layer in order, not negative.
        parts: 1 to ``len(costs)``.
        first: cost of what the first part has beside its layers.
        last: cost of what the last part has beside its layers.

    Returns:
        The sizes with the smallest largest part, among these the smallest sum of squared costs, and among these the
        lexicographically largest: equal costs give ``[3, 3, 2, 2]``. Takes O(parts * n^2) at worst.
    """
    assert 1 <= parts <= len(costs), (costs, parts)
    assert min(first, last, *costs) >= 0, (costs, first, last)
    upto = [0, *accumulate(_whole(costs, first, last))]
    ends = _ends(upto, parts, _smallest_largest(upto, parts))
    sizes, start = [], 0
    for left in range(parts, 0, -1):
        sizes.append(ends[left][start] - start)
        start = ends[left][start]
    return sizes


def _whole(costs: Sequence[float], first: float, last: float) -> list[int]:
    """The costs, those at the ends with what lies beside them, as integers in the same proportions."""
    exact = [Fraction(cost) for cost in costs]
    exact[0] += Fraction(first)
    exact[-1] += Fraction(last)
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _smallest_largest(upto: Sequence[int], parts: int) -> int:
    """The smallest bound on the cost of a part that `parts` parts can keep; `upto` are the sums before each layer."""

    def kept(bound: int) -> bool:
        start = 0
        for _ in range(parts):
            start = bisect_right(upto, upto[start] + bound) - 1
        return start == len(upto) - 1

    sums = sorted({later - earlier for index, earlier in enumerate(upto) for later in upto[index:]})
    return sums[bisect_left(sums, True, key=kept)]


def _ends(upto: Sequence[int], parts: int, bound: int) -> list[dict[int, int]]:
    """For each number of parts and each first layer, where the first of these parts ends, none above `bound`."""
    num_layers = len(upto) - 1
    never = upto[-1] ** 2 + 1
    squares = [never] * num_layers + [0]
    found: list[dict[int, int]] = [{}]
    for left in range(1, parts + 1):
        row, ends = [never] * (num_layers + 1), {}
        end = num_layers - left + 1
        for start in range(num_layers - left, -1, -1):
            end = min(end, bisect_right(upto, upto[start] + bound) - 1)
            before = upto[start]
            sums = [(upto[stop] - before) ** 2 + squares[stop] for stop in range(start + 1, end + 1)]
            row[start] = min(sums, default=never)
            if row[start] >= never:
                break  # earlier layers have even more after them
            end = ends[start] = start + len(sums) - sums[::-1].index(row[start])
        squares = row
        found.append(ends)
    return found
