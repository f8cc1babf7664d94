"""Masks, and what each is as a whole, for tests of how they are judged block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.masks.mask import EMPTY, FULL, PARTIAL, TILE, Mask, MaskFunction


def runs(batch: int, size: int, longest: int) -> Tensor:
    """Ids of stretches of 1 to `longest` tokens, in no order: [B, S]."""
    rows = []
    for _ in range(batch):
        lengths = torch.randint(1, longest + 1, (size,))
        rows.append(torch.randperm(size).repeat_interleave(lengths)[:size])
    return torch.stack(rows)


def padding(batch: int, size: int) -> Tensor:
    """True where a token is real, rows padded on alternating sides: bool [B, S]."""
    at = torch.arange(size)
    return torch.stack([at >= size // 3 if row % 2 == 0 else at < size - 17 * row for row in range(batch)])


def brute(function: MaskFunction, batch: int, q_length: int, k_length: int) -> Tensor:
    """The whole mask, as transformers makes it: bool [B, Sq, Sk]."""
    b, q, k = torch.arange(batch), torch.arange(q_length), torch.arange(k_length)
    whole = function(b[:, None, None, None], torch.zeros(1, 1, 1, 1).long(), q[:, None], k)
    return whole.expand(batch, 1, q_length, k_length)[:, 0]


def shards(q_length: int, k_length: int) -> list[tuple[Tensor, Tensor]]:
    """Shards of queries and keys: all, halves, random ones, none."""
    q, k = torch.arange(q_length), torch.arange(k_length)
    some_q, some_k = (torch.randperm(n)[: 2 * n // 3].sort()[0] for n in (q_length, k_length))
    zigzag = torch.cat([q[: q_length // 4], q[-q_length // 4 :]])
    return [(q, k), (q[q_length // 2 :], k[: k_length // 2]), (zigzag, k[77:]), (some_q, some_k), (q[:0], k)]


def check(mask: Mask, want: Tensor) -> None:
    """Assert that tiles, their masks and the work are those of the whole mask `want` [B, Sq, Sk]."""
    assert mask.rows in (1, mask.batch)
    for q, k in shards(mask.q_length, mask.k_length):
        tiles, inside = mask.tiles(q, k), want[:, q][:, :, k]
        assert (tiles.rows, tiles.q_length, tiles.k_length) == (mask.rows, len(q), len(k))
        for row in range(mask.batch):
            kinds = tiles.kinds[row if tiles.rows > 1 else 0]
            for i, band in enumerate(inside[row].split(TILE) if len(q) else ()):
                for j, tile in enumerate(band.split(TILE, 1)):
                    assert kinds[i, j] == (FULL if tile.all() else PARTIAL if tile.any() else EMPTY)
                    at = slice(i * TILE, i * TILE + len(band)), slice(j * TILE, (j + 1) * TILE)
                    assert torch.equal(tiles.allowed(row, *at), tile)
            some = slice(len(q) // 5, len(q) // 5 + 200), slice(3, 290)
            assert torch.equal(tiles.allowed(row, *some), inside[row][some])
            assert torch.equal(mask.allowed(row, q[some[0]], k[some[1]]), inside[row][some])
    for block in (TILE, 2 * TILE, 100, 32):
        assert mask.work(block).tolist() == [int(part.sum()) for part in want.sum((0, 2)).split(block)]
    assert torch.equal(mask.dense()[:, 0], want)
