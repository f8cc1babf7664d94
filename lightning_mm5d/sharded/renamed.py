"""Collectives of one tensor, by the names that torch 2.13 gave them; torch 2.11 and 2.12 know them by older ones."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

_GATHER, _SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


def all_gather_single(
    found: Tensor, own: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Gather `own` ``[n, ...]`` of all ranks of a group into `found` ``[ranks * n, ...]``."""
    return getattr(dist, _GATHER)(found, own, group=group, async_op=async_op)


def reduce_scatter_single(
    own: Tensor, sent: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Sum `sent` ``[ranks * n, ...]`` over a group, of which each rank gets its part ``[n, ...]`` in `own`."""
    return getattr(dist, _SCATTER)(own, sent, group=group, async_op=async_op)
