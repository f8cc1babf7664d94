"""Deals out pieces of work to ranks so that the busiest has little: scheduling on identical machines, ``P || C_max``.

It looks for a small makespan (the work of the busiest rank) first. Makespans within 1 / `ALIKE` count as alike, and
among these the split with the most even numbers of tokens is taken: everything but attention works by the token, and
percents there are worth more than tenths of a percent of the attention.

1. *Balanced differencing* (Yakir, *The differencing algorithm LDM for partitioning*, 1996; the differencing is that of
   Karmarkar and Karp, 1982): the pieces, largest first, form groups of one piece a rank; of the two groups with the
   largest differences inside, the large sums of one join the small sums of the other, until one group is left. All
   ranks get equally many pieces. For long sequences this is nearly always the end of it: near a lower bound already.
2. *Swaps* of two pieces between the busiest rank and another, while they help; then *moves* as well.
3. *Longest processing time first* (Graham, *Bounds on multiprocessing timing anomalies*, 1969), with swaps and moves.
4. For few pieces, a *complete search*: depth first, largest piece first, least busy rank first, `SEARCHED_NODES` long.

Then, at no cost: small pieces move from ranks with many tokens to ranks with few, and pieces that are alike change
places so that ranks get consecutive ones. Ranks are numbered by their first pieces.

Whole numbers only, and no clock: every rank finds the same. It refuses nothing; assertions are for bugs of this
library.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

ALIKE = 256
ENOUGH = 1024  # a makespan within 1 / ENOUGH of the lower bound is not improved on
SEARCHED_PIECES = 24
SEARCHED_NODES = 3000  # of a complete search: about 3 ms
PROBES = 4096  # of swaps and moves from one start: about 3 ms


def deal(costs: Sequence[int], sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each piece; where there are as many pieces as ranks, each rank has one.

    Args:
        costs: work of each piece, whole numbers, not negative.
        sizes: tokens of each piece.
        ranks: R.
    """
    assert min(costs, default=0) >= 0, costs
    if ranks == 1:
        return [0] * len(costs)
    parts = _best(costs, sizes, ranks)
    _even(parts, sizes)
    return _numbered(_consecutive(parts.owners(), costs, sizes), ranks)


