"""Splits of a sequence: every token once, whatever the sizes, and equal masks give one object."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_mm5d.context_parallel.balance import (
    BLOCK,
    LEAST_BLOCKS,
    balanced,
    block_of,
    by_items,
    distribute,
    uniform,
    zigzag,
)
from lightning_mm5d.context_parallel.masks.mask import Cache
from lightning_mm5d.sharded.kept_results import kept_results
from lightning_mm5d.sharded.sequence import TokenSplit

SIZES = [(0, 2), (1, 1), (1, 3), (3, 4), (5, 4), (10, 4), (64, 8), (129, 2), (1000, 3), (4096, 8), (5000, 7)]


def causal_work(size: int) -> Callable[[int], Tensor]:
    def work(block: int) -> Tensor:
        return torch.tensor(
            [sum(range(at + 1, min(at + block, size) + 1)) for at in range(0, size, block)], dtype=torch.int64
        )

    return work


def no_work(size: int) -> Callable[[int], Tensor]:
    return lambda block: torch.zeros(-(-size // block), dtype=torch.int64)


def random_items(seed: int) -> tuple[list[int], list[int], int]:
    source = random.Random(seed)
    lengths = [source.randint(1, 40) for _ in range(source.randint(1, 20))]
    return lengths, [length**2 for length in lengths], source.randint(1, 6)


def is_complete(split: TokenSplit) -> bool:
    """Whether each token is with one rank, and what the split says of itself is so."""
    parts = [split.indices(rank) for rank in range(split.ranks)]
    row = torch.cat(parts)
    return (
        tuple(len(part) for part in parts) == split.lengths
        and all(torch.equal(part, part.sort().values) for part in parts)
        and torch.equal(row.sort().values, torch.arange(split.size))
        and torch.equal(row[split.order()], torch.arange(split.size))
        and row.dtype == split.order().dtype == torch.int64
    )


# ------------------------------------------------------------------ which tokens


@pytest.mark.parametrize(("size", "ranks"), SIZES)
@pytest.mark.parametrize("make", [uniform, zigzag])
def test_plain_splits_have_every_token_once_and_lengths_that_differ_by_one_at_most(
    make: Callable[[int, int], TokenSplit], size: int, ranks: int
) -> None:
    split = make(size, ranks)
    assert is_complete(split)
    assert split.ranks == ranks
    assert max(split.lengths) - min(split.lengths) <= 1


@pytest.mark.parametrize(("size", "ranks"), SIZES)
@pytest.mark.parametrize("work", [causal_work, no_work])
def test_a_balanced_split_has_every_token_once_and_leaves_no_rank_empty(
    work: Callable[[int], Callable[[int], Tensor]], size: int, ranks: int
) -> None:
    split = distribute("makespan_min", size, ranks, work(size))
    assert is_complete(split)
    assert split.ranks == ranks
    assert sum(length > 0 for length in split.lengths) == min(size, ranks)


def test_a_uniform_split_is_stretches_in_order() -> None:
    assert uniform(10, 4).ranges == (((0, 3),), ((3, 6),), ((6, 8),), ((8, 10),))
    assert uniform(2, 3).ranges == (((0, 1),), ((1, 2),), ())


def test_a_zigzag_split_pairs_stretches_from_either_end() -> None:
    assert zigzag(16, 2).ranges == (((0, 4), (12, 16)), ((4, 12),))
    assert zigzag(10, 4).ranges == (((0, 2), (9, 10)), ((2, 4), (8, 9)), ((4, 5), (7, 8)), ((5, 7),))


@pytest.mark.parametrize(("size", "ranks"), [(1024, 2), (4096, 4), (4096, 8)])
def test_zigzag_halves_the_imbalance_of_a_causal_mask(size: int, ranks: int) -> None:
    def busiest(split: TokenSplit) -> float:
        work = [float((split.indices(rank) + 1).sum()) for rank in range(ranks)]
        return max(work) * ranks / sum(work)

    assert busiest(uniform(size, ranks)) > 1.4
    assert busiest(zigzag(size, ranks)) == 1


def test_work_that_is_the_same_everywhere_gives_one_stretch_each() -> None:
    assert balanced([7] * 16, 16 * BLOCK, 4) == uniform(16 * BLOCK, 4)
    assert balanced([0] * 16, 16 * BLOCK, 4) == uniform(16 * BLOCK, 4)


def test_the_last_block_may_be_short() -> None:
    split = balanced([1, 1, 1, 1], 3 * BLOCK + 5, 2)
    assert is_complete(split)
    assert split.lengths == (2 * BLOCK, BLOCK + 5)


def test_blocks_get_smaller_where_a_rank_would_have_few() -> None:
    for size in [*range(1, 40), *range(100, 10000, 97)]:
        for ranks in (2, 3, 8):
            block = block_of(size, ranks)
            assert block in (1, 2, 4, 8, 16, 32, 64, 128)
            assert block == 1 or -(-size // block) >= LEAST_BLOCKS * ranks
            assert block == BLOCK or -(-size // (2 * block)) < LEAST_BLOCKS * ranks


def test_work_is_asked_for_in_the_blocks_that_are_dealt_out_and_for_a_balanced_split_only() -> None:
    asked: list[int] = []

    def work(block: int) -> Tensor:
        asked.append(block)
        return causal_work(1000)(block)

    distribute("uniform", 1000, 4, work)
    distribute("zigzag", 1000, 4, work)
    assert not asked
    distribute("makespan_min", 1000, 4, work)
    assert asked == [block_of(1000, 4)] == [64]


@pytest.mark.parametrize("seed", range(20))
def test_items_are_not_cut(seed: int) -> None:
    lengths, costs, ranks = random_items(seed)
    split = by_items(lengths, costs, ranks)
    assert is_complete(split)
    owner = torch.empty(split.size, dtype=torch.int64)
    for rank in range(ranks):
        owner[split.indices(rank)] = rank
    for item in owner.split(lengths):
        assert item.unique().numel() == 1
    assert sum(length > 0 for length in split.lengths) == min(len(lengths), ranks)


def test_items_are_dealt_out_by_cost() -> None:
    assert by_items([10, 10, 10, 30], [100, 100, 100, 300], 2).ranges == (((0, 30),), ((30, 60),))
    assert by_items([10, 10, 10, 30], [300, 100, 100, 100], 2).ranges == (((0, 10),), ((10, 60),))


# ------------------------------------------------------------------ equal splits


def test_equal_masks_give_one_object_and_equal_splits_are_equal() -> None:
    work, cache = causal_work(4096), Cache()
    split = distribute("makespan_min", 4096, 4, work, cache)
    assert distribute("makespan_min", 4096, 4, lambda block: work(block).clone(), cache) is split
    assert distribute("uniform", 4096, 4, work, cache) is distribute("uniform", 4096, 4, work, cache)
    others = [
        distribute("makespan_min", 4096, 4, lambda block: work(block) * 3, cache),
        balanced(work(BLOCK), 4096, 4),
        TokenSplit.of([[list(one) for one in part] for part in split.ranges], 4096),
    ]
    assert {split, *others} == {split}
    assert distribute("makespan_min", 4096, 8, work, cache) != split
    assert distribute("uniform", 4096, 4, work, cache) == uniform(4096, 4) != split


def test_ranges_are_joined_before_they_are_compared() -> None:
    split = TokenSplit.of([[(0, 3), (3, 3), (3, 5)], [(5, 9)]], 9)
    assert split.ranges == (((0, 5),), ((5, 9),))
    assert TokenSplit.of([[(0, 5)], [(5, 9)]], 9) == split
    assert TokenSplit.of([[(5, 9)], [(0, 5)]], 9) != split


def test_indices_are_made_once_and_serve_autograd_though_first_used_in_inference() -> None:
    split = TokenSplit.of([[(0, 2), (5, 7)], [(2, 5)]], 7)
    with torch.inference_mode():
        indices, order = split.indices(0), split.order()
    assert split.indices(0, torch.device("cpu")) is indices
    assert split.order("cpu") is order
    values = torch.arange(7.0, requires_grad=True)
    values[indices].square().sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 2, 0, 0, 0, 10, 12]


@pytest.mark.parametrize(
    "ranges",
    [
        pytest.param([[(0, 4)], [(5, 9)]], id="gap"),
        pytest.param([[(0, 5)], [(4, 9)]], id="overlap"),
        pytest.param([[(0, 5)], [(5, 8)]], id="end missing"),
        pytest.param([[(5, 7), (0, 5)], [(7, 9)]], id="not ascending"),
    ],
)
def test_a_split_that_lacks_tokens_or_has_them_twice_is_a_bug(ranges: list[list[tuple[int, int]]]) -> None:
    with pytest.raises(AssertionError):
        TokenSplit.of(ranges, 9)


def test_what_a_split_makes_in_a_forward_does_not_have_products_computed_again() -> None:
    split, x = TokenSplit.of([[(0, 1), (3, 4)], [(1, 3)]], 4), torch.ones(4, 4)
    keeps, takes = kept_results(frozenset({"aten.mm"}))
    addresses = []
    for mode in (keeps, takes):  # only the first finds the split without its order
        with mode:
            addresses.append((split.ordered(x, 0) @ x).untyped_storage().data_ptr())
    assert addresses[0] == addresses[1], "the product is the kept one"
