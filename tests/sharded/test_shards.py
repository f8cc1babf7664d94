"""Cut tensors merge into the full one, and every rank knows who else holds its rows."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from lightning_mm5d.layout.layout import even_ranges
from lightning_mm5d.sharded.shards import HeadRanges, Range, Segment, Shard, heads_of, joined, scaled


def random_heads(rng: random.Random) -> tuple[int, int, int, tuple[HeadRanges, ...]]:
    while True:
        key_value, groups, ranks = rng.randint(1, 8), rng.randint(1, 6), rng.randint(1, 8)
        found = heads_of(key_value * groups, key_value, ranks)
        if found is not None:
            return key_value * groups, key_value, ranks, found


def random_shard(rng: random.Random, dim: int) -> Shard:
    """A fused projection of queries, keys, values and something of any width, or ranges of any kind."""
    return random_ranges(rng, dim) if rng.random() < 0.4 else random_projection(rng, dim)


def random_ranges(rng: random.Random, dim: int) -> Shard:
    """Ranks hold any rows, in ascending ranges that may follow one another; the last one what nobody else does."""
    size = rng.randint(1, 12)
    rows = [{row for row in range(size) if rng.random() < 0.5} for _ in range(rng.randint(1, 4))]
    rows.append(set(range(size)).difference(*rows) | {row for row in range(size) if rng.random() < 0.3})
    ranges = []
    for held in rows:
        found: list[Range] = []
        for row in sorted(held):
            if found and found[-1][1] == row and rng.random() < 0.7:
                found[-1] = (found[-1][0], row + 1)
            else:
                found.append((row, row + 1))
        ranges.append(tuple(found) or ((0, 0),))
    return Shard(dim, size, tuple(ranges))


def random_projection(rng: random.Random, dim: int) -> Shard:
    query, key_value, ranks, heads = random_heads(rng)
    width, more = rng.randint(1, 3), rng.randint(0, 9)
    parts, offset = [], 0
    for held, count in (
        ([one.query for one in heads], query),
        ([one.key_value for one in heads], key_value),
        ([one.key_value for one in heads], key_value),
    ):
        parts.append([scaled(one, width, offset) for one in held])
        offset += count * width
    parts.append([scaled(one, 1, offset) for one in even_ranges(more, ranks)])
    return joined(parts, dim, offset + more)


def held_rows(shard: Shard, rank: int) -> list[int]:
    return [row for start, stop in shard.ranges[rank] for row in range(start, stop)]


SHARDS = [(seed, dim) for seed in range(40) for dim in (0, 1, 2)]


def full_of(shard: Shard) -> torch.Tensor:
    shape = [2, 3, 2]
    shape[shard.dim] = shard.size
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


# --- local and full tensors ---


@pytest.mark.parametrize(("seed", "dim"), SHARDS)
def test_the_local_tensors_merge_into_the_full_one(seed: int, dim: int) -> None:
    shard = random_shard(random.Random(seed), dim)
    whole = full_of(shard)
    parts = [shard.cut(whole, rank) for rank in range(len(shard.ranges))]
    assert torch.equal(shard.merge(parts), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole.index_select(dim, torch.tensor(held_rows(shard, rank), dtype=torch.long)))
        assert part.shape[dim] == shard.lengths[rank]


def test_a_part_is_a_copy() -> None:
    whole = torch.zeros(4, 2)
    part = Shard(0, 4, (((0, 4),), ((0, 0),))).cut(whole, 0)
    part += 1
    assert not whole.any()


def test_a_rank_may_hold_nothing() -> None:
    shard = joined([even_ranges(2, 3)], 0, 2)
    whole = torch.arange(4.0).view(2, 2)
    parts = [shard.cut(whole, rank) for rank in range(3)]
    assert [len(part) for part in parts] == [1, 1, 0] == [*shard.lengths]
    assert parts[2].shape == (0, 2)
    assert torch.equal(shard.merge(parts), whole)
    assert shard.segments(2) == ()


def test_ranges_are_written_where_they_belong() -> None:
    shard = Shard(1, 6, (((0, 1), (4, 6)), ((1, 4),)))
    whole = torch.zeros(1, 6)
    shard.put(whole, torch.tensor([[1.0, 2.0, 3.0]]), shard.ranges[0])
    assert whole.tolist() == [[1, 0, 0, 0, 2, 3]]


# --- who else holds what ---


@pytest.mark.parametrize("seed", range(60))
def test_segments_name_exactly_the_ranks_that_hold_their_rows(seed: int) -> None:
    shard = random_shard(random.Random(seed), 0)
    rows = [held_rows(shard, rank) for rank in range(len(shard.ranges))]
    for rank, own in enumerate(rows):
        segments = shard.segments(rank)
        ends = [0, *(segment.start + segment.length for segment in segments)]
        assert [segment.start for segment in segments] == ends[:-1], "they follow one another"
        assert ends[-1] == len(own), "and are the whole part"
        assert all(one.sharers != other.sharers for one, other in pairwise(segments)), "neighbours that could be one"
        for segment in segments:
            for row in own[segment.start : segment.start + segment.length]:
                assert segment.sharers == tuple(other for other, held in enumerate(rows) if row in held)


@pytest.mark.parametrize("seed", range(30))
def test_every_row_has_one_first_sharer(seed: int) -> None:
    shard = random_shard(random.Random(seed), 0)
    counted: list[int] = []
    for rank in range(len(shard.ranges)):
        own = held_rows(shard, rank)
        for segment in shard.segments(rank):
            if segment.sharers[0] == rank:
                counted += own[segment.start : segment.start + segment.length]
    assert sorted(counted) == list(range(shard.size))


def test_shared_keys_and_values_of_a_fused_projection_are_one_segment() -> None:
    """4 query heads, 1 key and value head, each 2 rows: queries are apart, keys and values on both ranks."""
    heads = heads_of(4, 1, 2)
    assert heads is not None
    query = [scaled(one.query, 2) for one in heads]
    key, value = ([scaled(one.key_value, 2, offset) for one in heads] for offset in (8, 10))
    shard = joined([query, key, value], 0, 12)
    assert shard.ranges == (((0, 4), (8, 10), (10, 12)), ((4, 8), (8, 10), (10, 12)))
    assert shard.segments(0) == (Segment(0, 4, (0,)), Segment(4, 4, (0, 1)))
    assert shard.segments(1) == (Segment(0, 4, (1,)), Segment(4, 4, (0, 1)))


def test_segments_part_where_only_some_rows_are_shared() -> None:
    shard = Shard(0, 6, (((0, 4),), ((2, 6),)))
    assert shard.segments(0) == (Segment(0, 2, (0,)), Segment(2, 2, (0, 1)))
    assert shard.segments(1) == (Segment(0, 2, (0, 1)), Segment(2, 2, (1,)))


# --- assigning ---


@pytest.mark.parametrize("size", [0, 1, 2, 5, 12, 13])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_even_ranges_tile_and_differ_by_one_at_most(size: int, ranks: int) -> None:
    found = even_ranges(size, ranks)
    assert len(found) == ranks
    assert [row for a, b in found for row in range(a, b)] == list(range(size))
    lengths = [b - a for a, b in found]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("seed", range(60))
def test_every_query_head_is_where_its_key_and_value_head_is(seed: int) -> None:
    query, key_value, ranks, heads = random_heads(random.Random(seed))
    assert len(heads) == ranks
    groups = query // key_value
    assert [head for one in heads for head in range(*one.query)] == list(range(query))
    assert {head for one in heads for head in range(*one.key_value)} == set(range(key_value))
    for one in heads:
        assert {head // groups for head in range(*one.query)} == set(range(*one.key_value))
        per_rank, rest = divmod(one.query[1] - one.query[0], one.key_value[1] - one.key_value[0])
        assert per_rank > 0
        assert rest == 0, "all key and value heads of a rank serve as many query heads"


@pytest.mark.parametrize(
    ("query", "key_value", "ranks", "expected"),
    [
        (4, 4, 2, [((0, 2), (0, 2)), ((2, 4), (2, 4))]),
        (6, 3, 2, [((0, 4), (0, 2)), ((4, 6), (2, 3))]),
        (8, 2, 4, [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]),
        (6, 2, 3, [((0, 2), (0, 1)), ((2, 3), (0, 1)), ((3, 6), (1, 2))]),
        (3, 1, 2, [((0, 2), (0, 1)), ((2, 3), (0, 1))]),
    ],
)
def test_heads_are_assigned_by_key_and_value_heads(query: int, key_value: int, ranks: int, expected: list) -> None:
    assert heads_of(query, key_value, ranks) == tuple(HeadRanges(*one) for one in expected)


@pytest.mark.parametrize(("query", "key_value", "ranks"), [(2, 2, 3), (2, 1, 3), (4, 2, 5), (3, 3, 4)])
def test_there_are_no_heads_for_more_ranks_than_query_heads(query: int, key_value: int, ranks: int) -> None:
    assert heads_of(query, key_value, ranks) is None


def test_empty_ranges_are_left_out_but_for_one() -> None:
    shard = joined([[(0, 2), (2, 2), (2, 2)], [(2, 3), (3, 4), (4, 4)]], 0, 4)
    assert shard.ranges == (((0, 2), (2, 3)), ((3, 4),), ((2, 2),))
    assert shard.lengths == (3, 1, 0)


def test_scaled_rows_start_at_the_offset() -> None:
    assert scaled((1, 3), 4, 10) == (14, 22)
