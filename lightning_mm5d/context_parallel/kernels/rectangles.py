"""Covers the tiles of a mask that are not empty with rectangles: bands of tiles, and the spans that each band meets.

A *band* is a run of tiles along one side that meet the same tiles of the other; a *span* is a run of the tiles met.
The rectangle of a band and a span has no empty tile and is computed by one call. Long stretches that need no mask are
spans of their own; short ones stay with their mixed neighbours, because one more call costs more than a mask does.

Bands lie along the queries for the forward, which then merges few partial results, and along the keys for the backward,
where gradients of keys and values are then added up in place and only those of queries are scattered.

A plan is made once per mask and serves all layers. The session's `Caches.biases` keeps the additive masks used last;
others are made anew. A mixed rectangle has at most `MIXED_PAIRS` pairs: no mask grows with the square of the sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.masks.tiles import FULL, PARTIAL, TILE

if TYPE_CHECKING:
    from lightning_mm5d.context_parallel.masks.tiles import Tiles

MIXED_PAIRS = 1024 * 1024
LONG = 4  # tiles without a mask that are worth a call of their own


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
    """The additive mask of a mixed rectangle.

    Attributes:
        values: [m, n], 0 or minus infinity.
        blind: bool [m], the queries that see none of these keys; None where there are none.
    """

    values: Tensor
    blind: Tensor | None

    @cached_property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self.values.nbytes


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

    def bias(self, tiles: Tiles, row: int, q: slice, k: slice, like: Tensor) -> Bias:
        """Return the additive mask of a mixed rectangle, of `like`'s dtype and device."""
        key = (self, row, q.start, k.start, like.dtype, like.device)
        return tiles.caches.biases.get(key, lambda: _bias(tiles, row, q, k, like))


def plan(tiles: Tiles, *, by_keys: bool, longest: int | None = None) -> Plan:
    """Return the plan of `tiles`, made at the first call; arguments as of `Plan`."""
    return tiles.kept(("plan", by_keys, longest), lambda: Plan(tiles, by_keys, longest))


def _bias(tiles: Tiles, row: int, q: slice, k: slice, like: Tensor) -> Bias:
    values = like.new_zeros(q.stop - q.start, k.stop - k.start)
    for i, j in (tiles.kinds[row, _tiles(q), _tiles(k)] == PARTIAL).nonzero().tolist():
        q_at, k_at = _tile(q, i), _tile(k, j)
        inside = values[q_at.start - q.start : q_at.stop - q.start, k_at.start - k.start : k_at.stop - k.start]
        inside.masked_fill_(~tiles.allowed(row, q_at, k_at), -torch.inf)
    blind = values.amax(1) < 0
    return Bias(values, blind if bool(blind.any()) else None)


def _tiles(at: slice) -> slice:
    return slice(at.start // TILE, -(-at.stop // TILE))


def _tile(within: slice, index: int) -> slice:
    start = within.start + index * TILE
    return slice(start, min(start + TILE, within.stop))


def _bands(kinds: Tensor, length: int, across: int, longest: int | None) -> Iterator[Band]:
    """Yield the bands of one row of the batch; `kinds` [tiles along, tiles across]."""
    most = None if longest is None else longest // TILE
    start = 0
    for pieces, equal in groupby(tuple(_pieces(row.tobytes())) for row in kinds.numpy()):
        stop = start + len(tuple(equal))
        widest = max((piece.stop - piece.start for piece in pieces if piece.is_mixed), default=0)
        height = max(1, MIXED_PAIRS // TILE**2 // widest) if widest else stop - start
        height = min(height, most or height)
        for at in range(start, stop, height) if pieces else ():
            end = min(at + height, stop)
            spans = (
                Span(slice(piece.start * TILE, min(piece.stop * TILE, across)), piece.is_mixed)
                for piece in _divided(pieces, end - at, most)
            )
            yield Band(slice(at * TILE, min(end * TILE, length)), tuple(spans))
        start = stop


class _Piece(NamedTuple):
    """A run of tiles."""

    start: int
    stop: int
    is_mixed: bool


def _pieces(kinds: bytes) -> Iterator[_Piece]:
    """Yield the pieces of a row of tiles: runs without empty tiles, and in them those that are full and long."""
    for run in re.finditer(b"[%c%c]+" % (PARTIAL, FULL), kinds):
        at, end = run.span()
        for full in re.finditer(b"%c{%d,}" % (FULL, min(LONG, end - at)), run.group()):
            start, stop = full.start() + run.start(), full.end() + run.start()
            if at < start:
                yield _Piece(at, start, True)
            yield _Piece(start, stop, False)
            at = stop
        if at < end:
            yield _Piece(at, end, True)


def _divided(pieces: Iterable[_Piece], height: int, most: int | None) -> Iterator[_Piece]:
    """Yield the same in shorter pieces where they are too long; `height` of the band in tiles."""
    for start, stop, is_mixed in pieces:
        step = max(1, MIXED_PAIRS // TILE**2 // height) if is_mixed else stop - start
        step = min(step, most or step)
        for at in range(start, stop, step):
            yield _Piece(at, min(at + step, stop), is_mixed)
