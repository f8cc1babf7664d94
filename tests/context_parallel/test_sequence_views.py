"""Stretches of a sequence, sequences in a row and finer ones have the tokens of each rank that they should have."""

from __future__ import annotations

import random as numbers
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from lightning_mm5d.sharded.sequence import Holders, ShardedSequence, TokenSplit, refined


def fake(split: TokenSplit, rank: int, degree: int | None = None) -> ShardedSequence:
    group: Any = SimpleNamespace(index=rank, size=split.ranks)
    return ShardedSequence(split, Holders(group, degree or split.ranks, lambda x: False))


def any_split(generator: numbers.Random, size: int, ranks: int) -> TokenSplit:
    """Stretches of any length to ranks at random; some have none."""
    cuts = sorted({0, size, *(generator.randint(0, size) for _ in range(generator.randint(0, 8)))})
    parts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for piece in pairwise(cuts):
        parts[generator.randrange(ranks)].append(piece)
    return TokenSplit.of(parts, size)


def splits(count: int = 60) -> Iterator[tuple[numbers.Random, TokenSplit]]:
    generator = numbers.Random(0)
    for _ in range(count):
        yield generator, any_split(generator, generator.randint(1, 20), generator.randint(1, 5))


def test_a_stretch_has_the_tokens_of_each_rank_that_are_in_it() -> None:
    for generator, split in splits():
        start = generator.randrange(split.size)
        stop = generator.randint(start + 1, split.size)
        tokens = torch.arange(split.size)
        for rank in range(split.ranks):
            sequence = fake(split, rank)
            found, own = sequence.narrowed(start, stop)
            assert found.split.size == stop - start
            mine = sequence.local_of(tokens, 0, sequence.lengths)
            assert found.local_of(tokens[start:stop], 0, found.lengths).equal(mine[own])
            assert sequence.narrowed(start, stop)[0] is found, "so that tensors of one stretch work together"


def test_sequences_in_a_row_are_one_and_apart_again() -> None:
    for generator, split in splits():
        count = generator.randint(1, 4)
        rows = torch.arange(count * split.size).view(count, split.size)
        for rank in range(split.ranks):
            sequence = fake(split, rank)
            found = sequence.merged(count)
            assert found.split.size == count * split.size
            mine = sequence.local_of(rows, 1, sequence.lengths)
            assert found.local_of(rows.view(-1), 0, found.lengths).equal(mine.reshape(-1))
            assert found.unmerged(count) is sequence
            assert sequence.merged(count) is found
            assert count == 1 or (sequence.unmerged(count) is None and found.unmerged(count + 1) is None)
            assert found.unmerged(1) is found


def test_tokens_of_a_rank_are_divided_evenly_in_order_and_joined_again() -> None:
    for generator, split in splits():
        parts = generator.randint(1, 4)
        fine = refined(split, parts)
        assert fine.ranks == split.ranks * parts
        for rank in range(split.ranks):
            own = slice(rank * parts, (rank + 1) * parts)
            tokens = [fine.indices(index) for index in range(fine.ranks)[own]]
            assert torch.cat(tokens).equal(split.indices(rank))
            assert max(map(len, tokens)) - min(map(len, tokens)) <= 1
            for index in range(parts):
                sequence = fake(fine, rank * parts + index, split.ranks)
                assert sequence.coarse == split
                assert sequence.own_lengths == fine.lengths[own]
                assert sequence.own_size == split.lengths[rank]
        assert refined(split, 1) is split


def test_a_peer_makes_the_same_sequence_of_a_description() -> None:
    for _, split in splits(20):
        size, ranges = fake(split, 0).description()
        assert TokenSplit.of(ranges, size) == split
