"""What a plan says of gradients: which rows of which parameter are summed over which ranks, and who counts them.

Every gradient is the derivative of one number, the mean loss over all microbatches of all replicas, so replicas and
stages that share a parameter (tied embeddings) *sum* theirs; no gradient is corrected for how often it occurs.

Tensor parallel ranks sum the gradients of rows of a sharded parameter that several of them hold, and of parameters
that each of them holds in full and that work on sharded values. They do not sum what they all compute equally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.shards import Segment, Shard

T = TypeVar("T")


class Rows(NamedTuple):
    """Some rows of the local tensor of a parameter: `segments` along `dim`."""

    dim: int
    segments: tuple[Segment, ...]

    def of(self, tensor: Tensor) -> list[Tensor]:
        """Return views of these rows of `tensor`, which is shaped as the local one, with `dim` moved to the front."""
        moved = tensor.movedim(self.dim, 0)
        return [moved[segment.start : segment.start + segment.length] for segment in self.segments]


class Summed(NamedTuple):
    """A parameter, or rows of it, whose gradient a rank sums with others.

    Attributes:
        ranks: all that hold these rows, in the same order.
        rows: None for all of the local tensor.
        weight: what this rank's gradient is multiplied by in the sum.
    """

    ranks: tuple[int, ...]
    rows: Rows | None = None
    weight: float = 1.0


def sum_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Return the ranks of every group of the plan that gradients are summed over, in one order on all ranks."""

    def of_parameter(name: str) -> Sequence[tuple[int, ...]]:
        if name in plan.division.shared:
            return [plan.ownership.ranks_holding(name)]
        holders = plan.ownership.ranks_by_shard(name)
        if (shard := plan.division.shards.get(name)) is None:
            return holders
        return [_with(holders, segment) for index in range(len(holders)) for segment in shard.segments(index)]

    groups = dict.fromkeys(ranks for _, every in _by_kind(plan, plan.sizes, of_parameter) for ranks in every)
    return [ranks for ranks in groups if len(ranks) > 1]


def sums_of(plan: Plan, rank: int) -> dict[str, tuple[Summed, ...]]:
    """Return what `rank` sums with others, by name of the parameter; skips parameters that only this rank holds."""

    def shared(name: str) -> tuple[Summed, ...]:
        return tuple(summed for summed in _sums(plan, name, rank) if len(summed.ranks) > 1)

    return {name: sums for name, sums in _by_kind(plan, plan.sizes, shared) if sums}


def summed_by(plan: Plan, name: str, rank: int) -> tuple[Summed, ...]:
    """Return what `rank` sums with others of one parameter."""
    return tuple(_sums(plan, name, rank))


def counted_of(plan: Plan, rank: int, names: Iterable[str]) -> dict[str, Rows | None]:
    """Return what `rank` counts of the parameters `names` in a norm, so that every element counts once over all ranks.

    It skips parameters that only other ranks count; None stands for the whole local tensor.
    """
    every = _by_kind(plan, names, lambda name: tuple(_counts(plan, name, rank)))
    return {name: rows for name, counted in every for rows in counted}


def _by_kind(plan: Plan, names: Iterable[str], make: Callable[[str], T]) -> Iterator[tuple[str, T]]:
    """Yield each name with what `make` returns of it, which is made once for each kind."""
    known: dict[Any, T] = {}
    for name in names:
        kind = _kind(plan, name)
        if kind not in known:
            known[kind] = make(name)
        yield name, known[kind]


def _kind(plan: Plan, name: str) -> tuple[tuple[str, ...], Shard | None, bool]:
    """Parameters of one kind are summed and counted equally: few kinds, of what may be thousands of parameters."""
    return plan.partition.owners[name], plan.division.shards.get(name), name in plan.division.shared


def _with(holders: Sequence[Sequence[int]], segment: Segment) -> tuple[int, ...]:
    """Return all ranks that hold the rows of a segment."""
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
    """Yield what `rank` counts of a parameter, if anything: the first rank that holds a row counts it."""
    primary, shard = plan.ownership.primary_ranks(name), plan.division.shards.get(name)
    if rank not in primary:
        return
    if shard is None:
        yield None
        return
    index = primary.index(rank)
    held = shard.segments(index)
    counted = tuple(segment for segment in held if segment.sharers[0] == index)
    if counted:
        yield None if counted == held else Rows(shard.dim, counted)
