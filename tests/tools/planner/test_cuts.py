"""Dividing rows that meet on one rank: exact, even where nothing is shared, and with what a rank has in any case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product
from random import Random

import pytest

from lightning_mm5d.tools.planner.placements import Group, fewest


def sums(costs: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(costs, initial=0))


def cuts(costs: Sequence[int], parts: int) -> Iterator[list[int]]:
    """What the parts of a row cost, for every way to cut it."""
    for ends in combinations(range(1, len(costs)), parts - 1):
        yield [sum(costs[a:b]) for a, b in pairwise((0, *ends, len(costs)))]


def smallest(
    owner: Sequence[int], parts: int, colocated: Sequence[tuple[Sequence[int], int]], beside: Sequence[int]
) -> int:
    """The smallest largest load, by trying all."""
    rows = [cuts(owner, parts), *(cuts(costs, own + 1) for costs, own in colocated)]
    found = []
    for first, *others in product(*map(list, rows)):
        loads = [load + more for load, more in zip(first, beside, strict=True)]
        loads[0] += sum(other[-1] for other in others)
        found.append(max(loads + [load for other in others for load in other[:-1]]))
    return min(found)


def random_group(rng: Random) -> tuple[Group, list[int], list[tuple[list[int], int]], list[int]]:
    def row() -> list[int]:
        return [rng.choice([0, 1, 2, 3, 5, 9, 20]) for _ in range(rng.randint(1, 6))]

    owner = row()
    parts = rng.randint(1, len(owner))
    colocated = [(costs, rng.randint(0, len(costs) - 1)) for costs in (row() for _ in range(rng.randint(0, 2)))]
    beside = sorted((rng.choice([0, 0, 4]) for _ in range(parts)), reverse=True)
    group = Group(sums(owner), parts, tuple((sums(costs), own) for costs, own in colocated), tuple(beside))
    return group, owner, colocated, beside


def test_the_largest_load_is_as_small_as_can_be() -> None:
    rng = Random(0)
    for _ in range(400):
        group, owner, colocated, beside = random_group(rng)
        division = group.divide()
        assert division is not None
        assert division.busiest == smallest(owner, group.parts, colocated, beside), group
        assert group.divide(division.busiest) is not None
        assert group.divide(division.busiest - 1) is None


def test_loads_are_those_of_the_layers_that_each_rank_gets() -> None:
    rng = Random(1)
    for _ in range(200):
        group, owner, colocated, beside = random_group(rng)
        for division in (group.divide(), group.evened(group.divide())):
            assert [len(division.owner), *map(len, division.colocated)] == [
                group.parts,
                *(own + 1 for _, own in colocated),
            ]
            assert [sum(division.owner), *map(sum, division.colocated)] == [
                len(owner),
                *(len(costs) for costs, _ in colocated),
            ]
            assert min(min(sizes) for sizes in (division.owner, *division.colocated)) >= 1
            loads, own = list(beside), []
            for costs, sizes in (
                (owner, division.owner),
                *zip((c for c, _ in colocated), division.colocated, strict=True),
            ):
                parts = [sum(costs[a:b]) for a, b in pairwise(accumulate(sizes, initial=0))]
                if sizes is division.owner:
                    loads = [load + part for load, part in zip(loads, parts, strict=True)]
                else:
                    loads[0] += parts[-1]
                    own += parts[:-1]
            assert list(division.loads) == loads + own


def test_evening_never_raises_the_largest_load() -> None:
    rng = Random(2)
    for _ in range(200):
        group, *_ = random_group(rng)
        division = group.divide()
        assert group.evened(division).busiest == division.busiest


def test_an_encoder_ends_on_the_first_rank_of_the_language_model() -> None:
    """Three ranks, an encoder of seven layers, a language model of eleven: one and five of them share a rank."""
    division = Group(sums([1] * 11), 2, ((sums([1] * 7), 1),)).divide()
    assert (division.loads, division.owner, division.colocated) == ((6, 6, 6), (5, 6), ((6, 1),))
    heavy = Group(sums([1] * 12), 2, ((sums([1] * 9), 1),)).divide()
    assert (heavy.busiest, heavy.owner, heavy.colocated) == (7, (5, 7), ((7, 2),))


def test_unshared_ranks_are_evened() -> None:
    group = Group(sums([9]), 1, ((sums([1] * 10), 3),))
    filled = group.divide()
    assert filled.busiest == 10
    assert sorted(group.evened(filled).colocated[0][:-1]) == [3, 3, 3]


@pytest.mark.parametrize(("bound", "ranks"), [(10, 1), (9, 2), (5, 2), (4, 3), (3, None)])
def test_fewest_ranks_within_a_bound(bound: int, ranks: int | None) -> None:
    assert fewest(sums([2, 3, 1, 4]), bound) == ranks
