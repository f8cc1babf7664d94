"""Tiles as FlexAttention takes them: lists of blocks, and bits for the partial ones.

FlexAttention skips what is in no list, computes full blocks without a mask, and asks a function of indices about
partial ones. Ours looks bits up that are packed once per mask; a mask's own function would be compiled into a kernel
anew for every structure of masks. The function is right everywhere, also outside of partial blocks.

Lengths are padded to a few sizes, for few kernels. What is padded is in no list, so it costs nothing; a tile that holds
padded keys beside real ones is partial. Padded queries beside real ones may see anything: their results are dropped.

Shapes: rows 1 or B; n, m tiles of padded queries and keys; P partial tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from lightning_mm5d.context_parallel.masks.tiles import EMPTY, FULL, PARTIAL, TILE
from lightning_mm5d.sharded.host_copies import on_device

if TYPE_CHECKING:
    from lightning_mm5d.context_parallel.masks.tiles import Tiles

WORD = 32  # bits
AT_ONCE = 64  # tiles that are packed together
NOTHING, EVERYTHING, FIRST = 0, 1, 2  # among the tiles that have bits: two that are always there, then partial ones
SIZES = 4  # padded lengths between a power of two and the next


class Blocks:
    """One mask for FlexAttention; get it with `blocks_of`.

    Attributes:
        is_empty, is_full: whether all tiles are.
        q_length, k_length: padded lengths.
    """

    def __init__(self, tiles: Tiles, device: torch.device) -> None:
        self.is_empty = not bool((tiles.kinds != EMPTY).any())
        self.is_full = not self.is_empty and bool((tiles.kinds == FULL).all())
        self.q_length, self.k_length = padded_length(tiles.q_length), padded_length(tiles.k_length)
        self._device = device
        self._mask: BlockMask | None = None

    def mask(self, tiles: Tiles) -> BlockMask:
        """Return the blocks of `tiles`, which this was made from, for padded queries and keys."""
        if self._mask is None:
            self._mask = self._made(tiles)
        return self._mask

    def _made(self, tiles: Tiles) -> BlockMask:
        shape = (tiles.rows, self.q_length // TILE, self.k_length // TILE)
        kinds = torch.full(shape, EMPTY, dtype=torch.int8)
        kinds[:, : tiles.kinds.shape[1], : tiles.kinds.shape[2]] = tiles.kinds
        if tiles.k_length % TILE:
            last = kinds[:, :, tiles.k_length // TILE]
            last[last == FULL] = PARTIAL
        bits, index = _bits(tiles, kinds, self._device)
        kinds = on_device(kinds, self._device).unsqueeze(1)
        return BlockMask.from_kv_blocks(
            *_listed(kinds == PARTIAL),
            *_listed(kinds == FULL),
            BLOCK_SIZE=TILE,
            mask_mod=_looked_up(bits, index),
            seq_lengths=(self.q_length, self.k_length),
        )


def blocks_of(tiles: Tiles, device: torch.device) -> Blocks:
    """Return what FlexAttention needs of `tiles`, made at the first call."""
    return tiles.kept(("blocks", device), lambda: Blocks(tiles, device))


def padded_length(length: int) -> int:
    """Return the padded length: a multiple of `TILE`, one of `SIZES` from each power of two to the next."""
    tiles = max(1, -(-length // TILE))
    step = max(1, 2 ** (tiles - 1).bit_length() // (2 * SIZES))
    return -(-tiles // step) * step * TILE


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row has, [rows, 1, n], and which, [rows, 1, n, m], those first."""
    listed = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), listed.to(torch.int32)


def _bits(tiles: Tiles, kinds: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the bits of tiles and which of them each tile has.

    Returns:
        Bits, int32 [FIRST + P or more, TILE, TILE / WORD]: as many as a power of two, again for few kernels. Indices,
        int32 [rows, n, m].
    """
    index = torch.where(kinds == FULL, EVERYTHING, NOTHING).to(torch.int32)
    at = (kinds == PARTIAL).nonzero()
    index[at.unbind(1)] = torch.arange(FIRST, FIRST + len(at), dtype=torch.int32)
    bits = torch.zeros(2 ** (FIRST + len(at) - 1).bit_length(), TILE, TILE // WORD, dtype=torch.int32, device=device)
    bits[EVERYTHING] = -1
    place = torch.arange(WORD, device=device)
    for start in range(0, len(at), AT_ONCE):
        allowed = torch.stack([_allowed(tiles, *where) for where in at[start : start + AT_ONCE].tolist()]).to(device)
        words = (allowed.to(torch.int64).unflatten(2, (-1, WORD)) << place).sum(-1).to(torch.int32)
        bits[FIRST + start : FIRST + start + len(words)] = words
    return bits, on_device(index, device)


def _allowed(tiles: Tiles, row: int, i: int, j: int) -> Tensor:
    """Return which pairs of a tile are allowed, bool [TILE, TILE]; none that is padded."""
    allowed = tiles.allowed(row, slice(i * TILE, (i + 1) * TILE), slice(j * TILE, (j + 1) * TILE))
    queries, keys = allowed.shape
    return allowed if queries == keys == TILE else pad(allowed, (0, TILE - keys, 0, TILE - queries))


def _looked_up(bits: Tensor, index: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask as a function of row, head, query and key, one for each row or one for all rows."""
    # TILE = 2**7 and WORD = 2**5; shifts, because kernels divide slowly
    if len(index) == 1:
        only = index[0]

        def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            word = bits[only[q >> 7, k >> 7], q & 127, (k & 127) >> 5]
            return ((word >> (k & 31)) & 1) == 1

        return allowed

    def allowed_in_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        word = bits[index[b, q >> 7, k >> 7], q & 127, (k & 127) >> 5]
        return ((word >> (k & 31)) & 1) == 1

    return allowed_in_row
