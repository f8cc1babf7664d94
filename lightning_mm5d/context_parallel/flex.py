"""Attention of one shard of queries to one shard of keys on CUDA: FlexAttention, or flash attention without a mask.

FlexAttention gets its blocks from the tiles: empty ones are skipped, full ones need no mask. For partial ones it looks up
bits that are packed once per mask, so one compiled kernel serves all masks; a mask's own function in its place would be
compiled anew for every structure of masks. Lengths are padded to a few sizes for the same reason, and what is padded is
empty tiles, which cost nothing. Where all tiles are full and values have 16 bits, it is flash attention.

A compiled kernel is the only way to run FlexAttention without holding all scores, so when torch gives up compiling (too
many shapes) that is an error here, never a slow and large fallback.

The backward with keys that are only a part of what queries see. With ``out_p, lse_p`` of this part, the whole row is
``out = sum_p w_p out_p`` with ``w_p = exp(lse_p - lse)`` and ``lse = logsumexp_p lse_p``, so ::

    d loss / d out_p = w_p d_out
    d loss / d lse_p = w_p (d_out . out_p - d_out . out)

which are the two gradients that FlexAttention's own backward of this part takes. Flash attention's backward takes the
output and log-sum-exp of the whole row instead, as the kernel on CPU does.

It refuses nothing; `takes` says what it cannot compute.

Shapes: as in kernel.py; P different partial tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from lightning_mm5d.context_parallel.tiles import EMPTY, FULL, PARTIAL, TILE

if TYPE_CHECKING:
    from lightning_mm5d.context_parallel.tiles import Tiles

WORD = 32  # bits
SHAPES = 256  # compiled kernels before torch gives up
_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
_BLOCKS: WeakKeyDictionary[Tiles, dict[torch.device, Blocks]] = WeakKeyDictionary()


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether FlexAttention's kernels have these widths and this dtype."""
    return min(q.shape[-1], v.shape[-1]) >= 16 and q.dtype in (torch.float32, torch.bfloat16, torch.float16)


def attend(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, as `kernel.attend` does."""
    blocks = _blocks(tiles, q.device)
    if blocks.is_empty:
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        shape = q.shape[:3]
        return q.new_zeros(*shape, v.shape[-1]), q.new_full(shape, -torch.inf, dtype=lse_dtype)
    with torch.autocast(q.device.type, enabled=False):
        if blocks.is_full and _is_for_flash(q, v, softcap):
            out, lse, *_ = _flash(*map(_unit_stride, (q, k, v)), 0.0, False, False, scale=scale)
            return out, lse
        return _flex(q, k, v, blocks, scale, softcap)


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
    """Return the gradients of `q`, `k` and `v`, as `kernel.attend_backward` does."""
    blocks = _blocks(tiles, q.device)
    if blocks.is_empty:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    with torch.autocast(q.device.type, enabled=False):
        if blocks.is_full and _is_for_flash(q, v, softcap):
            tensors = map(_unit_stride, (d_out, q, k, v, out))
            # without dropout the random state is not read; lse must be contiguous, the kernel does not look at strides
            state, offset = (q.new_zeros(size, dtype=torch.uint64) for size in ((2,), ()))
            lengths = (None, None, q.shape[2], k.shape[2])
            return _flash_backward(
                *tensors, lse.contiguous(), *lengths, 0.0, False, state, offset, scale=scale
            )  # fmt: skip
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in (q, k, v)]
            part, part_lse = _flex(*inputs, blocks, scale, softcap)
        d_part, d_part_lse = _gradients_of_part(d_out, out, lse, part.detach(), part_lse.detach())
        dq, dk, dv = torch.autograd.grad((part, part_lse), inputs, (d_part, d_part_lse))
        return dq, dk, dv


def _gradients_of_part(
    d_out: Tensor, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a part's output and log-sum-exp; the derivation is above."""
    # a query that sees nothing of this part has no share in it; if it sees nothing at all, lse is minus infinity too
    share = torch.exp(part_lse - lse).masked_fill(part_lse == -torch.inf, 0)
    d_out = d_out.to(share.dtype)
    d_lse = share * (d_out * (part.to(share.dtype) - out.to(share.dtype))).sum(-1)
    return (d_out * share.unsqueeze(-1)).to(part.dtype), d_lse


def _flex(
    q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; recorded by autograd where it records."""
    q_length = q.shape[2]
    q, k, v = _padded(q, blocks.q_length), _padded(k, blocks.k_length), _padded(v, blocks.k_length)
    with torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=4 * SHAPES):
        out, aux = (_compiled() if q.is_cuda else flex_attention)(
            q,
            k,
            v,
            score_mod=None if softcap is None else _capped(softcap),
            block_mask=blocks.mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    return out[:, :, :q_length], aux.lse[:, :, :q_length]


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    """FlexAttention as a kernel."""
    return torch.compile(flex_attention, fullgraph=True)


@lru_cache(maxsize=16)
def _capped(softcap: float) -> Callable[..., Tensor]:
    """The soft cap as FlexAttention takes it: the same function for the same number, so that nothing is recompiled."""

    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


class Blocks:
    """One mask as FlexAttention takes it.

    Args:
        tiles: the mask.
        device: where it is needed.

    Attributes:
        is_empty, is_full: whether all tiles are.
        q_length, k_length: padded lengths.
        mask: blocks of padded queries and keys; made when first asked for.
    """

    def __init__(self, tiles: Tiles, device: torch.device) -> None:
        self.is_empty = not bool((tiles.kinds != EMPTY).any())
        self.is_full = not self.is_empty and bool((tiles.kinds == FULL).all())
        self.q_length, self.k_length = padded_length(tiles.q_length), padded_length(tiles.k_length)
        self._device = device
        self._tiles: Tiles | None = tiles
"""
