"""Which tokens of a sequence each context parallel rank holds.

A split is a plain description, the same on every rank: for each rank the ranges of its tokens. ``uniform`` gives one
stretch each; ``zigzag`` one from either end, which balances a causal mask; ``makespan_min`` looks at the mask: blocks
of queries are assigned by the (query, key) pairs that the mask allows them, as Cornstarch does for masks
of multimodal sequences.

Assertions are for bugs of this library.

Assigns pieces of work to ranks so that the busiest has little: scheduling on identical machines, ``P || C_max``.

1. *Longest processing time first* (Graham, *Bounds on multiprocessing timing anomalies*, 1969), in rounds: the R
   largest pieces go to one rank each, the largest to the least busy rank, then the next R. So ranks have equally many
   pieces, and with equal pieces equally many tokens: everything but attention works by the token.
2. *Swaps* of two pieces between the busiest rank and another, while they help.
3. Where that is not near a lower bound (few pieces, or few large ones): longest first without rounds, with swaps and
   *moves* of single pieces. It is taken if its makespan (the work of the busiest rank) is less by 1 / `CLOSE` or more.

Example: costs 8, 7, 6, 4, 4, 4, 4, 1 for two ranks. Rounds give 8 + 6 + 4 + 4 = 22 and 7 + 4 + 4 + 1 = 16; the swap of
a 4 for the 1 makes 19 each.

Then small pieces move from ranks with many tokens to ranks with few, and equal pieces change places so that ranks get
consecutive ones. Ranks are numbered by their first pieces.

Whole numbers only, and no clock: every rank finds the same. Assertions are for bugs of this library.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.masks.mask import Cache
from lightning_mm5d.layout.layout import even_ranges
from lightning_mm5d.sharded.sequence import Range, TokenSplit

CLOSE = 256
ENOUGH = 1024  # a makespan within 1 / ENOUGH of the lower bound is not improved on
PROBES = 4096  # of swaps and moves from one start: about 3 ms


def assign(costs: Sequence[int], sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each piece; where there are as many pieces as ranks, each rank has one.

    Args:
        costs: work of each piece, whole numbers, not negative.
        sizes: tokens of each piece.
        ranks: R.
    """
    assert min(costs, default=0) >= 0, costs
    if ranks == 1:
        return [0] * len(costs)
    least = lower_bound(costs, ranks)
    enough = least + least // ENOUGH
    assignment = _Assignment(_in_rounds(costs, ranks), costs, ranks)
    _improve(assignment, enough, moves=False)
    if max(assignment.loads) > enough:
        by_length = _Assignment(longest_first(costs, ranks), costs, ranks)
        _improve(by_length, enough, moves=True)
        best = max(by_length.loads)
        assignment = by_length if max(assignment.loads) > best + best // CLOSE else assignment
    _even(assignment, sizes)
    owners = _consecutive(assignment.owners(), costs, sizes)
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(owners))}  # of ranks, by their first pieces
    return [numbers[rank] for rank in owners]


