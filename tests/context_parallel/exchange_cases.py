"""Attention over several ranks beside dense attention in one process, for tests.

Rings of 2, 3 and 4 ranks; groups within 4 ranks: inner 0-1 and 2-3, outer 0, 2 and 1, 3.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_mm5d.context_parallel.balance import uniform, zigzag
from lightning_mm5d.context_parallel.exchange import attention
from lightning_mm5d.context_parallel.exchange.attention import ContextGroups, context_attention
from lightning_mm5d.context_parallel.masks.mask import Mask
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.sequence import TokenSplit

B, S, D, DV = 2, 301, 8, 6
LIMIT_S = 60


@dataclass(frozen=True)
class Case:
    """One call, the same on all ranks; `split` and `mask` are names of those below."""

    mode: str
    split: str = "zigzag"
    mask: str = "causal"
    heads: tuple[int, int] = (4, 2)
    size: int = S
    sinks: bool = False
    softcap: float | None = None
    dtype: torch.dtype = torch.float64
    nested: bool = False
    step_bytes: int = 0
    autocast: bool = False
    is_checkpointed: bool = False


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (q - k < 40)


def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Documents of 90 tokens; in each, tokens 10 to 49 are an image whose tokens see each other."""
    is_image = (q % 90 >= 10) & (q % 90 < 50) & (k % 90 >= 10) & (k % 90 < 50)
    return (q // 90 == k // 90) & ((k <= q) | is_image)


def padded(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Row 0 ends after 250 tokens; row 1 begins at the 130th, so that its first queries see nothing."""
    return (k <= q) & torch.where(b == 0, k < 250, k >= 130)


MASKS = {"causal": causal, "sliding": sliding, "packed": packed, "padded": padded, "all": None}


def uneven(size: int, ranks: int) -> TokenSplit:
    """Stretches of 7 tokens, at random, of which the last rank gets most and rank 1, if there is a third, none."""
    generator = torch.Generator().manual_seed(ranks)
    weights = torch.tensor([0.0 if rank == 1 and ranks > 2 else 1.0 + rank for rank in range(ranks)])
    starts = list(range(0, size, 7))
    owners = torch.multinomial(weights, len(starts), replacement=True, generator=generator).tolist()
    parts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, owner in zip(starts, owners, strict=True):
        parts[owner].append((start, min(start + 7, size)))
    return TokenSplit.of(parts, size)


SPLITS: dict[str, Callable[[int, int], TokenSplit]] = {"uniform": uniform, "zigzag": zigzag, "uneven": uneven}


def tensors(case: Case) -> list[Tensor]:
    """Whole queries, keys, values, gradient of the output, and sinks."""
    generator = torch.Generator().manual_seed(1)
    heads, keys = case.heads
    shapes = [(B, heads, case.size, D), (B, keys, case.size, D), (B, keys, case.size, DV), (B, heads, case.size, DV)]
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in [*shapes, (heads,)]]
    return [x.to(case.dtype).double() for x in made]


def mask_of(case: Case) -> Mask:
    return Mask(MASKS[case.mask], batch=B, q_length=case.size, k_length=case.size, device="cpu")


def groups_of(rank: int, world: int) -> ContextGroups:
    """The groups of a rank; makes them on all ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    whole = TensorGroup(dist.new_group(list(range(world))))
    if world != 4:
        return ContextGroups(whole)
    inner, outer = ([dist.new_group(ranks) for ranks in way] for way in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    return ContextGroups(whole, TensorGroup(inner[rank // 2]), TensorGroup(outer[rank % 2]))


def own_part(case: Case, rank: int, world: int) -> tuple[TokenSplit, list[Tensor]]:
    split = SPLITS[case.split](case.size, world)
    *whole, sinks = tensors(case)
    at = split.indices(rank)
    return split, [x[:, :, at].to(case.dtype) for x in whole] + [sinks.to(case.dtype)]


def call(case: Case, groups: ContextGroups) -> list[Tensor]:
    """Output of one rank, and gradients of its queries, keys, values and of sinks."""
    split, (q, k, v, d_out, sinks) = own_part(case, groups.whole.index, groups.whole.size)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    attention.STEP_BYTES = case.step_bytes
    chosen = groups if case.nested or case.mode == "hybrid" else ContextGroups(groups.whole)
    options: Any = {"mode": case.mode, "scale": 0.3, "softcap": case.softcap, "sinks": sinks if case.sinks else None}
    arguments = q, k, v, mask_of(case), split, chosen
    with torch.autocast("cpu", dtype=torch.bfloat16) if case.autocast else nullcontext():
        if case.is_checkpointed:
            out = checkpoint(context_attention, *arguments, use_reentrant=False, **options)
        else:
            out = context_attention(*arguments, **options)
    out.backward(d_out.to(out.dtype))
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [out.detach(), *gradients]
