"""How the tokens of a query shard meet those of a key shard, tile by tile.

Attention skips EMPTY tiles, computes FULL ones without a mask, and asks for the mask of PARTIAL ones.

Bounds of counts (blocks.py) settle squares of SQUARE x SQUARE tiles first, then single tiles of the squares that are
open, and what is open then is evaluated. So the time goes with what is mixed, and the memory with the number of tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_mm5d.context_parallel.masks.blocks import Side, Where, judge
from lightning_mm5d.context_parallel.masks.caches import Caches
from lightning_mm5d.context_parallel.masks.nodes import Condition

TILE = 128
EMPTY, PARTIAL, FULL = 0, 1, 2
SQUARE = 16
AT_ONCE = 1 << 20  # pairs that are evaluated at once, and a quarter of the tiles whose bounds are
KEPT = 256 << 20  # bytes of masks of partial tiles that are kept

T = TypeVar("T")


class Tiles:
    """Kinds of all tiles of TILE queries x TILE keys, by positions in the two shards.

    Args:
        condition: the mask.
        q: global indices of the queries [Sq], ascending, on CPU.
        k: global indices of the keys [Sk].
        device: of the masks of partial tiles.
        caches: of the session.

    Attributes:
        rows: 1 where all rows of the batch are alike, else their number.
        q_length, k_length: Sq and Sk.
        kinds: EMPTY, PARTIAL or FULL, int8 on CPU [rows, ceil(Sq / TILE), ceil(Sk / TILE)]. PARTIAL tiles have at least
            one pair that is allowed and one that is not.
    """

    def __init__(
        self, condition: Condition, q: Tensor, k: Tensor, *, device: torch.device | str, caches: Caches
    ) -> None:
        self.caches = caches
        self._kept: dict[Hashable, Any] = {}
        self.rows = condition.rows()
        self.q_length, self.k_length = len(q), len(k)
        self._device = torch.device(device)
        squares = [_Squares(condition, q, k, row, TILE) for row in range(self.rows)]
        self.kinds = torch.stack([_kinds(one)[: -(-len(q) // TILE), : -(-len(k) // TILE)] for one in squares])
        self._judges = [one.fine for one in squares]
        # of each row: which tiles are partial, and which of the distinct masks each of these has, -1 where not known
        self._partial = [np.flatnonzero(kinds.numpy() == PARTIAL) for kinds in self.kinds]
        self._which = [np.full(len(partial), -1, dtype=np.int32) for partial in self._partial]
        self._masks: list[Tensor] = []
        self._found: dict[bytes, int] = {}

    def kept(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` made of these tiles the first time, for as long as they live."""
        if name not in self._kept:
            self._kept[name] = make()
        result: T = self._kept[name]
        return result

    @property
    def nbytes(self) -> int:
        """Bytes that are held, about."""
        values = 32 * (self.q_length + self.k_length) * self.rows
        return self.kinds.nbytes + values + sum(12 * len(one) for one in self._partial) + len(self._masks) * TILE * TILE

    def allowed(self, row: int, q: slice, k: slice) -> Tensor:
        """Which pairs are allowed.

        Args:
            row: of the batch.
            q: positions in the shard of queries, m of them, without a step.
            k: positions in the shard of keys, n of them.

        Returns:
            Bool [m, n]; not to be written to.
        """
        row = row if self.rows > 1 else 0
        q_start, q_stop, _ = q.indices(self.q_length)
        k_start, k_stop, _ = k.indices(self.k_length)
        if q_stop <= q_start or k_stop <= k_start:
            return torch.zeros((max(0, q_stop - q_start), max(0, k_stop - k_start)), dtype=torch.bool).to(self._device)
        q_tiles, k_tiles = (range(a // TILE, -(-b // TILE)) for a, b in ((q_start, q_stop), (k_start, k_stop)))
        bands = [_joined([self._tile(row, i, j) for j in k_tiles], 1) for i in q_tiles]
        whole = _joined(bands, 0)
        q_base, k_base = q_tiles[0] * TILE, k_tiles[0] * TILE
        return whole[q_start - q_base : q_stop - q_base, k_start - k_base : k_stop - k_base]

    def _tile(self, row: int, i: int, j: int) -> Tensor:
        """The mask of one tile, filled up with False at the ends of the shards: bool [TILE, TILE]."""
        kind = int(self.kinds[row, i, j])
        if kind != PARTIAL:
            return torch.full((1, 1), kind == FULL, device=self._device).expand(TILE, TILE)
        place = int(np.searchsorted(self._partial[row], i * self.kinds.shape[2] + j))
        if self._which[row][place] < 0:
            if len(self._masks) * TILE * TILE >= KEPT:
                return self._judges[row].exact(torch.tensor([i]), torch.tensor([j]))[0].to(self._device)
            self._keep(row, place)
        return self._masks[self._which[row][place]]

    def _keep(self, row: int, place: int) -> None:
        """Evaluate the masks of a partial tile and of those that will be asked for next; equal ones are kept once."""
        size = AT_ONCE // (TILE * TILE)
        first = place // size * size
        at = torch.from_numpy(self._partial[row][first : first + size])
        masks = self._judges[row].exact(at // self.kinds.shape[2], at % self.kinds.shape[2])
        packed = np.packbits(masks.flatten(1).numpy(), axis=1)
        for place, (mask, bits) in enumerate(zip(masks, packed, strict=True), first):
            which = self._found.setdefault(bits.tobytes(), len(self._masks))
            if which == len(self._masks):
                self._masks.append(mask.to(self._device, copy=True))
            self._which[row][place] = which


def count(condition: Condition, q: Tensor, k: Tensor, block: int) -> Tensor:
    """Number of allowed pairs of each block of queries, summed over the rows of `condition`.

    Args:
        condition: the mask.
        q: global indices of the queries [Sq], on CPU.
        k: global indices of the keys [Sk].
        block: queries per block.

    Returns:
        Int64 [ceil(Sq / block)].
    """
    size = TILE if block % TILE == 0 else block  # large blocks are open more often
    rows = torch.stack([_counts(_Squares(condition, q, k, row, size)) for row in range(condition.rows())])
    counts = rows.sum(0)[: -(-len(q) // size)]
    return torch.stack([part.sum() for part in counts.split(block // size)]) if block > size else counts


class _Squares:
    """Squares of SQUARE x SQUARE blocks of one row of the batch: what is settled as a whole, and blocks of the rest.

    Attributes:
        size: tokens per block.
        where: all pairs, by blocks; as many as fill whole squares.
        fine: judge of blocks.
        kinds: of the squares, PARTIAL where that is open: int8 [squares of queries, squares of keys].
        weight: keys in each square.
    """

    def __init__(self, condition: Condition, q: Tensor, k: Tensor, row: int, size: int) -> None:
        self.size = size
        self.where = Where(Side.of(q, size, SQUARE), Side.of(k, size, SQUARE), row)
        self.fine = judge(condition, self.where)
        coarse = self.fine.grouped(SQUARE)
        where = Where(self.where.q.grouped(SQUARE), self.where.k.grouped(SQUARE), row)
        self.weight = where.k.count.to(torch.int64)
        self.kinds = torch.full((len(where.q.count), len(self.weight)), PARTIAL, dtype=torch.int8)
        j = torch.arange(len(self.weight))[None, :]
        for i in torch.arange(len(self.kinds))[:, None].split(max(1, AT_ONCE // 4 // max(1, len(self.weight)))):
            least, most = coarse.bounds(i, j)
            self.kinds[i[:, 0]] = _settled(least, most, where.total(i, j))

    def open(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield blocks of open squares: i [n, SQUARE, 1], j [n, 1, SQUARE], bounds [n, SQUARE, SQUARE]."""
        within = torch.arange(SQUARE)
        found = (self.kinds == PARTIAL).nonzero()
        for at in found.split(AT_ONCE // 4 // SQUARE**2) if len(found) else ():
            i = at[:, 0, None, None] * SQUARE + within[:, None]
            j = at[:, 1, None, None] * SQUARE + within
            yield i, j, *self.fine.bounds(i, j)

    def exact(
        self, i: Tensor, j: Tensor, is_open: Tensor
    ) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]]:
        """Yield for the blocks that are open: where they are, their i and j, and their number of allowed pairs."""
        found = is_open.nonzero()
        for at in found.split(max(1, AT_ONCE // self.size**2)) if len(found) else ():
            place = tuple(at.unbind(1))
            at_i, at_j = (index.expand(is_open.shape)[place] for index in (i, j))
            yield place, at_i, at_j, _population(self.fine.exact(at_i, at_j))


def _settled(least: Tensor, most: Tensor, total: Tensor) -> Tensor:
    """EMPTY or FULL where that is certain, PARTIAL elsewhere: int8."""
    kinds = torch.full(most.shape, PARTIAL, dtype=torch.int8)
    kinds[least == total] = FULL
    kinds[most == 0] = EMPTY
    return kinds


def _kinds(squares: _Squares) -> Tensor:
    """Kinds of all blocks, int8 [blocks of queries, blocks of keys]."""
    rows, columns = squares.kinds.shape
    kinds = squares.kinds[:, None, :, None].repeat(1, SQUARE, 1, SQUARE)
    for i, j, least, most in squares.open():
        total = squares.where.total(i, j)
        settled = _settled(least, most, total)
        is_open = (settled == PARTIAL) & ((least == 0) | (most == total))
        for place, at_i, at_j, number in squares.exact(i, j, is_open):
            settled[place] = _settled(number, number, squares.where.total(at_i, at_j))
        kinds[i[:, 0, 0] // SQUARE, :, j[:, 0, 0] // SQUARE, :] = settled
    return kinds.view(rows * SQUARE, columns * SQUARE)


def _counts(squares: _Squares) -> Tensor:
    """Number of allowed pairs of each block of queries, int64 [blocks of queries]."""
    seen = ((squares.kinds == FULL) * squares.weight).sum(1)
    counts = squares.where.q.count * seen.repeat_interleave(SQUARE)
    for i, j, least, most in squares.open():
        is_open = least != most
        counts.index_add_(0, i.flatten(), most.masked_fill(is_open, 0).sum(-1, dtype=torch.int64).flatten())
        for _, at_i, _, number in squares.exact(i, j, is_open):
            counts.index_add_(0, at_i, number)
    return counts


def _population(pairs: Tensor) -> Tensor:
    """Number of True of each tile [n, t, t], int64 [n]."""
    if pairs.shape[1] % 32 or not pairs.is_contiguous():
        return pairs.sum((1, 2))
    # eight at a time: a byte of an int64 holds the sum of 128 bools
    words = pairs.view(torch.uint8).view(len(pairs), -1).view(torch.int64)
    return words.view(len(pairs), -1, 128).sum(2).view(torch.uint8).sum(1)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
