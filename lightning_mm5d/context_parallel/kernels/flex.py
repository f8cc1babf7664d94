"""Attention of one shard of queries to one shard of keys on CUDA: FlexAttention, or flash attention without a mask.

A compiled kernel is the only way to run FlexAttention without holding all scores. When torch gives up compiling (too
many shapes) that is an error here, never a large and slow fallback.

Backwards take the output and log-sum-exp of whole rows, also where keys are only a part of what queries see: with
``P = exp(scores - lse)`` of the whole row, gradients of a part need nothing else but ``rowsum(d_out * out)``. So no
forward runs again. FlexAttention's public function gives no such backward; the operation that its own backward calls
does (`torch.ops.higher_order.flex_attention_backward`). It counts log-sum-exps in powers of two.

That operation cannot be given a function of scores, so soft-capped scores are the exception: their forward runs again.
With ``out_p, lse_p`` of a part, the whole row is ``out = sum_p w_p out_p`` with ``w_p = exp(lse_p - lse)``, and
``lse = logsumexp_p lse_p``, so ::

    d loss / d out_p = w_p d_out
    d loss / d lse_p = w_p d_out . (out_p - out)

which are the two gradients that FlexAttention's public backward of this part takes. An attention sink is one more part,
and changes nothing for the others.

`takes` says which inputs these kernels know; kernel.py computes the others.

Shapes: as in kernel.py.

Tiles as FlexAttention takes them: lists of blocks, and bits for the partial ones.

FlexAttention skips what is in no list, computes full blocks without a mask, and asks a function of indices about
partial ones. Ours looks bits up that are packed once per mask; a mask's own function would be compiled into a kernel
anew for every structure of masks. The function is right everywhere, also outside of partial blocks.

Lengths are padded to a few sizes, for few kernels. What is padded is in no list, so it costs nothing; a tile that holds
padded keys beside real ones is partial. Padded queries beside real ones may see anything: their results are dropped.

Shapes: rows 1 or B; n, m tiles of padded queries and keys; P partial tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad
from torch.torch_version import TorchVersion

from lightning_mm5d.config.errors import private
from lightning_mm5d.context_parallel.masks.mask import EMPTY, FULL, PARTIAL, TILE, Scoring, Tiles
from lightning_mm5d.data.lazy import on_device

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

    def mask(self, tiles: Tiles) -> BlockMask:
        """Return the blocks of `tiles`, which this was made from, for padded queries and keys."""
        return tiles.cached(("block mask", self._device), lambda: self._block_mask(tiles))

    def _block_mask(self, tiles: Tiles) -> BlockMask:
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
    return tiles.cached(("blocks", device), lambda: Blocks(tiles, device))


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


NARROWEST = 16  # heads that FlexAttention's kernels have
SHAPES = 256  # compiled kernels before torch gives up
_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
_flex_backward = private(torch.ops.higher_order, "flex_attention_backward")
_OPTIONS = {"BACKEND": "AUTO", "PRESCALE_QK": False}  # FlexAttention's own, where none are given


def takes(q: Tensor, v: Tensor) -> bool:
    """Return whether these kernels know the dtype of `q` and the widths of `q` and `v`."""
    known = q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and min(q.shape[-1], v.shape[-1]) >= NARROWEST


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, as `kernel.attend` does."""
    blocks = blocks_of(tiles, q.device)
    if blocks.is_empty:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    with torch.autocast(q.device.type, enabled=False):
        if _is_for_flash(q, v, blocks, scoring.softcap):
            q, k, v = (_unit_stride(each) for each in (q, k, v))
            out, lse, *_ = _flash(q, k, v, 0.0, False, False, scale=scoring.scale)
            return out, lse
        return _flex(q, k, v, blocks, tiles, scoring)


def attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v`, as `kernel.attend_backward` does."""
    blocks = blocks_of(tiles, q.device)
    if blocks.is_empty:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    with torch.autocast(q.device.type, enabled=False):
        if _is_for_flash(q, v, blocks, scoring.softcap):
            return _flash_gradients(d_out.to(q.dtype), q, k, v, out.to(q.dtype), lse, scoring.scale)
        if scoring.softcap is None:
            return _flex_gradients(d_out, q, k, v, out, lse, blocks, tiles, scoring.scale)
        with torch.enable_grad():
            # padded here: what is given to a compiled function should be a leaf
            inputs = (_leaf(q, blocks.q_length), _leaf(k, blocks.k_length), _leaf(v, blocks.k_length))
            part, part_lse = _flex(*inputs, blocks, tiles, scoring)
            part, part_lse = part[:, :, : q.shape[2]], part_lse[:, :, : q.shape[2]]
        gradients = _gradients_of_part(d_out, out, lse, part.detach(), part_lse.detach())
        dq, dk, dv = torch.autograd.grad((part, part_lse), inputs, gradients)
        return dq[:, :, : q.shape[2]], dk[:, :, : k.shape[2]], dv[:, :, : k.shape[2]]


def _gradients_of_part(
    d_out: Tensor, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a part's output and log-sum-exp; the derivation is above."""
    # a query that sees nothing of this part has no share; if it sees nothing at all, lse is minus infinity as well
    share = torch.exp(part_lse - lse).masked_fill(part_lse == -torch.inf, 0)
    d_out = d_out.to(share.dtype)
    d_lse = share * (d_out * (part.to(share.dtype) - out.to(share.dtype))).sum(-1)
    return (d_out * share.unsqueeze(-1)).to(part.dtype), d_lse


# --- FlexAttention ---


def _flex(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, tiles: Tiles, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; recorded by autograd where that records."""
    q_length, cap, softcap = q.shape[2], None, scoring.softcap
    if softcap is not None:
        cap = tiles.caches.functions.get(("cap", softcap), lambda: _capped(softcap))
    run = _compiled("flex_attention", flex_attention, q, tiles)
    q, k, v = _padded(q, blocks.q_length), _padded(k, blocks.k_length), _padded(v, blocks.k_length)
    with _constants():
        out, aux = run(
            q,
            k,
            v,
            score_mod=cap,
            block_mask=blocks.mask(tiles),
            scale=scoring.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    return out[:, :, :q_length], aux.lse[:, :, :q_length]


def _flex_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: Blocks, tiles: Tiles, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q_length, k_length = q.shape[2], k.shape[2]
    run = _compiled("flex_gradients", flex_gradients, q, tiles)
    # padded queries have no gradient of their output, so they add nothing to any other
    rows = [_padded(x.to(q.dtype), blocks.q_length) for x in (d_out, out)]
    q, k, v = _padded(q, blocks.q_length), _padded(k, blocks.k_length), _padded(v, blocks.k_length)
    inputs = [x.detach() for x in (*rows, q, k, v, pad(lse, (0, blocks.q_length - q_length)))]
    with _constants():
        dq, dk, dv = run(*inputs, blocks.mask(tiles), scale)
    return dq[:, :, :q_length], dk[:, :, :k_length], dv[:, :, :k_length]


def flex_gradients(
    d_out: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, block_mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return FlexAttention's gradients of `q`, `k` and `v`, of the output and log-sum-exp of whole rows."""
    if torch.compiler.is_dynamo_compiling():  # as FlexAttention does: heads and widths are constants of a kernel
        for x in (q, k, v):
            torch._dynamo.mark_static(x, -3)
            torch._dynamo.mark_static(x, -1)
    mask = block_mask.as_tuple()
    arguments = (q, k, v, out, lse / math.log(2), d_out, None, _plain, _JOINT, mask, scale, dict(_OPTIONS), (), ())
    dq, dk, dv, _ = _flex_backward(*arguments)
    return dq, dk, dv


def _compiled(name: str, function: Callable[..., Any], q: Tensor, tiles: Tiles) -> Callable[..., Any]:
    """Return `function` as it runs on the device of `q`: on CPU as it is, for tests."""
    if not q.is_cuda:
        return function
    return tiles.caches.functions.get(name, lambda: torch.compile(function, fullgraph=True))


def _constants() -> AbstractContextManager[None]:
    # scale and softcap are constants of a kernel: as arguments, which torch makes of a second value, they fail
    return torch._dynamo.config.patch(
        specialize_float=True, recompile_limit=SHAPES, accumulated_recompile_limit=4 * SHAPES
    )


def _plain(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score


def _plain_gradient(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, gradient: Tensor) -> list[Tensor | None]:
    return [gradient, None, None, None, None]


# torch 2.13 takes None where scores stay as they are; before, it calls the function, which its compiler cannot trace
_JOINT = None if TorchVersion(torch.__version__) >= "2.13" else _plain_gradient


def _capped(softcap: float) -> Callable[..., Tensor]:
    """Return the soft cap as FlexAttention takes it; a kernel is compiled for each function that this returns."""

    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _leaf(x: Tensor, length: int) -> Tensor:
    return _padded(x.detach(), length).detach().requires_grad_()


def _padded(x: Tensor, length: int) -> Tensor:
    return x if x.shape[2] == length else pad(x, (0, 0, 0, length - x.shape[2]))


# --- flash attention ---


def _is_for_flash(q: Tensor, v: Tensor, blocks: Blocks, softcap: float | None) -> bool:
    width = q.shape[-1]
    return (
        blocks.is_full
        and softcap is None
        and q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and width == v.shape[-1]
        and width % 8 == 0
        and width <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _flash_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    d_out, q, k, v, out = (_unit_stride(each) for each in (d_out, q, k, v, out))
    # the kernel ignores the strides of lse; without dropout it reads no random state
    state, offset = (torch.zeros(size, dtype=torch.uint64, device=q.device) for size in ((2,), ()))
    lengths = (None, None, q.shape[2], k.shape[2])
    return _flash_backward(d_out, q, k, v, out, lse.contiguous(), *lengths, 0.0, False, state, offset, scale=scale)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