def longest_first(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each piece when each, largest first, goes to the least busy rank."""
    loads = [(0, 0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for index in _largest_first(costs):
        load, pieces, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[index], pieces + 1, rank))
        owners[index] = rank
    return owners


def lower_bound(costs: Sequence[int], ranks: int) -> int:
    """Less than this the busiest rank cannot have: the mean, and of the k R + 1 largest pieces some rank has k + 1."""
    upto = [0, *accumulate(costs[index] for index in _largest_first(costs))]
    piled = (upto[k * ranks + 1] - upto[k * ranks - k] for k in range((len(costs) - 1) // ranks + 1))
    return max(-(-upto[-1] // ranks), max(piled, default=0))


class _Parts:
    """Which pieces each rank has, as (cost, index) in ascending order, and what they add up to."""

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

    def tokens(self, sizes: Sequence[int]) -> list[int]:
        return [sum(sizes[index] for _, index in part) for part in self.pieces]


def _best(costs: Sequence[int], sizes: Sequence[int], ranks: int) -> _Parts:
    least = lower_bound(costs, ranks)
    enough = least + least // ENOUGH
    found: list[_Parts] = []
    for parts in _candidates(costs, ranks, enough):
        found.append(parts)
        if max(parts.loads) <= enough:
            break
    best = min(max(parts.loads) for parts in found)
    alike = [parts for parts in found if max(parts.loads) <= best + best // ALIKE]
    return min(alike, key=lambda parts: (max(parts.tokens(sizes)), max(parts.loads)))


def _candidates(costs: Sequence[int], ranks: int, enough: int) -> Iterator[_Parts]:
    """What is found in ever more ways, the cheapest first."""
    even = _Parts(_balanced_differencing(costs, ranks), costs, ranks)
    _improve(even, enough, moves=False)
    yield even
    freed = _Parts(even.owners(), costs, ranks)
    _improve(freed, enough, moves=True)
    yield freed
    longest = _Parts(longest_first(costs, ranks), costs, ranks)
    _improve(longest, enough, moves=True)
    yield longest
    if len(costs) <= SEARCHED_PIECES:
        known = min(max(freed.loads), max(longest.loads))
        owners = _search(costs, ranks, known, enough)
        if owners is not None:
            yield _Parts(owners, costs, ranks)


def _balanced_differencing(costs: Sequence[int], ranks: int) -> list[int]:
    order = _largest_first(costs)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(order), ranks):
        group = [(costs[index], [index]) for index in order[start : start + ranks]]
        group += [(0, []) for _ in range(ranks - len(group))]
        heap.append((group[-1][0] - group[0][0], start, group))
    heapq.heapify(heap)
    for tie in range(len(order), len(order) + len(heap) - 1):
        first = heapq.heappop(heap)[2]
        second = heap[0][2]
        sums = [(a + b, _merged(one, two)) for (a, one), (b, two) in zip(first, reversed(second), strict=True)]
        sums.sort(key=lambda slot: -slot[0])
        least = sums[-1][0]  # what all have alike does not matter
        heapq.heapreplace(heap, (least - sums[0][0], tie, [(cost - least, members) for cost, members in sums]))
    owners = [0] * len(costs)
    for rank, (_, members) in enumerate(heap[0][2] if heap else []):
        for index in members:
            owners[index] = rank
    return owners


def _merged(one: list[int], two: list[int]) -> list[int]:
    """Both in one of them: copying the larger time and again would take most of the time."""
    few, many = (one, two) if len(one) < len(two) else (two, one)
    many.extend(few)
    return many


def _improve(parts: _Parts, enough: int, *, moves: bool) -> None:
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
    best, found = gap, None
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
                best, found = abs(gap - 2 * moved), (away, back)
    return found


def _search(costs: Sequence[int], ranks: int, known: int, enough: int) -> list[int] | None:
    """The owners with the smallest makespan below `known` that the nodes suffice for, None where there are none."""
    order = _largest_first(costs)
    best = known
    found: list[int] | None = None
    loads = [0] * ranks
    owners = [0] * len(costs)
    nodes = 0

    def dealt(place: int) -> bool:
        """Deal out the pieces from `place` on; whether to stop."""
        nonlocal best, found, nodes
        if place == len(order):
            best, found = max(loads), list(owners)
            return best <= enough
        nodes += 1
        if nodes > SEARCHED_NODES:
            return True
        cost = costs[order[place]]
        tried = -1
        for load, rank in sorted((load, rank) for rank, load in enumerate(loads)):
            if load + cost >= best:
                break
            if load == tried:
                continue  # ranks with the same load are alike
            tried = load
            loads[rank] += cost
            owners[order[place]] = rank
            if dealt(place + 1):
                return True
            loads[rank] -= cost
        return False

    dealt(0)
    return found


def _even(parts: _Parts, sizes: Sequence[int]) -> None:
    """Move pieces to ranks with fewer tokens where the makespan stays what it is, or alike."""
    makespan = max(parts.loads)
    most = makespan + makespan // ALIKE
    tokens = parts.tokens(sizes)

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
    """The same with pieces that are alike handed out in order, a rank's one after the other."""
    alike = defaultdict(list)
    for index, piece in enumerate(zip(costs, sizes, strict=True)):
        alike[piece].append(index)
    result = list(owners)
    for indices in alike.values():
        if len(indices) == 1:
            continue
        before = result[indices[0] - 1] if indices[0] else None
        behind = result[indices[-1] + 1] if indices[-1] + 1 < len(result) else None
        order = sorted((owners[index] != before, owners[index] == behind, owners[index]) for index in indices)
        for index, (_, _, rank) in zip(indices, order, strict=True):
            result[index] = rank
    return result


def _numbered(owners: Sequence[int], ranks: int) -> list[int]:
    """The same with ranks numbered by their first pieces."""
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(owners))}
    assert len(numbers) <= ranks
    return [numbers[rank] for rank in owners]


def _largest_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))
