"""Says which rows of a parameter each rank owns, and where the tensor that a rank holds lies in the full one.

**Rows.** Data or context parallel ranks own rows of a parameter with `zero_stage` 1, 2 or 3. The ranks that hold equal
copies of a parameter are cut into *blocks* of `dp_shard_size` ranks. Each rank of a block owns some rows of the local
tensor, which tensor parallelism may have sharded before. Ranks at the same place of other blocks own the same rows; a
gradient is scattered within the block and summed over these (HSDP).

Examples of rows are of a ``[6, 4]`` parameter of one stage with ``dp_size=4, dp_shard_size=2`` on ranks 0 to 3.

**Holdings.** A rank holds a parameter in one of three forms: the full tensor; its *local* tensor, which tensor
parallelism has sharded; or its *own* rows of the local tensor, where data parallel ranks share it. The shape tells
which form it is, because a shard is shorter than what it is cut from.

Examples of holdings are of a ``[8, 4]`` weight with ``tp_size=2`` along dim 0 whose local ``[4, 4]`` tensors two ranks
share, for the first of the ranks with rows 4 to 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_mm5d.expert_parallel import ExpertLayer, parameters_of
from lightning_mm5d.layout.layout import even_ranges
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.plan.sums import summed_by
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.shards import Range, Shard

_BALANCED = 1.05  # the largest share over an even one with which the first dim is taken


class DataShard(NamedTuple):
    """What one rank owns of the local tensor of a parameter.

    Attributes:
        stage: 1, 2 or 3, as `zero_stage`.
        dim: along which the block shares it: 0.
        ranges: rows that each rank of the block owns, in the order of the block: ``((0, 3), (3, 6))``.
        block: the ranks that share one copy: ``(2, 3)`` for rank 2.
        across: the ranks that own the same rows: ``(0, 2)`` for rank 2.
        place: of this rank in its block: 0.
        of_experts: whether rows are experts, to which tokens travel in a step, so that they are not gathered.
    """

    stage: int
    dim: int
    ranges: tuple[Range, ...]
    block: tuple[int, ...]
    across: tuple[int, ...]
    place: int
    of_experts: bool = False

    @property
    def length(self) -> int:
        """Length of `dim` of the local tensor."""
        return max(stop for _, stop in self.ranges)

    def rows(self, whole: Tensor, place: int | None = None) -> Tensor:
        """Return a view of what the rank at `place` of the block owns of the local tensor; by default, this rank."""
        start, stop = self.ranges[self.place if place is None else place]
        return whole.narrow(self.dim, start, stop - start)

    def own_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what this rank owns of a local tensor of `shape`."""
        start, stop = self.ranges[self.place]
        return (*shape[: self.dim], stop - start, *shape[self.dim + 1 :])


class _Copies(NamedTuple):
    """Who shares the copies of a parameter with a rank; whether it is shared depends on its shape too."""

    stage: int
    block: tuple[int, ...]
    across: tuple[int, ...]


