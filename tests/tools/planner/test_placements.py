"""All ways to place modalities: the best one is as good as trying everything finds, and none is invalid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise, product
from random import Random

from lightning_mm5d.config.modality import Modality, Owner
from lightning_mm5d.tools.planner.placements import Placement, Space

ROWS = {"vision": [1.0] * 6, "audio": [0.5] * 4, "language": [1.0] * 12}


def space(costs: Mapping[str, Sequence[float]], num_ranks: int, count: int = 4, **modalities: Modality) -> Space:
    given = {name: modalities.get(name, Modality()) for name in costs}
    return Space(costs, given, num_ranks, loss_modality="language", num_microbatches=count)


def cuts(costs: Sequence[float], parts: int) -> list[list[float]]:
    ends = combinations(range(1, len(costs)), parts - 1)
    return [[sum(costs[a:b]) for a, b in pairwise((0, *stops, len(costs)))] for stops in ends]


def smallest(costs: Mapping[str, Sequence[float]], num_ranks: int, count: int) -> float:
    """The smallest largest load of a step, by trying all owners, numbers of ranks and cuts."""
    encoders = [name for name in costs if name != "language"]
    best = float("inf")
    for owners in product(*([None, "first", "all", *encoders] for _ in encoders)):
        where = dict(zip(encoders, owners, strict=True))
        if any(owner in encoders and (owner == name or where[owner] is not None) for name, owner in where.items()):
            continue
        moving = [name for name in encoders if where[name] in (None, "first")]
        for numbers in product(range(num_ranks + 1), repeat=len(moving)):
            own = dict(zip(moving, numbers, strict=True))
            parts = num_ranks - sum(numbers)
            stages = {name: own[name] + (where[name] == "first") for name in moving}
            if parts < 1 or any(not 1 <= stages[name] <= len(costs[name]) for name in moving):
                continue
            rows = [cuts(costs["language"], parts), *(cuts(costs[name], stages[name]) for name in moving)]
            for language, *others in product(*rows):
                ranks = {"language": [load * count for load in language]}
                for name, loads in zip(moving, others, strict=True):
                    ranks[name] = [load * count for load in loads]
                    if where[name] == "first":
                        ranks["language"][0] += ranks[name].pop()
                for name, owner in where.items():
                    if owner == "all":
                        for part in range(parts):
                            ranks["language"][part] += sum(costs[name]) * len(range(part, count, parts))
                    elif owner in encoders:
                        ranks[owner][0] += sum(costs[name]) * count
                best = min(best, max(load for loads in ranks.values() for load in loads))
    return best


def test_the_first_placement_has_the_smallest_busiest_rank_of_all() -> None:
    rng = Random(0)
    for _ in range(60):
        encoders = rng.choice([["vision"], ["vision", "audio"]])
        costs = {name: [rng.choice([1.0, 2.0, 2.5, 7.0]) for _ in range(rng.randint(1, 3))] for name in encoders}
        costs["language"] = [rng.choice([1.0, 3.0, 4.5]) for _ in range(rng.randint(1, 5))]
        num_ranks, count = rng.randint(1, 5), rng.randint(1, 4)
        searched = space(costs, num_ranks, count)
        found = searched.best(1)
        expected = smallest(costs, num_ranks, count)
        assert (found[0].order[0] / searched.scale if found else float("inf")) == expected, (costs, num_ranks, count)


def test_every_placement_fills_the_ranks_and_holds_every_layer_once() -> None:
    for num_ranks in (1, 2, 5, 9):
        found = space(ROWS, num_ranks).best(1000)
        assert found
        for placement in found:
            assert len(placement.loads) == num_ranks
            assert {name: sum(sizes) for name, sizes in placement.sizes.items()} == {
                name: len(row) for name, row in ROWS.items()
            }
            for owner in placement.owners.values():
                assert owner is None or placement.owners.get(owner.modality) is None


def test_no_placement_is_there_twice() -> None:
    def key(placement: Placement) -> tuple[object, ...]:
        return tuple(placement.owners.items()), tuple(placement.sizes.items())

    found = space(ROWS | {"vision": [1.0] * 2}, 4).best(1000)
    assert len({key(placement) for placement in found}) == len(found)
    alone = [p for p in found if len(p.sizes["vision"]) == len(p.sizes["audio"]) == 1]
    # the first of two encoders on a rank is the owner
    assert {p.owners["audio"] for p in alone if p.owners["vision"] is None} >= {Owner("vision", 0)}
    assert Owner("audio", 0) not in {p.owners["vision"] for p in alone}


def test_a_limited_number_of_placements_are_the_first_of_all() -> None:
    every, few = space(ROWS, 6).best(1000), space(ROWS, 6).best(5)
    assert [placement.order for placement in few] == [placement.order for placement in every[:5]]


def test_replicas_on_every_rank_share_the_microbatches() -> None:
    """language: two ranks; a replica of the encoder on each, which takes three and two of five microbatches."""
    costs = {"vision": [4.0], "language": [2.0, 2.0]}
    searched = space(costs, 2, count=5)
    everywhere = next(p for p in searched.best(10) if p.owners["vision"] == Owner("language", None))
    assert [load / searched.scale for load in everywhere.loads] == [22.0, 18.0]
    assert everywhere.shared == 2


def test_modalities_that_are_divided_unlike_share_nothing() -> None:
    """vision: two ranks for each stage; audio, language: one."""
    found = space(ROWS, 7, vision=Modality(tp_size=2)).best(1000)
    assert found
    for placement in found:
        assert placement.owners["vision"] is None
        assert placement.owners["audio"] != Owner("vision", 0)
        assert len(placement.sizes["vision"]) * 2 <= 6
    assert {len(p.sizes["vision"]) for p in found} >= {1, 2}


def test_what_cannot_be_filled_has_no_placement() -> None:
    assert len(space(ROWS, 22).best(10)) >= 1
    assert space(ROWS, 23).best(10) == []


def test_costs_of_nothing_are_placed_too() -> None:
    assert space({"vision": [0.0], "language": [0.0, 0.0]}, 2).best(10)