def longest_first(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each piece when each, largest first, goes to the least busy rank."""
    loads = [(0, 0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for index in _largest_first(costs):
        load, pieces, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[index], pieces + 1, rank))
        owners[index] = rank
    return owners


def lower_bound(costs: Sequence[int], ranks: int) -> int:
    """Return the least possible makespan: at least the mean; of the k R + 1 largest pieces some rank has k + 1."""
    upto = [0, *accumulate(costs[index] for index in _largest_first(costs))]
    piled = (upto[k * ranks + 1] - upto[k * ranks - k] for k in range((len(costs) - 1) // ranks + 1))
    return max(-(-upto[-1] // ranks), max(piled, default=0))


class _Assignment:
    """The pieces of each rank, (cost, index) in ascending order, and the sums of their costs."""

    def __init__(self, owners: Sequence[int], costs: Sequence[int], ranks: int) -> None:
        self.pieces: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for index, (rank, cost) in enumerate(zip(owners, costs, strict=True)):
            self.pieces[rank].append((cost, index))
        for part in self.pieces:
            part.sort()
        self.loads = [sum(cost for cost, _ in part) for part in self.pieces]

    def move(self, piece: tuple[int, int], source: int, target: int) -> None:
        self.pieces[source].remove(piece)
        insort(self.pieces[target], piece)
        self.loads[source] -= piece[0]
        self.loads[target] += piece[0]

    def owners(self) -> list[int]:
        ranks = {index: rank for rank, part in enumerate(self.pieces) for _, index in part}
        return [ranks[index] for index in range(len(ranks))]


def _in_rounds(costs: Sequence[int], ranks: int) -> list[int]:
    order, loads, owners = _largest_first(costs), [0] * ranks, [0] * len(costs)
    for start in range(0, len(order), ranks):
        least_first = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for rank, index in zip(least_first, order[start : start + ranks], strict=False):
            loads[rank] += costs[index]
            owners[index] = rank
    return owners


def _improve(parts: _Assignment, enough: int, *, moves: bool) -> None:
    """Swap pieces of the busiest rank for smaller ones, or give them away, until nothing helps."""
    probes = PROBES
    while (top := max(parts.loads)) > enough and probes > 0:
        busiest = parts.loads.index(top)
        for other in sorted(range(len(parts.loads)), key=lambda rank: (parts.loads[rank], rank)):
            gap = top - parts.loads[other]
            if gap < 2:
                return
            probes -= len(parts.pieces[busiest])
            swap = _swap(parts.pieces[busiest], parts.pieces[other], gap, moves)
            if swap is not None:
                away, back = swap
                parts.move(away, busiest, other)
                if back is not None:
                    parts.move(back, other, busiest)
                break
        else:
            return


def _swap(
    many: Sequence[tuple[int, int]], few: Sequence[tuple[int, int]], gap: int, moves: bool
) -> tuple[tuple[int, int], tuple[int, int] | None] | None:
    """The piece of the busier part, and the one of the other if any, whose exchange best halves the gap."""
    best, exchange = gap, None
    last = -1
    for away in many:
        if away[0] == last:
            continue
        last = away[0]
        near = bisect_left(few, (away[0] - gap // 2, -1))
        backs: list[tuple[int, int] | None] = [*few[max(near - 1, 0) : near + 1]]
        if moves:
            backs.append(None)
        for back in backs:
            moved = away[0] - (back[0] if back else 0)
            if 0 < moved < gap and abs(gap - 2 * moved) < best:
                best, exchange = abs(gap - 2 * moved), (away, back)
    return exchange


def _even(parts: _Assignment, sizes: Sequence[int]) -> None:
    """Move pieces to ranks with fewer tokens while the makespan grows by less than 1 / `CLOSE`."""
    makespan = max(parts.loads)
    most = makespan + makespan // CLOSE
    tokens = [sum(sizes[index] for _, index in part) for part in parts.pieces]

    def moved() -> bool:
        by_tokens = sorted(range(len(tokens)), key=lambda rank: (tokens[rank], rank))
        for source in reversed(by_tokens):
            for target in by_tokens:
                if tokens[target] >= tokens[source]:
                    break
                for piece in parts.pieces[source]:
                    if parts.loads[target] + piece[0] > most:
                        break
                    size = sizes[piece[1]]
                    if size and tokens[target] + size < tokens[source]:
                        parts.move(piece, source, target)
                        tokens[source] -= size
                        tokens[target] += size
                        return True
        return False

    while moved():
        pass


def _consecutive(owners: Sequence[int], costs: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the owners with pieces of equal cost and size in order, a rank's one after the other."""
    equal = defaultdict(list)
    for index, piece in enumerate(zip(costs, sizes, strict=True)):
        equal[piece].append(index)
    result = list(owners)
    for indices in equal.values():
        if len(indices) == 1:
            continue
        before = result[indices[0] - 1] if indices[0] else None
        after = result[indices[-1] + 1] if indices[-1] + 1 < len(result) else None
        order = sorted((owners[index] != before, owners[index] == after, owners[index]) for index in indices)
        for index, (_, _, rank) in zip(indices, order, strict=True):
            result[index] = rank
    return result


def _largest_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))


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
