"""Puts full tensors together from the parts of all ranks, on every rank, and cuts them to parts again.

A part is a shard of tensor parallelism, the rows that a rank owns with ``zero_stage``, or the full tensor of a stage.
Each rank that keeps a part broadcasts it, many parameters in one message.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.plan.data_shards import DataShards
from lightning_mm5d.plan.holdings import Holding, Holdings, Part, narrowed
from lightning_mm5d.plan.plan import Plan

_BUCKET_BYTES = 64 * 2**20


class Moving(NamedTuple):
    """A tensor whose parts all ranks get.

    Attributes:
        name: of its parameter.
        dtype: the same on all ranks.
        present: what this rank has of it, in any form; None where it has nothing.
        full: gets the parts; None where this rank only sends.
    """

    name: str
    dtype: torch.dtype
    present: Tensor | None
    full: Tensor | None


class PartExchange:
    """Brings parts to all ranks.

    Args:
        module: the LightningModule, which says which names are tied.
        plan: all stages.
        rank: global rank.
        wire: where messages of the default group live.
    """

    def __init__(self, module: nn.Module, plan: Plan, rank: int, wire: torch.device) -> None:
        holdings = Holdings(plan, module)
        self._rank, self._wire = rank, wire
        self._keepers, self._holders = cache(holdings.keepers), cache(plan.ownership.ranks_holding)
        self._holding = cache(lambda name, rank: holdings.of(name, rank, plan.shapes[name]))

    def holding(self, name: str, rank: int) -> Holding:
        """Return what a rank that holds a parameter holds of it."""
        return self._holding(name, rank)

    def own_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of what this rank owns of a parameter that it holds."""
        return self._holding(name, self._rank).own

    def forms(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a parameter, full, local and own, of any rank that keeps a part of it."""
        held = self._holding(name, self._rank if self.is_held(name) else self._keepers(name)[0])
        return held.full, held.local, held.own

    def is_held(self, name: str) -> bool:
        """Return whether this rank holds a part of a parameter."""
        return self._rank in self._holders(name)

    def cut(self, name: str, full: Tensor, local: Tensor) -> None:
        """Write to `local`, which has any form, this rank's part of a full tensor."""
        for part in self._holding(name, self._rank).parts(local.shape):
            narrowed(local, part.held).copy_(narrowed(full, part.full))

    def bring(self, tensors: Sequence[Moving]) -> None:
        """Send parts to all ranks; collective.

        Args:
            tensors: with equal names and dtypes on all ranks.
        """
        sent: dict[tuple[int, torch.dtype], list[Moving]] = {}
        for one in tensors:
            for keeper in self._keepers(one.name):
                sent.setdefault((keeper, one.dtype), []).append(one)
        for (keeper, dtype), moving in sent.items():
            bucket: list[Moving] = []
            size = 0
            for one in moving:
                bucket.append(one)
                size += dtype.itemsize * math.prod(self._holding(one.name, keeper).own)
                if size >= _BUCKET_BYTES:
                    self._broadcast(keeper, dtype, bucket)
                    bucket, size = [], 0
            if bucket:
                self._broadcast(keeper, dtype, bucket)

    def _broadcast(self, keeper: int, dtype: torch.dtype, bucket: Sequence[Moving]) -> None:
        holdings = [self._holding(one.name, keeper) for one in bucket]
        parts = [(one, holding, part) for one, holding in zip(bucket, holdings, strict=True) for part in _own(holding)]
        sizes = [math.prod(stop - start for start, stop in part.full) for _, _, part in parts]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=self._wire)
        pieces = flat.split(sizes)
        if keeper == self._rank:
            for (one, holding, part), piece in zip(parts, pieces, strict=True):
                if one.present is not None:
                    piece.copy_(_region(one.present, holding, part).reshape(-1))
        dist.broadcast(flat, keeper)
        for (one, _, part), piece in zip(parts, pieces, strict=True):
            if one.full is not None:
                region = narrowed(one.full, part.full)
                region.copy_(piece.view(region.shape))


def _own(holding: Holding) -> list[Part]:
    return holding.parts(holding.own)


SUMMED_LATE = "Gradients of an accumulation are summed over ranks at its last batch"


def is_summed_late(plan: Plan, name: str) -> bool:
    """Whether an accumulation sums the gradient of a parameter over ranks at its last batch alone."""
    first = plan.ownership.ranks_holding(name)[0]
    return DataShards(plan).of(name, first) is None and any(
        len(ranks) > 1 for ranks in plan.ownership.ranks_by_shard(name)
    )


def partial_names(plan: Plan) -> frozenset[str]:
    """Return the names of the parameters of which some rank does not hold the full tensor between steps."""
    shards, world = DataShards(plan), plan.layout.size
    found = set[str]()
    for name in plan.shapes:
        if name not in plan.partition.owners:
            continue
        ranks = plan.ownership.ranks_holding(name)
        is_cut = name in plan.division.shards or any(shards.of(name, rank) is not None for rank in ranks)
        if is_cut or len(ranks) < world:
            found.add(name)
    return frozenset(found)


def _region(tensor: Tensor, holding: Holding, part: Part) -> Tensor:
    """Return a part of a rank's own rows as a view of a tensor in any form."""
    if tuple(tensor.shape) == holding.full:
        return narrowed(tensor, part.full)
    return narrowed(holding.own_part(tensor), part.held)


def hooks_of_all(found: list[tuple[Any, str, Any]], group: dist.ProcessGroup | None) -> list[tuple[Any, str, Any]]:
    """Return the hooks (owner, name, hook) that every rank has; collective.

    A round that begins in a callback of one rank would never end.
    """
    if group is None:
        return found
    seen: Counter[str] = Counter()
    codes = []
    for owner, name, _ in found:
        seen[key := f"{type(owner).__qualname__}.{name}"] += 1
        codes.append(zlib.crc32(f"{key} {seen[key]}".encode()))
    most = torch.tensor(len(codes))
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    own = torch.tensor([*codes, *[-1] * (int(most) - len(codes))], dtype=torch.int64)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group)
    common = set.intersection(*(set(one.tolist()) for one in every))
    return [one for one, code in zip(found, codes, strict=True) if code in common]
