"""Splits into consecutive parts are the best there are, and the even one where nothing tells layers apart."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from lightning_mm5d.partition import balance


def best(costs: list[float], parts: int, first: float, last: float) -> list[int]:
    """The split that `balance` promises, out of all that there are."""
    found = []
    for cuts in combinations(range(1, len(costs)), parts - 1):
        spans = list(pairwise((0, *cuts, len(costs))))
        sums = [sum(costs[start:end]) for start, end in spans]
        sums[0] += first
        sums[-1] += last
        sizes = [end - start for start, end in spans]
        found.append((max(sums), sum(cost**2 for cost in sums), [-size for size in sizes]))
    return [-size for size in min(found)[2]]


@pytest.mark.parametrize("seed", range(8))
def test_no_split_of_small_random_rows_is_better(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(250):
        number = source.randint(1, 9)
        parts = source.randint(1, number)
        costs = [source.choice([0, 0, 1, 1, 2, 3, 5, 20, 2.5, 0.25]) for _ in range(number)]
        first, last = (source.choice([0, 0, 1, 4, 30, 0.5]) for _ in range(2))
        assert balance(costs, parts, first=first, last=last) == best(costs, parts, first, last)


@pytest.mark.parametrize("cost", [0.1, 1.0, 202383360.0, 1e-300, 1e300])
def test_equal_costs_give_the_even_split_with_left_over_layers_first(cost: float) -> None:
    for layers in range(1, 14):
        for parts in range(1, layers + 1):
            even = [layers // parts + (index < layers % parts) for index in range(parts)]
            assert balance([cost] * layers, parts) == even


def test_what_stands_at_the_ends_takes_the_place_of_layers() -> None:
    assert balance([1] * 12, 3, last=2) == [5, 5, 2]
    assert balance([1] * 12, 3, first=6) == [1, 6, 5]
    assert balance([1] * 12, 3, first=100) == [1, 6, 5]
    assert balance([1] * 4, 1, first=3, last=5) == [4]


def test_of_splits_with_the_same_largest_part_the_most_even_is_taken() -> None:
    assert balance([9, 1, 1, 1, 1], 3) == [1, 2, 2]


def test_sums_are_exact_where_floats_would_round() -> None:
    assert balance([2.0**60, 1, 1, 2.0**60], 2, first=2) == [1, 3]


def test_many_layers_are_balanced_too() -> None:
    """A search through all cuts would not end: there are more than 10**18."""
    source = random.Random(0)
    rows = [[2e8] * 128, [source.random() * 1e9 for _ in range(128)], [0.0] * 127 + [1e9]]
    for row in rows:
        assert sum(balance(row, 16, last=5e8)) == 128
