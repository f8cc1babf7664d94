"""Which rank writes which piece of a tensor: a pure function of the plan, the same on all ranks.

A piece is a box of a full tensor that lies in one box of a rank's local tensor too. The pieces of a tensor cover it
once. Of what data parallel ranks share, each writes its own rows. Where several ranks hold the same rows, the one with
the fewest bytes so far writes them, and large pieces are divided among all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_mm5d.layout.even_split import even_ranges
from lightning_mm5d.plan.data_shards import DataShards
from lightning_mm5d.plan.holdings import Box
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.shards import Range, Shard

_DIVIDED_BYTES = 4 * 2**20  # a piece from this size on is divided among the ranks that hold it


@dataclass(frozen=True)
class Saved:
    """A tensor that is saved.

    Args:
        shape: of the full tensor.
        itemsize: bytes of an element.
        copies: how many tensors of its shape are saved with it, itself counted: 3 for a weight that Adam trains.
        source: the one rank that has its value; None where all ranks that hold it have.
    """

    shape: tuple[int, ...]
    itemsize: int
    copies: int = 1
    source: int | None = None


@dataclass(frozen=True)
class Piece:
    """A box of a full tensor, and the rank that writes it.

    Attributes:
        name: of the tensor.
        box: in the full tensor.
        local: where it lies in the local tensor of `writer`.
        writer: global rank.
        is_first: whether its writer also writes what belongs to the whole tensor.
    """

    name: str
    box: Box
    local: Box
    writer: int = 0
    is_first: bool = False


def pieces_of(plan: Plan, tensors: Mapping[str, Saved]) -> list[Piece]:
    """Return the pieces of all `tensors`, by name, in their order."""
    loads, shards = [0] * plan.layout.size, DataShards(plan)
    found: dict[str, list[Piece]] = {}
    open_pieces: list[tuple[int, int, Piece, tuple[int, ...]]] = []
    for name, saved in tensors.items():
        found[name] = []
        for piece, ranks in _candidates(plan, shards, name, saved):
            cost = math.prod(stop - start for start, stop in piece.box) * saved.itemsize
            if len(ranks) > 1 and cost >= _DIVIDED_BYTES and piece.box[0][1] - piece.box[0][0] >= len(ranks):
                for part, rank in zip(_divided(piece, len(ranks)), ranks, strict=True):
                    found[name].append(replace(part, writer=rank))
                    loads[rank] += cost * saved.copies // len(ranks)
            else:
                open_pieces.append((-cost * saved.copies, len(open_pieces), piece, ranks))
    for cost, _, piece, ranks in sorted(open_pieces, key=lambda one: one[:2]):
        writer = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[writer] -= cost
        found[piece.name].append(replace(piece, writer=writer))
    result = []
    for pieces in found.values():
        first, *others = sorted(pieces, key=lambda piece: piece.box)
        result += [replace(first, is_first=True), *others]
    return result


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, length) for length in shape)


def _candidates(plan: Plan, shards: DataShards, name: str, saved: Saved) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Yield pieces that cover a tensor once, each with the ranks that may write it."""
    shard, ownership = plan.division.shards.get(name), plan.ownership
    whole = whole_box(saved.shape)
    if shard is None:
        if saved.source is not None:
            ranks: tuple[int, ...] = (saved.source,)
        else:
            ranks = ownership.ranks_holding(name) if name in ownership.sizes else ownership.primary_ranks(name)[:1]
        yield from _shared(shards, Piece(name, whole, whole), ranks)
        return
    holders = ownership.ranks_holding(name) if name in ownership.sizes else ownership.primary_ranks(name)
    for index in shard.distinct:
        ranks = tuple(rank for rank in holders if ownership.shard_index(name, rank) == index)
        for full, local in _own_rows(shard, index):
            piece = Piece(name, _with(saved.shape, shard.dim, full), _with(saved.shape, shard.dim, local))
            if (across := shard.across) is not None:
                start, stop = across.ranges[index]
                boxes = _put(piece.box, across.dim, (start, stop)), _put(piece.local, across.dim, (0, stop - start))
                piece = replace(piece, box=boxes[0], local=boxes[1])
            yield from _shared(shards, piece, ranks)


def _shared(shards: DataShards, piece: Piece, ranks: tuple[int, ...]) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Cut a piece that `ranks` hold to the rows that each of them owns, where they share it."""
    owned = {rank: rows for rank in ranks if (rows := shards.of(piece.name, rank)) is not None}
    if not owned:
        yield piece, ranks
        return
    rows = next(iter(owned.values()))
    (start, _), (first, last) = piece.box[rows.dim], piece.local[rows.dim]
    for place, (low, high) in enumerate(rows.ranges):
        low, high = max(low, first), min(high, last)
        if low < high:
            box = _put(piece.box, rows.dim, (start + low - first, start + high - first))
            part = replace(piece, box=box, local=_put(piece.local, rows.dim, (low, high)))
            yield part, tuple(rank for rank, other in owned.items() if other.place == place)


def _own_rows(shard: Shard, index: int) -> list[tuple[Range, Range]]:
    """Return the rows of a rank of the group that no rank before it holds: in the full tensor, and in its local one."""
    edges = sorted({edge for held in shard.ranges for one in held for edge in one})
    found: list[tuple[Range, Range]] = []
    offset = 0
    for start, stop in shard.ranges[index]:
        for low, high in pairwise([start, *(edge for edge in edges if start < edge < stop), stop]):
            local, offset = offset, offset + high - low
            before = any(
                first <= low and high <= last
                for other, held in enumerate(shard.ranges[:index])
                for first, last in held
                if shard.is_beside(index, other)
            )
            if before or low == high:
                continue
            if found and found[-1][0][1] == low and found[-1][1][1] == local:
                found[-1] = ((found[-1][0][0], high), (found[-1][1][0], offset))
            else:
                found.append(((low, high), (local, offset)))
    return found


def _divided(piece: Piece, count: int) -> list[Piece]:
    """Cut a piece into `count` parts along its first dim."""
    (start, stop), (local, _) = piece.box[0], piece.local[0]
    return [
        replace(piece, box=((start + a, start + b), *piece.box[1:]), local=((local + a, local + b), *piece.local[1:]))
        for a, b in even_ranges(stop - start, count)
    ]


def _with(shape: Sequence[int], dim: int, held: Range) -> Box:
    return _put(whole_box(shape), dim, held)


def _put(box: Box, dim: int, held: Range) -> Box:
    return (*box[:dim], held, *box[dim + 1 :])
