"""Gradients across ranks: summed over all that hold a parameter, counted once in a norm, published at backward.

Every gradient is the derivative of one number, the mean loss over all microbatches of all replicas, so replicas and
stages that share a parameter (tied embeddings) *sum* theirs; nothing needs a correction for how often it occurs.

Tensor parallel ranks sum what they have parts of: rows of a divided parameter that several of them hold, and parameters
that are whole on each of them and work on divided values. What they compute alike they do not sum.

A gradient that no rank has stays None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.shards import Segment, Shard

_BUCKET_BYTES = 25 * 2**20


class Rows(NamedTuple):
    """Some of what a rank holds of a parameter: `segments` along `dim` of its part."""

    dim: int
    segments: tuple[Segment, ...]

    def of(self, tensor: Tensor) -> list[Tensor]:
        """Views of these rows of `tensor`, shaped as the part, with `dim` moved to the front."""
        moved = tensor.movedim(self.dim, 0)
        return [moved[segment.start : segment.start + segment.length] for segment in self.segments]


class Sum(NamedTuple):
    """A parameter, or rows of it, whose gradient is summed over `group`.

    Args:
        name: of the parameter.
        group: its ranks hold these rows alike, and in the same order.
        rows: None for all of it.
        weight: what this rank's gradient is multiplied by in the sum.
    """

    name: str
    group: dist.ProcessGroup
    rows: Rows | None = None
    weight: float = 1.0


class Gradients:
    """The gradients of the parameters that this rank holds.

    Args:
        parameters: by name, each once.
        sums: what is summed over which ranks, in one order on all ranks; anything else is this rank's alone. A
            parameter has one for all of it, or any number for different rows of it.
        counted: what this rank counts in a norm over all ranks: names, with their rows or None for all of them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        sums: Sequence[Sum],
        counted: Mapping[str, Rows | None],
    ) -> None:
        self.parameters = tuple(parameters.values())
        self._counted = {id(parameters[name]): rows for name, rows in counted.items()}
        self._shared: dict[tuple[dist.ProcessGroup, torch.dtype], list[_Piece]] = {}
        for name, group, rows, weight in sums:
            piece = _piece(parameters[name], rows, weight)
            self._shared.setdefault((group, piece.parameter.dtype), []).append(piece)

    def take(self) -> list[Tensor | None]:
        """Move the gradients out of the parameters."""
        taken = [parameter.grad for parameter in self.parameters]
        self.put([None] * len(taken))
        return taken

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        """Set the gradients, as `take` returned them."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def add(self, gradients: Sequence[Tensor | None], factor: Tensor | float = 1.0) -> None:
        """Add `gradients` times `factor`; the given tensors may be kept and changed."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if not isinstance(factor, float) or factor != 1.0:
                gradient.mul_(factor)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def reduce(self, factor: float = 1.0) -> None:
        """Sum each gradient over the ranks that hold its parameter. Collective; call it on all ranks alike.

        What is frozen costs nothing; it must be frozen on all ranks alike.

        Args:
            factor: of each sum.
        """
        trained = {key: [one for one in held if one.parameter.requires_grad] for key, held in self._shared.items()}
        for work, bucket, flat in [item for key, held in trained.items() for item in _start(key[0], held)]:
            work.wait()
            _unpack(bucket, flat if factor == 1.0 else flat.mul_(factor))

    def norm(self, parameters: Iterable[Tensor], group: dist.ProcessGroup | None, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of `parameters` over all ranks, each element counted once.

        Args:
            parameters: those of an optimizer on this rank.
            group: all ranks.
            norm_type: the p of the p-norm; ``inf`` for the largest.
        """
        held = [p for p in parameters if p.grad is not None]
        grads = [grad for p in held if id(p) in self._counted for grad in self._counted_rows(p)]
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        norms = torch._foreach_norm(grads, norm_type) if grads else []
        # that of what is clipped by it, counted here or not: ranks that hold the same must scale it alike
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in held) else torch.float32
        # one dtype on all ranks, whatever they hold
        local = torch.stack([norm.to(device, torch.float64) for norm in norms]) if norms else None
        if norm_type == float("inf"):
            total = local.max() if local is not None else torch.zeros((), dtype=torch.float64, device=device)
            dist.all_reduce(total, dist.ReduceOp.MAX, group)
        else:
            total = (
                (local**norm_type).sum() if local is not None else torch.zeros((), dtype=torch.float64, device=device)
            )
            dist.all_reduce(total, dist.ReduceOp.SUM, group)
            total = total ** (1.0 / norm_type)
        return total.to(dtype)

    def _counted_rows(self, parameter: Tensor) -> list[Tensor]:
        assert parameter.grad is not None
        rows, grad = self._counted[id(parameter)], parameter.grad.detach()
        # nothing has no largest element
        return [part for part in ([grad] if rows is None else rows.of(grad)) if part.numel()]


# --- what a plan says about them ---


class Summed(NamedTuple):
    """What one rank adds to a sum over `ranks`; the other fields are those of `Sum`."""

    ranks: tuple[int, ...]
    rows: Rows | None = None
    weight: float = 1.0


def make_gradients(
    plan: Plan,
    rank: int,
    parameters: Mapping[str, nn.Parameter],
    groups: Mapping[tuple[int, ...], dist.ProcessGroup | None],
) -> Gradients:
    """Return the gradients of the `parameters` (by name, each once) that `rank` holds.

    Args:
        plan: all stages.
        rank: global rank.
        parameters: as they are on this rank, whole or its part.
        groups: those of `sum_groups`.
    """
    sums = []
    summed = sums_of(plan, rank)
    for name in parameters:
        for ranks, rows, weight in summed.get(name, ()):
            group = groups[ranks]
            assert group is not None, f"rank {rank} is not in the group of its ranks {ranks}"
            sums.append(Sum(name, group, rows, weight))
    return Gradients(parameters, sums, counted_of(plan, rank, parameters))


def sum_groups(plan: Plan) -> list[tuple[int, ...]]:
    """The ranks of every group that gradients are summed over, whoever is in it, in one order on all ranks."""
    found: dict[tuple[int, ...], None] = {}
    seen: set[Any] = set()
    for name in plan.sizes:
        kind = _kind(plan, name)
        if kind in seen:
            continue
        seen.add(kind)
        if name in plan.division.shared:
            found[plan.ownership.ranks_holding(name)] = None
        elif name in plan.division.shards:
            shard, holders = plan.division.shards[name], plan.ownership.ranks_by_shard(name)
            for index in range(len(holders)):
                found |= dict.fromkeys(_with(holders, segment) for segment in shard.segments(index))
        else:
            found |= dict.fromkeys(plan.ownership.ranks_by_shard(name))
    return [ranks for ranks in found if len(ranks) > 1]


def sums_of(plan: Plan, rank: int) -> dict[str, tuple[Summed, ...]]:
    """What `rank` sums with whom, by name of the parameter; what is its alone is left out."""
    known: dict[Any, tuple[Summed, ...]] = {}
    found: dict[str, tuple[Summed, ...]] = {}
    for name in plan.sizes:
        kind = _kind(plan, name)
        if kind not in known:
            known[kind] = tuple(one for one in _sums(plan, name, rank) if len(one.ranks) > 1)
        if known[kind]:
            found[name] = known[kind]
    return found


def counted_of(plan: Plan, rank: int, names: Iterable[str]) -> dict[str, Rows | None]:
    """What of the parameters `names` on `rank` counts in a norm, so that every element counts once on all ranks."""
    known: dict[Any, tuple[Rows | None, ...]] = {}
    found: dict[str, Rows | None] = {}
    for name in names:
        kind = _kind(plan, name)
        if kind not in known:
            known[kind] = tuple(_counts(plan, name, rank))
        for rows in known[kind]:
            found[name] = rows
    return found


def _kind(plan: Plan, name: str) -> tuple[tuple[str, ...], Shard | None, bool]:
    """Parameters of one kind are summed and counted alike; there are few kinds, and may be thousands of parameters."""
    return plan.partition.owners[name], plan.division.shards.get(name), name in plan.division.shared


def _with(holders: Sequence[Sequence[int]], segment: Segment) -> tuple[int, ...]:
    """All ranks that hold the rows of a segment."""
    return tuple(sorted({rank for index in segment.sharers for rank in holders[index]}))


def _sums(plan: Plan, name: str, rank: int) -> Iterator[Summed]:
    owners = plan.ownership.ranks_holding(name)
    if rank not in owners:
        return
    weight = plan.ownership.gradient_weight(name, rank)
    if name in plan.division.shared:
        yield Summed(owners, None, weight)
        return
    holders, shard = plan.ownership.ranks_by_shard(name), plan.division.shards.get(name)
    if shard is None:
        yield Summed(next(ranks for ranks in holders if rank in ranks), None, weight)
        return
    held: dict[tuple[int, ...], list[Segment]] = {}
    for segment in shard.segments(plan.ownership.shard_index(name, rank)):
        held.setdefault(_with(holders, segment), []).append(segment)
    for ranks, segments in held.items():
        yield Summed(ranks, Rows(shard.dim, tuple(segments)) if len(held) > 1 else None, weight)


def _counts(plan: Plan, name: str, rank: int) -> Iterator[Rows | None]:
    """What `rank` counts of a parameter, if anything: of rows that several ranks hold, the first counts them."""
    primary, shard = plan.ownership.primary_ranks(name), plan.division.shards.get(name)
    if rank not in primary:
        return
    if shard is None:
        yield None
        return
    index = primary.index(rank)
    held = shard.segments(index)
    own = tuple(segment for segment in held if segment.sharers[0] == index)
    if own:
        yield None if own == held else Rows(shard.dim, own)


# --- buckets ---


class _Piece(NamedTuple):
    """A parameter, or rows of it, as they are packed; one for all its segments, since ranks may cut them otherwise."""

    parameter: nn.Parameter
    rows: Rows | None
    weight: float
    numel: int

    def read(self, weight: float) -> list[Tensor]:
        """What this rank adds to the sum, times `weight`, as flat tensors: `numel` elements."""
        grad = self.parameter.grad
        if grad is None:
            return [self.parameter.new_zeros(self.numel)]
        parts = [grad] if self.rows is None else self.rows.of(grad)
        return [part.reshape(-1) if weight == 1.0 else part.reshape(-1) * weight for part in parts]

    def write(self, rows: Rows, flat: Tensor) -> None:
        """Take the sum as the gradient of `rows`."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        parts = rows.of(self.parameter.grad)
        for part, piece in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(piece.view_as(part))


def _piece(parameter: nn.Parameter, rows: Rows | None, weight: float) -> _Piece:
    numel = parameter.numel()
    if rows is not None:
        length = sum(segment.length for segment in rows.segments)
        numel = numel // max(parameter.shape[rows.dim], 1) * length
    return _Piece(parameter, rows, weight, numel)


def _start(group: dist.ProcessGroup, pieces: list[_Piece]) -> list[tuple[Any, list[_Piece], Tensor]]:
    started = []
    bucket: list[_Piece] = []
    size = 0
    for piece in (*pieces, None):
        if piece is not None:
            bucket.append(piece)
            size += piece.numel * piece.parameter.element_size()
        if bucket and (piece is None or size >= _BUCKET_BYTES):
            flat = _pack(bucket)
            started.append((dist.all_reduce(flat, group=group, async_op=True), bucket, flat))
            bucket, size = [], 0
    return started


def _pack(bucket: list[_Piece]) -> Tensor:
    """One flat tensor: all gradients, zeros where there is none, and behind them a flag for each."""
    parts: list[Tensor] = []
    common = bucket[0].weight if len({piece.weight for piece in bucket}) == 1 else None
    for piece in bucket:
        grad, weight = piece.parameter.grad, 1.0 if common is not None else piece.weight
        if grad is not None and piece.rows is None and weight == 1.0:  # most of them, and there may be thousands
            parts.append(grad.reshape(-1))
        else:
            parts += piece.read(weight)
    first = bucket[0].parameter
    flags = torch.tensor([piece.parameter.grad is not None for piece in bucket], dtype=first.dtype, device=first.device)
    flat = torch.cat([*parts, flags])
    return flat if common in (None, 1.0) else flat.mul_(common)  # a flag only has to differ from zero


def _unpack(bucket: list[_Piece], flat: Tensor) -> None:
    count = len(bucket)
    present = flat[-count:].tolist()
    for piece, flag, part in zip(bucket, present, flat[:-count].split([one.numel for one in bucket]), strict=True):
        if flag and piece.rows is None:
            # views of the bucket: the gradient's old memory is given up instead of being copied into
            piece.parameter.grad = part.view_as(piece.parameter)
        elif flag and piece.rows is not None:
            piece.write(piece.rows, part)


class _Publish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, publish: Callable[[Tensor], None]) -> Tensor:
        ctx.publish = publish
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[None, None, None]:
        ctx.publish(gradient[0])
        return None, None, None


def published(value: Tensor, publish: Callable[[Tensor], None]) -> Tensor:
    """Return `value` as the result of a computation whose backward calls ``publish(gradient)``.

    Lightning runs the step, then zeroes gradients, then calls backward; a schedule runs whole inside the step. So its
    gradients wait until that backward, and accumulation, scaling and a user's own `backward` work as ever.

    Args:
        value: 0-dim loss.
        publish: gets the 0-dim gradient of whatever is computed from the result.
    """
    anchor = torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)
    return _Publish.apply(anchor, value.detach(), publish)
