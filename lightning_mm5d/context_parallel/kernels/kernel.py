"""Attention of a shard of queries to a shard of keys under a mask of tiles, and its gradients, without S x S anything.

Tiles without an allowed pair are skipped. The rest is covered with rectangles, each one call of torch's
flash attention; partial results of a query are merged by their log-sum-exp. On CUDA this is FlexAttention's and flash
attention's work (flex.py).

Keys may be a part of those that a query sees: `attend` returns the log-sum-exp that `merge` needs, and
`attend_backward` takes the output and log-sum-exp of the whole row. With ``P = exp(scores - lse)`` of the whole row,
gradients of a part need nothing else but ``rowsum(d_out * out)`` (Ring Attention, Liu et al. 2023;
FlashAttention-2, Dao 2023).

`scored_forward` computes the rest in plain steps, rectangle by rectangle: soft-capped scores on CPU, narrow heads and
float64 on CUDA, other devices.

Plain functions on values: nothing here is recorded by autograd. Shapes: B batch, H query heads, G key heads
(H a multiple of G), Sq queries, Sk keys, D width of queries and keys, Dv width of values; m, n of a rectangle.

Covers the tiles of a mask that are not empty with rectangles: bands of tiles, and the spans that each band meets.

A *band* is a run of tiles along one side that meet the same tiles of the other; a *span* is a run of the tiles met.
The rectangle of a band and a span has no empty tile and is computed by one call. Long stretches that need no mask are
spans of their own; short ones stay with their mixed neighbours, because one more call costs more than a mask does.

Bands lie along the queries for the forward, which then merges few partial results, and along the keys for the backward,
where gradients of keys and values are then added up in place and only those of queries are scattered.

A plan is made once per mask and serves all layers. The session's `Caches.biases` keeps the additive masks used last;
others are made anew. A mixed rectangle has at most `MIXED_PAIRS` pairs: no mask grows with the square of the sequence.

One rectangle of attention in plain steps: for soft-capped scores, which flash kernels do not know.

All is in the dtype of the arguments; autocast is off, it would take their precision back. Scores of a rectangle are
held whole, so rectangles have at most `LONGEST_SCORED` queries and keys.

Shapes: B batch, H query heads, G key heads, m queries, n keys, D width of queries and keys, Dv width of values. The
queries of the H / G heads that share a key head are folded into one dim of rows, r = H / G * m.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_mm5d.context_parallel.kernels import flex
from lightning_mm5d.context_parallel.masks.mask import FULL, PARTIAL, TILE, Scoring, Tiles

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
    return tiles.cached(("plan", by_keys, longest), lambda: Plan(tiles, by_keys, longest))


def _bias(tiles: Tiles, row: int, q: slice, k: slice, like: Tensor) -> Bias:
    values = like.new_zeros(q.stop - q.start, k.stop - k.start)
    for i, j in (tiles.kinds[row, _tiles(q), _tiles(k)] == PARTIAL).nonzero().tolist():
        q_at, k_at = _tile(q, i), _tile(k, j)
        inside = values[q_at.start - q.start : q_at.stop - q.start, k_at.start - k.start : k_at.stop - k.start]
        inside.masked_fill_(~tiles.allowed(row, q_at, k_at), -torch.inf)
    # for the flash kernel, which is of the CPU; elsewhere the question would wait for the device
    blind = values.amax(1) < 0 if values.device.type == "cpu" else None
    return Bias(values, blind if blind is not None and bool(blind.any()) else None)


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


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.no_grad()
def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return the attention of the queries to these keys.

    Args:
        q: [B, H, Sq, D].
        k: [B, G, Sk, D].
        v: [B, G, Sk, Dv].
        tiles: which pairs are allowed, by position in `q` and `k`.
        scoring: scale and bound of the scores.

    Returns:
        Output [B, H, Sq, Dv] of `q`'s dtype and log-sum-exp [B, H, Sq], float32, or float64 of float64. A query that
        sees no key has output 0 and log-sum-exp minus infinity.
    """
    if q.is_cuda and flex.takes(q, v):
        return flex.attend(q, k, v, tiles, scoring)
    call = _Calls(q, v, scoring)
    dtype, value_width = q.dtype, v.shape[-1]
    q, k, v = call.taken(q), call.taken(k), call.taken(v)
    rows = plan(tiles, by_keys=False, longest=call.longest)
    out = _empty_like(q, v.shape[-1])
    if not rows.is_whole:
        out.zero_()
    lse = q.new_full(q.shape[:3], -torch.inf)
    for row, bands in enumerate(rows.bands):
        batch = slice(None) if len(rows.bands) == 1 else slice(row, row + 1)
        for band in bands:
            here = (batch, slice(None), band.at)
            part: tuple[Tensor, Tensor] | None = None
            for span in band.spans:
                bias = rows.bias(tiles, row, band.at, span.at, q) if span.is_mixed else None
                at = (batch, slice(None), span.at)
                attended = call.forward(q[here], k[at], v[at], bias)
                part = attended if part is None else merge(*part, *attended)
            assert part is not None, "a band meets something"
            out[here], lse[here] = part
    return out[..., :value_width].to(dtype), lse


