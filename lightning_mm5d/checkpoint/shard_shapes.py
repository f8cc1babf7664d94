"""Which ranks send which shards of a tensor, and the shapes of full and local tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.shards import Shard


def senders(plan: Plan, name: str | None, shard: Shard | None) -> list[tuple[int, int]]:
    """Return the shards that make up a tensor, by index, with the ranks that send them; rank 0 has what has no name."""
    if name is None:
        return [(0, 0)]
    primary = plan.ownership.primary_ranks(name)
    return [(0, primary[0])] if shard is None else [(index, primary[index]) for index in shard.distinct]


def full_shape(shape: torch.Size, shard: Shard) -> torch.Size:
    """Return the shape of the full tensor, given that of a local one or its own."""
    return torch.Size((*shape[: shard.dim], shard.size, *shape[shard.dim + 1 :]))


def local_shape(shape: torch.Size, shard: Shard, index: int) -> torch.Size:
    """Return the shape of the local tensor of rank `index`, given that of another or of the full one."""
    return torch.Size((*shape[: shard.dim], shard.lengths[index], *shape[shard.dim + 1 :]))


def is_local(tensor: Tensor, shard: Shard) -> bool:
    """Whether a tensor is less than the full one; a local tensor of full length is equal to it."""
    return tensor.shape[shard.dim] != shard.size