class DataShards:
    """The data shards of all ranks.

    Args:
        plan: all stages.

    Attributes:
        exist: whether any modality shares anything.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._numbers = {name: number for number, name in enumerate(plan.shapes)}
        self._copies: dict[Any, _Copies | None] = {}
        self._cut = cache(_cut)
        self._blocks: dict[tuple[StageKey, int], tuple[tuple[int, ...], ...]] = {}
        self._experts = dict(parameters_of(plan.experts))
        self.exist = bool(plan.experts) or any(modality.shared_stage for modality in plan.modalities.values())

    def of(self, name: str, rank: int) -> DataShard | None:
        """Return what `rank` owns of a parameter that it holds; None where it is not shared."""
        if not self.exist or name not in self._numbers:
            return None
        copies = self._copies_of(name, rank)
        if copies is None:
            return None
        shape, (stage, block, across) = self.local_shape(name, rank), copies
        if experts := self._experts.get(name):
            return DataShard(3, 0, experts.rows(name, shape[0]), block, across, block.index(rank), of_experts=True)
        rests_own = stage == 3 or self._plan.main_params is not None
        cut = self._cut(shape, len(block), self._numbers[name] % len(block), rests_own=rests_own)
        return None if cut is None else DataShard(stage, *cut, block, across, block.index(rank))

    def owned_by(self, rank: int, names: Iterable[str]) -> dict[str, DataShard]:
        """Return what `rank` owns of the shared ones among the parameters `names` that it holds, in their order."""
        shards = {name: self.of(name, rank) for name in names} if self.exist else {}
        return {name: shard for name, shard in shards.items() if shard is not None}

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the shape of the local tensor of a parameter: what `rank` holds of it after tensor parallelism."""
        shape, shard = self._plan.shapes[name], self._plan.division.shards.get(name)
        if shard is None:
            return shape
        return shard.local_shape(shape, self._plan.ownership.shard_index(name, rank))

    def meeting(self, key: StageKey, rank: int) -> tuple[int, ...]:
        """Return the ranks that `rank` gathers the layers of a stage with, for each forward and each backward."""
        members = self._plan.topology.members[key]
        ranks = set[int]()
        for member in members:
            modality = self._plan.modalities[member.modality]
            if modality.shared_stage == 3 and modality.sharding.reshard_after_forward:
                size = self._shard_size(member.modality)
                ranks.update(*(block for block in self._blocks_of(member, size) if rank in block and len(block) > 1))
        return tuple(sorted(ranks.union(self.sharing_experts(key, rank))))

    def expert_layers(self, key: StageKey) -> list[ExpertLayer]:
        """Return the experts of a stage that ranks share, in the order of the module."""
        held = self._plan.ownership.parameters[key]
        return [layer for layer in self._plan.experts.values() if layer.parameters[0] in held]

    def sharing_experts(self, key: StageKey, rank: int) -> tuple[int, ...]:
        """Return the ranks that share experts of a stage with `rank`, directly or through others."""
        layers = self.expert_layers(key)
        ranks, new = set[int](), {rank} if layers else set[int]()
        while new:
            ranks |= new
            new = {peer for member in new for layer in layers for peer in self.expert_block(layer, member)} - ranks
        return tuple(sorted(ranks))

    def expert_block(self, layer: ExpertLayer, rank: int) -> tuple[int, ...]:
        """Return the ranks that share the experts of a layer with `rank`, which holds some of them."""
        copies = self._copies_of(layer.parameters[0], rank)
        assert copies is not None
        return copies.block

    def groups(self) -> list[tuple[int, ...]]:
        """Return the ranks of every group that parameters are scattered, gathered or summed over, in one order."""
        groups = {ranks: None for copies in self._every() for ranks in (copies.block, copies.across)}
        return [ranks for ranks in groups if len(ranks) > 1]

    def across(self) -> list[tuple[int, ...]]:
        """Return the ranks of every group that rows of several blocks are summed over, in one order."""
        groups = {copies.across: None for copies in self._every()}
        return [ranks for ranks in groups if len(ranks) > 1]

    def _every(self) -> Iterator[_Copies]:
        """Yield all that occur on any rank, in one order on all ranks."""
        seen = set()
        for name in self._numbers if self.exist else ():
            kind = self._kind(name)
            if kind not in seen:
                seen.add(kind)
                for rank in self._plan.ownership.ranks_holding(name):
                    if copies := self._copies_of(name, rank):
                        yield copies

    def _copies_of(self, name: str, rank: int) -> _Copies | None:
        key = self._kind(name), rank
        if key not in self._copies:
            self._copies[key] = self._find_copies(name, rank)
        return self._copies[key]

    def _find_copies(self, name: str, rank: int) -> _Copies | None:
        plan = self._plan
        keys = sorted(plan.partition.owners[name], key=lambda key: (key.modality, key.number))
        experts = self._experts.get(name)
        stages = {3} if experts else {plan.modalities[key.modality].shared_stage for key in keys}
        sums = summed_by(plan, name, rank)
        if stages == {0} or len(stages) > 1 or len(sums) != 1 or sums[0].rows is not None:
            return None
        equal = set(sums[0].ranks)
        sizes = {key: experts.degree if experts else self._shard_size(key.modality) for key in keys}
        blocks = [block for key in keys for block in self._blocks_of(key, sizes[key]) if not equal.isdisjoint(block)]
        block = next(ranks for ranks in blocks if rank in ranks)
        if len(block) == 1 or any(len(ranks) != len(block) or not equal.issuperset(ranks) for ranks in blocks):
            return None
        place = block.index(rank)
        return _Copies(stages.pop(), block, tuple(sorted({ranks[place] for ranks in blocks})))

    def _kind(self, name: str) -> Any:
        division = self._plan.division
        experts = self._experts.get(name)
        degree = experts and experts.degree
        return self._plan.partition.owners[name], division.shards.get(name), name in division.shared, degree

    def _shard_size(self, modality: str) -> int:
        sizes = self._plan.layout.sizes(modality)
        return self._plan.modalities[modality].sharding.dp_shard_size or sizes.dp * sizes.cp

    def _blocks_of(self, key: StageKey, size: int) -> tuple[tuple[int, ...], ...]:
        """The blocks of a stage, of `size` ranks: ``((0, 1), (2, 3))``."""
        if (key, size) not in self._blocks:
            sizes = self._plan.layout.sizes(key.modality)
            instances = self._plan.topology.instances(self._plan.topology.stage_of[key])
            blocks = []
            for index in range(sizes.tp):
                copies = [rank for ranks in instances for rank in ranks[index :: sizes.tp]]
                # ascending, as groups are: a placement may put cp outside dp
                blocks += [tuple(sorted(copies[start : start + size])) for start in range(0, len(copies), size)]
            self._blocks[key, size] = tuple(blocks)
        return self._blocks[key, size]


