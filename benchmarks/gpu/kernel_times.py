"""Attention by tiles on a GPU, beside torch's own with the same queries, keys and values in bf16.

- FlexAttention as its users write it: a function of the mask, and the block mask that `create_block_mask` makes of it.
- FlexAttention without a mask, which computes all tiles. Of its time, the share of tiles that are not empty is the
  least that a mask can take.
- `scaled_dot_product_attention`: causal by its flash kernel, other masks dense where they fit.

FLOP are counted in tiles that are not empty: ``4 D`` for each of their pairs and heads in the forward, 2.5 times as
many in the backward. Compilation is measured with an empty cache, in this process alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import Row
from lightning_mm5d.context_parallel.kernels.kernel import attend, attend_backward
from lightning_mm5d.context_parallel.masks.mask import EMPTY, TILE, Caches, Mask, Scoring, Tiles

BENCHMARKS = str(Path(__file__).parents[1])
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

from context_kernel import masks  # noqa: E402

HEADS = 8
NAMES = ("causal", "four documents", "causal with images")
LONG = (8192, 16384, 32768, 65536)
ENDS = (8192, 65536)
DENSE_TOKENS = 16384
"""Longer dense masks are not made."""
Call = Callable[[], list[Tensor]]


def _measure(width: int, lengths: tuple[int, ...], machine: Machine) -> Iterator[Row]:
    """Yield the rows of one head width."""
    with TemporaryDirectory() as folder, torch._dynamo.config.patch(recompile_limit=256):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        caches, theirs = Caches(), _Theirs(machine)
        for length in machine.pick(lengths, (256,)):
            for name in NAMES:
                yield from _Case(machine, caches, theirs, width, length, name).rows()


width_64 = partial(_measure, 64, ENDS)
width_72 = partial(_measure, 72, ENDS)
width_80 = partial(_measure, 80, ENDS)
width_128 = partial(_measure, 128, LONG)
width_256 = partial(_measure, 256, ENDS)


class _Theirs:
    """FlexAttention and its block masks, compiled; dry: the same by dense attention."""

    def __init__(self, machine: Machine) -> None:
        self._is_dry = machine.is_dry
        if not self._is_dry:
            self._flex: Any = torch.compile(flex_attention, fullgraph=True)
            self._make: Any = torch.compile(create_block_mask)

    def blocks(self, name: str, length: int, device: torch.device) -> BlockMask:
        """Return the block mask of one of the masks."""
        make = create_block_mask if self._is_dry else self._make
        return make(masks(length, device=device)[name], None, None, length, length, device=device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask | None, scale: float) -> Tensor:
        """Return the attention under a block mask; without one, of all pairs."""
        if not self._is_dry:
            return self._flex(q, k, v, block_mask=blocks, scale=scale)
        at = torch.arange(q.shape[2])
        zero = torch.tensor(0)
        dense = None if blocks is None else blocks.mask_mod(zero, zero, at[:, None], at)
        return scaled_dot_product_attention(q, k, v, dense, scale=scale)


class _Case:
    """One mask at one length and head width."""

    def __init__(self, machine: Machine, caches: Caches, theirs: _Theirs, width: int, length: int, name: str) -> None:
        self._machine, self._theirs, self._name, self._length = machine, theirs, name, length
        self._title = f"width {width}, {length} tokens, {name}"
        self._scale = width**-0.5
        tokens = torch.arange(length)
        mask = Mask(
            masks(length)[name], batch=1, q_length=length, k_length=length, device=torch.device("cpu"), caches=caches
        )
        self._tiles: Tiles = mask.tiles(tokens, tokens)
        self._share = float((self._tiles.kinds != EMPTY).float().mean())
        pairs = int((self._tiles.kinds != EMPTY).sum()) * TILE * TILE
        self._flop = 4.0 * width * HEADS * pairs
        generator = torch.Generator(machine.device).manual_seed(0)
        dtype = torch.bfloat16
        self._values = [
            torch.randn(1, length, HEADS, width, generator=generator, device=machine.device).to(dtype).transpose(1, 2)
            for _ in range(4)
        ]

    def rows(self) -> Iterator[Row]:
        """Yield compilation, agreement, then the times of both passes."""
        try:
            yield from self._compiled()
            blocks = self._theirs.blocks(self._name, self._length, self._machine.device)
            yield self._agreement(blocks)
            yield from self._times(blocks, with_backward=False)
            yield from self._times(blocks, with_backward=True)
        except torch.OutOfMemoryError:
            yield Row(name=self._title, status="skipped", note="does not fit into the GPU's memory")

    def _compiled(self) -> Iterator[Row]:
        graphs, start = counters["stats"]["unique_graphs"], time.perf_counter()
        self._ours(True)()
        self._machine.synchronize()
        seconds, new = time.perf_counter() - start, counters["stats"]["unique_graphs"] - graphs
        yield Row(name=f"{self._title}: first forward and backward", value=seconds, unit="s", note=f"{new} graphs")

    def _agreement(self, blocks: BlockMask) -> Row:
        """Return the largest difference of output and gradients from FlexAttention's, over its largest value."""
        pairs = zip(self._ours(True)(), self._flex(blocks, True)(), strict=True)
        off = max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
        return Row(name=f"{self._title}: difference from FlexAttention", value=off, at_most=0.02)

    def _times(self, blocks: BlockMask, *, with_backward: bool) -> Iterator[Row]:
        seconds = self._machine.seconds
        ours = seconds(self._ours(with_backward))
        flex = seconds(self._flex(blocks, with_backward))
        whole = seconds(self._flex(None, with_backward))
        title = f"{self._title}: forward{' and backward' if with_backward else ''}"
        rate = self._flop * (3.5 if with_backward else 1.0) / ours / 1e12
        note = f"{ours * 1e3:.3f} ms, {self._share:.3f} of the tiles"
        yield Row(name=title, value=rate, unit="TFLOP/s", note=note)
        yield Row(name=f"{title}: time / FlexAttention's", value=ours / flex, at_most=1.0, note=f"{flex * 1e3:.3f} ms")
        least = self._share * whole
        note = f"{least * 1e3:.3f} ms"
        yield Row(name=f"{title}: time / share of tiles", value=ours / least, at_most=1.15, note=note)
        if self._name == "causal" or self._length <= DENSE_TOKENS:
            dense = seconds(self._dense(with_backward))
            yield Row(name=f"{title}: time / SDPA's", value=ours / dense, note=f"{dense * 1e3:.3f} ms")

    def _ours(self, with_backward: bool) -> Call:
        q, k, v, d_out = self._values

        def call() -> list[Tensor]:
            out, lse = attend(q, k, v, self._tiles, Scoring(self._scale))
            if not with_backward:
                return [out]
            return [out, *attend_backward(d_out, q, k, v, out, lse, self._tiles, Scoring(self._scale))]

        return call

    def _flex(self, blocks: BlockMask | None, with_backward: bool) -> Call:
        return self._recorded(lambda q, k, v: self._theirs.attend(q, k, v, blocks, self._scale), with_backward)

    def _dense(self, with_backward: bool) -> Call:
        if self._name == "causal":
            options: dict[str, Any] = {"is_causal": True}
        else:
            at = torch.arange(self._length, device=self._machine.device)
            zero = torch.zeros((), dtype=torch.int64, device=at.device)
            function = masks(self._length, device=self._machine.device)[self._name]
            options = {"attn_mask": function(zero, zero, at[:, None], at)}
        return self._recorded(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=self._scale, **options), with_backward
        )

    def _recorded(self, function: Callable[..., Tensor], with_backward: bool) -> Call:
        """Return a call of a function that autograd knows."""
        q, k, v, d_out = self._values

        def call() -> list[Tensor]:
            if not with_backward:
                with torch.no_grad():
                    return [function(q, k, v)]
            inputs = [each.detach().requires_grad_() for each in (q, k, v)]
            out = function(*inputs)
            return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

        return call
