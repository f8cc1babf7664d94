"""Which tokens of a sequence each context parallel rank holds.

A split is a plain description, the same on every rank: for each rank the ranges of its tokens. ``uniform`` gives one
stretch each; ``zigzag`` one from either end, which balances a causal mask; ``makespan_min`` looks at the mask: blocks
of queries are assigned by the (query, key) pairs that the mask allows them (makespan.py), as Cornstarch does for masks
of multimodal sequences.

Assertions are for bugs of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.balance.makespan import assign
from lightning_mm5d.context_parallel.masks.caches import Cache
from lightning_mm5d.layout.even_split import even_ranges
from lightning_mm5d.sharded.token_split import Range, TokenSplit

Distribution = Literal["uniform", "zigzag", "makespan_min"]

BLOCK = 128
LEAST_BLOCKS = 4  # per rank: with fewer there is little to choose from, and blocks get smaller


def uniform(size: int, ranks: int) -> TokenSplit:
    """One stretch of tokens each, in order of the ranks; lengths differ by at most one."""
    return TokenSplit.of([[stretch] for stretch in even_ranges(size, ranks)], size)


def zigzag(size: int, ranks: int) -> TokenSplit:
    """Of 2R stretches, rank i takes number i from either end; tokens per rank differ by at most one."""
    stretches = even_ranges(size, 2 * ranks)
    return TokenSplit.of([[stretches[rank], stretches[-1 - rank]] for rank in range(ranks)], size)


def balanced(work: Tensor | Sequence[int], size: int, ranks: int, block: int = BLOCK) -> TokenSplit:
    """Return the split of blocks of tokens whose busiest rank has little work.

    Args:
        work: of each block, a whole number, ``[ceil(size / block)]``.
        size: tokens, S.
        ranks: R.
        block: tokens of a block; the last one may have fewer.
    """
    blocks = [(start, min(start + block, size)) for start in range(0, size, block)]
    costs = work.tolist() if isinstance(work, Tensor) else list(work)
    assert len(costs) == len(blocks), (len(costs), size, block)
    return _assigned(blocks, costs, ranks, size)


def by_items(lengths: Sequence[int], costs: Sequence[int], ranks: int) -> TokenSplit:
    """Whole items (images, frames, clips of audio), assigned by their costs; none is cut.

    Args:
        lengths: tokens of each item, in the order in which they stand in the sequence.
        costs: of each item, whole numbers.
        ranks: R. With fewer items than ranks some ranks have none.
    """
    assert len(lengths) == len(costs), (len(lengths), len(costs))
    cuts = [0, *accumulate(lengths)]
    return _assigned(list(pairwise(cuts)), costs, ranks, cuts[-1])


def distribute(
    how: Distribution, size: int, ranks: int, mask_work: Callable[[int], Tensor], cache: Cache | None = None
) -> TokenSplit:
    """Return the split that a configuration asks for.

    Args:
        how: ``uniform``, ``zigzag`` or ``makespan_min``.
        size: tokens, S.
        ranks: R.
        mask_work: int64 work of each block of as many queries as it is called with (a power of two, at most `BLOCK`);
            called for ``makespan_min`` only.
        cache: keeps splits; equal masks get the same object without a new assignment.
    """
    cache = Cache() if cache is None else cache
    if how != "makespan_min":
        return cache.get((how, size, ranks), lambda: (uniform if how == "uniform" else zigzag)(size, ranks))
    block = block_of(size, ranks)
    work = mask_work(block)
    assert work.dtype == torch.int64, work.dtype
    key = (how, size, ranks, work.cpu().numpy().tobytes())
    return cache.get(key, lambda: balanced(work, size, ranks, block))


def block_of(size: int, ranks: int) -> int:
    """Tokens of a block: `BLOCK`, or the largest power of two that gives each rank `LEAST_BLOCKS`, but at least 1."""
    block = BLOCK
    while block > 1 and -(-size // block) < LEAST_BLOCKS * ranks:
        block //= 2
    return block


def _assigned(pieces: Sequence[Range], costs: Sequence[int], ranks: int, size: int) -> TokenSplit:
    """Return the split of whole pieces that `assign` finds."""
    parts: list[list[Range]] = [[] for _ in range(ranks)]
    for piece, rank in zip(pieces, assign(costs, [end - start for start, end in pieces], ranks), strict=True):
        parts[rank].append(piece)
    return TokenSplit.of(parts, size)