def _cut(shape: Sequence[int], size: int, number: int, *, rests_own: bool) -> tuple[int, tuple[Range, ...]] | None:
    """Return the dim along which `size` ranks share a tensor, and the rows of each; None where no dim is long enough.

    Rows are contiguous in memory along the first dim, so it is taken where its shares are about even. Which ranks get a
    row more depends on the parameter's `number`, so that no rank gets all of them. Where rows are all that a rank has
    between batches, it owns two at least: a single one would broadcast where a callback adds it to a copy of the whole,
    without an error.
    """
    least = 2 * size if rests_own else size
    fits = [dim for dim, length in enumerate(shape) if length >= least]
    if not fits:
        return None
    uneven = {dim: -(-shape[dim] // size) * size / shape[dim] for dim in fits}
    dim = 0 if uneven.get(0, 2.0) <= _BALANCED else min(fits, key=lambda dim: (uneven[dim], dim))
    ranges = even_ranges(shape[dim], size)
    return dim, tuple(ranges[(place + number) % size] for place in range(size))


Box = tuple[Range, ...]  # one (start, stop) for each dim


class Part(NamedTuple):
    """Where a part of a rank's tensor lies in it, ``((0, 2), (0, 4))``, and in the full one, ``((4, 6), (0, 4))``."""

    held: Box
    full: Box


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a tensor.

    Attributes:
        full: shape of the full tensor: ``(8, 4)``.
        local: shape of the local tensor: ``(4, 4)``.
        owned: shape of the rank's own rows, or of the local tensor where they are not shared: ``(2, 4)``.
        shard: how tensor parallelism shards it; None where it does not.
        index: of the rank's tensor parallel shard: 1.
        rows: which rows are the rank's own; None where the tensor is not shared.
    """

    full: tuple[int, ...]
    local: tuple[int, ...]
    owned: tuple[int, ...]
    shard: Shard | None
    index: int
    rows: DataShard | None

    def parts(self, shape: Sequence[int]) -> list[Part]:
        """Return the parts of a tensor of `shape`, which is one of the three."""
        if tuple(shape) == self.full:
            return [Part(whole_box(self.full), whole_box(self.full))]
        if self.shard is None:
            parts = [Part(whole_box(self.local), whole_box(self.full))]
        else:
            parts, offset, dim = [], 0, self.shard.dim
            for start, stop in self.shard.ranges[self.index]:
                held = (offset, offset + stop - start)
                full = with_range(whole_box(self.full), dim, (start, stop))
                if (across := self.shard.across) is not None:
                    full = with_range(full, across.dim, across.ranges[self.index])
                parts.append(Part(with_range(whole_box(self.local), dim, held), full))
                offset += stop - start
        if self.rows is None or tuple(shape) != self.owned:
            return parts
        dim, (first, last) = self.rows.dim, self.rows.ranges[self.rows.place]
        row_parts = []
        for part in parts:
            low, high = max(first, part.held[dim][0]), min(last, part.held[dim][1])
            start = part.full[dim][0] + low - part.held[dim][0]
            if low < high:
                rows = (low - first, high - first)
                row_parts.append(
                    Part(with_range(part.held, dim, rows), with_range(part.full, dim, (start, start + high - low)))
                )
        return row_parts

    def cut(self, full: Tensor, held: Tensor) -> Tensor:
        """Write the rank's part of a full tensor to `held`, which has one of the three forms; return it."""
        for part in self.parts(held.shape):
            narrowed(held, part.held).copy_(narrowed(full, part.full))
        return held

    def own_part(self, tensor: Tensor) -> Tensor:
        """Return the rank's own rows of its local tensor, or a tensor that is no local one as it is."""
        return self.rows.rows(tensor) if self.rows is not None and tensor.shape == self.local else tensor

    def view(self, tensor: Tensor, part: Part) -> Tensor:
        """Return a part of the local tensor as a view of `tensor`, which has one of the three forms."""
        box = part.full if tensor.shape == self.full else part.held
        if self.rows is not None and tensor.shape == self.owned:
            first = self.rows.ranges[self.rows.place][0]
            start, stop = box[self.rows.dim]
            box = with_range(box, self.rows.dim, (start - first, stop - first))
        return narrowed(tensor, box)


class Holdings:
    """What the ranks of a plan hold of the tensors of a module.

    Args:
        plan: all stages.
        root: the LightningModule, or a copy of it, which says which names are tied.
    """

    def __init__(self, plan: Plan, root: nn.Module) -> None:
        self._plan, self._shards = plan, DataShards(plan)
        first: dict[int, str] = {}
        tensors = root.named_parameters(remove_duplicate=False) if self._shards.exist else ()
        # rows are those of the first name of a tied parameter
        self._first = {name: first.setdefault(id(tensor), name) for name, tensor in tensors}

    def of(self, name: str, rank: int, shape: Sequence[int]) -> Holding:
        """Return what `rank`, which holds it, holds of a parameter or buffer that has `shape` in some form."""
        rows = self._rows(name, rank)
        shard = self._plan.division.shards.get(name)
        full = local = self.full_shape(name, shape)
        index = 0
        if shard is not None:
            index = self._plan.ownership.shard_index(name, rank)
            local = shard.local_shape(full, index)
        return Holding(full, local, rows.own_shape(local) if rows else local, shard, index, rows)

    def full_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the full tensor, given that of any form of it."""
        if name in self._first and name in self._plan.shapes:
            return self._plan.shapes[name]
        shard = self._plan.division.shards.get(name)
        return tuple(shape) if shard is None else shard.full_shape(shape)

    def keepers(self, name: str) -> tuple[int, ...]:
        """Return the ranks whose own rows make up a tensor: its primary ranks, and those that share with them."""
        primary, shard = self._plan.ownership.primary_ranks(name), self._plan.division.shards.get(name)
        chosen = primary[:1] if shard is None else [primary[index] for index in shard.distinct]
        ranks: list[int] = []
        for rank in chosen:
            rows = self._rows(name, rank)
            ranks += (rank,) if rows is None else rows.block
        return tuple(ranks)

    def _rows(self, name: str, rank: int) -> DataShard | None:
        return self._shards.of(self._first[name], rank) if name in self._first else None


def narrowed(tensor: Tensor, box: Sequence[Range]) -> Tensor:
    """Return a view of a box of `tensor`."""
    for dim, (start, stop) in enumerate(box):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, length) for length in shape)


def with_range(box: Box, dim: int, held: Range) -> Box:
    """Return a box with another range along `dim`."""
    return (*box[:dim], held, *box[dim + 1 :])