@torch.no_grad()
def attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v`, as far as these keys are concerned.

    Args:
        d_out: gradient of the output of whole rows, [B, H, Sq, Dv].
        q, k, v, tiles, scoring: as of `attend`.
        out: output of whole rows, with all keys that a query sees, [B, H, Sq, Dv].
        lse: log-sum-exp of whole rows, [B, H, Sq]; an attention sink included.
    """
    if q.is_cuda and flex.takes(q, v):
        return flex.attend_backward(d_out, q, k, v, out, lse, tiles, scoring)
    call = _Calls(q, v, scoring)
    results = [(each.shape[-1], each.dtype) for each in (q, k, v)]
    d_out, q, k, v, out = (call.taken(each) for each in (d_out, q, k, v, out))
    lse = lse.to(q.dtype).masked_fill(lse == -torch.inf, torch.inf)  # exp(scores - lse) is 0 where nothing is seen
    columns = plan(tiles, by_keys=True, longest=call.longest)
    dq, dk, dv = (_empty_like(each, each.shape[-1]).zero_() for each in (q, k, v))
    for row, bands in enumerate(columns.bands):
        batch = slice(None) if len(columns.bands) == 1 else slice(row, row + 1)
        for band in bands:
            here = (batch, slice(None), band.at)
            k_here, v_here, dk_here, dv_here = k[here], v[here], dk[here], dv[here]
            for span in band.spans:
                bias = columns.bias(tiles, row, span.at, band.at, q) if span.is_mixed else None
                at = (batch, slice(None), span.at)
                dq_part, dk_part, dv_part = call.backward(d_out[at], q[at], k_here, v_here, out[at], lse[at], bias)
                dq[at] += dq_part
                dk_here += dk_part
                dv_here += dv_part
    dq, dk, dv = (each[..., :width].to(dtype) for each, (width, dtype) in zip((dq, dk, dv), results, strict=True))
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result for the keys of both of two results for the same queries.

    Args:
        out, other_out: [..., Sq, Dv]; the returned one has `out`'s dtype.
        lse, other_lse: [..., Sq]; minus infinity for a query that saw nothing, which counts for nothing.
    """
    # lse - other is NaN where both are minus infinity; the smallest number keeps it minus infinity
    least = torch.finfo(lse.dtype).min
    share = torch.sigmoid(other_lse - lse.clamp(min=least)).unsqueeze(-1)
    merged = torch.lerp(out.to(share.dtype), other_out.to(share.dtype), share)
    return merged.to(out.dtype), torch.logaddexp(lse, other_lse)


def _empty_like(x: Tensor, width: int) -> Tensor:
    """Return [B, heads, S, width] with the heads of a token side by side, as layers go on with them."""
    batch, heads, length, _ = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


class _Calls:
    """One rectangle forward and backward, by the flash kernel where it can.

    16 bit values are computed in float32: the flash kernel's backward is up to 13 times slower in float16 and four
    times in bfloat16, where rectangles are small.
    """

    def __init__(self, q: Tensor, v: Tensor, scoring: Scoring) -> None:
        self._scoring = scoring
        self._is_flash = scoring.softcap is None and q.device.type == "cpu"
        self._width = max(q.shape[-1], v.shape[-1])
        self._dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.longest = None if self._is_flash else LONGEST_SCORED

    def taken(self, x: Tensor) -> Tensor:
        """Return `x` as it is computed with; the flash kernel wants one width, and neighbours in memory."""
        x = x.to(self._dtype)
        if self._is_flash and x.shape[-1] < self._width:
            return pad(x, (0, self._width - x.shape[-1]))
        return x.contiguous() if self._is_flash and x.stride(-1) != 1 else x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of a rectangle."""
        if not self._is_flash:
            return scored_forward(q, k, v, None if bias is None else bias.values, self._scoring)
        out, lse = _flash(q, k, v, attn_mask=None if bias is None else bias.values, scale=self._scoring.scale)
        if bias is not None and bias.blind is not None:
            lse = lse.masked_fill(bias.blind, -torch.inf)  # the kernel says 0
        return out, lse

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Bias | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of a rectangle."""
        mask = None if bias is None else bias.values
        if not self._is_flash:
            return scored_backward(d_out, q, k, v, out, lse, mask, self._scoring)
        return _flash_backward(d_out, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=self._scoring.scale)


LONGEST_SCORED = 512


def scored_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return output [B, H, m, Dv] and log-sum-exp [B, H, m] of these keys.

    Args:
        q: [B, H, m, D].
        k: [B, G, n, D].
        v: [B, G, n, Dv].
        mask: added to scores, [m, n].
        scoring: scale and bound of the scores.
    """
    with torch.autocast(q.device.type, enabled=False):
        scores, _ = _scores(q, k, mask, scoring)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
        out = weights @ v
        return out.view(*q.shape[:3], v.shape[-1]), lse.view(q.shape[:3])


def scored_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v`.

    Args:
        d_out, out: [B, H, m, Dv], of whole rows.
        lse: [B, H, m], of whole rows; infinity where a query sees nothing at all.
        q, k, v, mask, scoring: as of `scored_forward`.
    """
    with torch.autocast(q.device.type, enabled=False):
        scores, bent = _scores(q, k, mask, scoring)
        heads = k.shape[1]
        weights = torch.exp(scores - _folded(lse.unsqueeze(-1), heads))
        d_rows = _folded(d_out, heads)
        delta = (d_rows * _folded(out, heads)).sum(-1, keepdim=True)
        dv = weights.mT @ d_rows
        d_scores = weights * (d_rows @ v.mT - delta)
        if bent is not None:
            d_scores *= 1 - bent.square()  # of tanh
        d_scores *= scoring.scale
        dq = d_scores @ k
        dk = d_scores.mT @ _folded(q, heads)
        return dq.view(q.shape), dk, dv


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """Return scores [B, G, r, n], and ``tanh(scores / softcap)`` before the mask where there is a softcap."""
    scores = (_folded(q, k.shape[1]) * scoring.scale) @ k.mT
    bent = None
    if scoring.softcap is not None:
        bent = torch.tanh(scores / scoring.softcap)
        scores = bent * scoring.softcap
    if mask is not None:
        scores.unflatten(2, (-1, q.shape[2])).add_(mask)
    return scores, bent


def _folded(x: Tensor, heads: int) -> Tensor:
    """[B, H, m, D] -> [B, G, r, D]."""
    return x.unflatten(1, (heads, -1)).flatten(2, 3)
