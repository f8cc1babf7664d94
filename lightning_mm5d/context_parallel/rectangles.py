"""Which calls cover the tiles of a mask that are not empty: bands of tiles, and the spans that each band meets.

A *band* is a run of tiles along one side whose tiles meet the same tiles of the other side; a *span* is a run of those.
Band times span is a rectangle without empty tiles, computed by one call. Long stretches without any forbidden pair are
spans of their own, because those need no mask; what is short stays with its mixed neighbours, because a call more costs
more than a mask does.

Bands lie along the queries for the forward, which then merges few partial results, and along the keys for the backward,
where gradients of keys and values are then added up in place and only those of queries are scattered.

A plan is made once per mask and used by all layers, steps and directions. Additive masks are kept with it as far as
`MASK_BYTES` allow; they are made anew otherwise. A mixed rectangle has at most `MIXED_PAIRS` pairs, so masks never grow
with the sequence times the sequence.

It refuses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_mm5d.context_parallel.tiles import Tiles

TILE, PARTIAL, FULL = 128, 1, 2
MASK_BYTES = 16 * 2**20
MIXED_PAIRS = 1024 * 1024
LONG = 4  # tiles without a mask that are worth a call of their own
_PLANS: WeakKeyDictionary[Tiles, dict[tuple[bool, int | None], Plan]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Span:
    """A run of positions, and whether some of its pairs with the band are forbidden."""

    at: slice
    is_mixed: bool


@dataclass(frozen=True)
class Band:
    """A run of positions and the spans of the other side that it meets, ascending."""

    at: slice
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Bias:
    """What is added to the scores of a mixed rectangle.

    Attributes:
        values: [m, n], 0 or minus infinity.
        blind: bool [m], the queries that see none of these keys; None where there are none.
    """

    values: Tensor
    blind: Tensor | None


class Plan:
    """The rectangles of one mask, in one direction.

    Args:
        tiles: the mask.
        by_keys: whether bands lie along the keys.
        longest: positions that a band or a span may have; None: as many as there are.

    Attributes:
        bands: for each row of ``tiles`` its bands.
        is_whole: whether every position is in a band.
    """

    def __init__(self, tiles: Tiles, by_keys: bool, longest: int | None) -> None:
        lengths = (tiles.k_length, tiles.q_length) if by_keys else (tiles.q_length, tiles.k_length)
        kinds = tiles.kinds.transpose(1, 2).contiguous() if by_keys else tiles.kinds
        self.bands = tuple(tuple(_bands(row, *lengths, longest)) for row in kinds)
        self.is_whole = all(sum(band.at.stop - band.at.start for band in row) == lengths[0] for row in self.bands)
        self._biases: dict[tuple[int, int, int, torch.dtype], Bias] = {}
        self._bytes = 0

    def bias(self, tiles: Tiles, row: int, q: slice, k: slice, like: Tensor) -> Bias:
        """Return the additive mask of a mixed rectangle, of `like`'s dtype and device."""
        key = (row, q.start, k.start, like.dtype)
        if (known := self._biases.get(key)) is not None:
            return known
        values = like.new_zeros(q.stop - q.start, k.stop - k.start)
        for i, j in (tiles.kinds[row, _tiles(q), _tiles(k)] == PARTIAL).nonzero().tolist():
            q_at, k_at = _tile(q, i), _tile(k, j)
            forbidden = ~tiles.allowed(row, q_at, k_at)
            inside = values[q_at.start - q.start : q_at.stop - q.start, k_at.start - k.start : k_at.stop - k.start]
            inside.masked_fill_(forbidden, -torch.inf)
        blind = values.amax(1) < 0
        made = Bias(values, blind if bool(blind.any()) else None)
        if self._bytes + values.nbytes <= MASK_BYTES:
            self._biases[key] = made
            self._bytes += values.nbytes
        return made


def plan(tiles: Tiles, *, by_keys: bool, longest: int | None = None) -> Plan:
    """Return the plan of `tiles`, made at the first call; arguments as of `Plan`."""
    known = _PLANS.setdefault(tiles, {})
    if (by_keys, longest) not in known:
        known[by_keys, longest] = Plan(tiles, by_keys, longest)
    return known[by_keys, longest]


def _tiles(at: slice) -> slice:
    return slice(at.start // TILE, -(-at.stop // TILE))


def _tile(within: slice, index: int) -> slice:
    start = within.start + index * TILE
    return slice(start, min(start + TILE, within.stop))


def _bands(kinds: Tensor, length: int, across: int, longest: int | None) -> Iterator[Band]:
    """Yield the bands of one row of the batch; `kinds` [tiles along, tiles across]."""
    most = None if longest is None else longest // TILE
    seen = [row.tobytes() for row in (kinds > 0).numpy()]
    start = 0
    while start < len(seen):
        stop = start + 1
        while stop < len(seen) and seen[stop] == seen[start]:
            stop += 1
        if seen[start].strip(b"\0"):
            spans = list(_spans(kinds[start:stop]))
            mixed = max((last - first for first, last, is_mixed in spans if is_mixed), default=0)
            step = max(1, MIXED_PAIRS // TILE**2 // mixed) if mixed else stop - start
            for at in range(start, stop, min(step, most or step)):
                end = min(at + min(step, most or step), stop)
                yield Band(
                    slice(at * TILE, min(end * TILE, length)),
                    tuple(
                        Span(slice(first * TILE, min(last * TILE, across)), is_mixed)
                        for first, last, is_mixed in _divided(_spans(kinds[at:end]), end - at, most)
                    ),
                )
        start = stop


def _spans(kinds: Tensor) -> Iterator[tuple[int, int, bool]]:
    """Yield first tile, the tile behind the last, and whether there is a partial one; `kinds` is of one band."""
    text = kinds.amin(0).numpy().tobytes()
    for run in re.finditer(b"[\1\2]+", text):
        at, end = run.span()
        for full in re.finditer(b"\2{%d,}" % min(LONG, end - at), run.group()):
            first, last = full.start() + run.start(), full.end() + run.start()
            if at < first:
                yield at, first, True
            yield first, last, False
            at = last
        if at < end:
            yield at, end, True


def _divided(
    spans: Iterator[tuple[int, int, bool]], height: int, most: int | None
) -> Iterator[tuple[int, int, bool]]:
    """Yield the same spans in pieces where they are too long; `height` of the band in tiles."""
    for first, last, is_mixed in spans:
        step = max(1, MIXED_PAIRS // TILE**2 // height) if is_mixed else last - first
        step = min(step, most or step)
        for at in range(first, last, step):
            yield at, min(at + step, last), is_mixed
