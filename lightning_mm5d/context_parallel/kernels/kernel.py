"""Attention of a shard of queries to a shard of keys under a mask of tiles, and its gradients, without S x S anything.

Tiles without an allowed pair are skipped. The rest is covered with rectangles (rectangles.py), each one call of torch's
flash attention; partial results of a query are merged by their log-sum-exp. On CUDA this is FlexAttention's and flash
attention's work (flex.py).

Keys may be a part of those that a query sees: `attend` returns the log-sum-exp that `merge` needs, and
`attend_backward` takes the output and log-sum-exp of the whole row. With ``P = exp(scores - lse)`` of the whole row,
gradients of a part need nothing else but ``rowsum(d_out * out)`` (Ring Attention, Liu et al. 2023;
FlashAttention-2, Dao 2023).

cpu.py computes the rest in plain steps, rectangle by rectangle: soft-capped scores on CPU, narrow heads and float64 on
CUDA, other devices.

Plain functions on values: nothing here is recorded by autograd. Shapes: B batch, H query heads, G key heads
(H a multiple of G), Sq queries, Sk keys, D width of queries and keys, Dv width of values; m, n of a rectangle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_mm5d.context_parallel.kernels import cpu, flex
from lightning_mm5d.context_parallel.kernels.rectangles import Bias, plan

if TYPE_CHECKING:
    from lightning_mm5d.context_parallel.masks.tiles import Tiles

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.no_grad()
def attend(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention of the queries to these keys.

    Args:
        q: [B, H, Sq, D].
        k: [B, G, Sk, D].
        v: [B, G, Sk, Dv].
        tiles: which pairs are allowed, by position in `q` and `k`.
        scale: factor of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask.

    Returns:
        Output [B, H, Sq, Dv] of `q`'s dtype and log-sum-exp [B, H, Sq], float32, or float64 of float64. A query that
        sees no key has output 0 and log-sum-exp minus infinity.
    """
    if q.is_cuda and flex.takes(q, v):
        return flex.attend(q, k, v, tiles, scale=scale, softcap=softcap)
    call = _Calls(q, v, scale, softcap)
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
                one = call.forward(q[here], k[at], v[at], bias)
                part = one if part is None else merge(*part, *one)
            assert part is not None, "a band meets something"
            out[here], lse[here] = part
    return out[..., :value_width].to(dtype), lse


@torch.no_grad()
def attend_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v`, as far as these keys are concerned.

    Args:
        d_out: gradient of the output of whole rows, [B, H, Sq, Dv].
        q, k, v, tiles, scale, softcap: as of `attend`.
        out: output of whole rows, with all keys that a query sees, [B, H, Sq, Dv].
        lse: log-sum-exp of whole rows, [B, H, Sq]; an attention sink included.
    """
    if q.is_cuda and flex.takes(q, v):
        return flex.attend_backward(d_out, q, k, v, out, lse, tiles, scale=scale, softcap=softcap)
    call = _Calls(q, v, scale, softcap)
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

    def __init__(self, q: Tensor, v: Tensor, scale: float, softcap: float | None) -> None:
        self._scale = scale
        self._softcap = softcap
        self._is_flash = softcap is None and q.device.type == "cpu"
        self._width = max(q.shape[-1], v.shape[-1])
        self._dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.longest = None if self._is_flash else cpu.LONGEST

    def taken(self, x: Tensor) -> Tensor:
        """Return `x` as it is computed with; the flash kernel wants one width, and neighbours in memory."""
        x = x.to(self._dtype)
        if self._is_flash and x.shape[-1] < self._width:
            return pad(x, (0, self._width - x.shape[-1]))
        return x.contiguous() if self._is_flash and x.stride(-1) != 1 else x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of a rectangle."""
        if not self._is_flash:
            return cpu.forward(q, k, v, None if bias is None else bias.values, self._scale, self._softcap)
        out, lse = _flash(q, k, v, attn_mask=None if bias is None else bias.values, scale=self._scale)
        if bias is not None and bias.blind is not None:
            lse = lse.masked_fill(bias.blind, -torch.inf)  # the kernel says 0
        return out, lse

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Bias | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of a rectangle."""
        mask = None if bias is None else bias.values
        if not self._is_flash:
            return cpu.backward(d_out, q, k, v, out, lse, mask, self._scale, self._softcap)
        return _flash_backward(d_out, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=self._scale)
