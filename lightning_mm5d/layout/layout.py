"""Which rank works on what: one frozen object owns all arithmetic about ranks.

Modalities take consecutive blocks of *slots* in the order of the configuration; within a modality tensor
parallel runs fastest, then context, then data, and pipeline slowest: ``arange(n).view(pp, dp, cp, tp)``. A
placement then maps slots to ranks so that the axes that talk most stay inside a node. A colocated modality
takes the slots of its owner and divides them by its own sizes; one that shares a pipeline rank has a block of its
own for its earlier stages, and for its last one takes the slots of that rank. A placement by axis names lays every
block out in their order instead, on consecutive ranks.

The *replicas* are those of the loss modality, whose last stage computes the loss; an encoder has k times
as many (then each takes every k-th microbatch) or a k-th of them (then each serves k replicas). Replicas of a modality
with unlike pipelines have unlike numbers of pipeline ranks; positions that a replica does not have take no slot.

It refuses what `sizes.solve` refuses, and placements that are no permutation, descend along an axis or lack one. It
expects modalities that passed `checks.check`.

How long each modality's axes are: solves for the replicas that the configuration leaves open.

Every unset `dp_size` gets the same value, the one that fills the world exactly. A colocated modality follows its owner:
where it shares all ranks, it divides them by its own sizes; where it shares a pipeline rank, it has as many replicas as
its owner, and ranks of its own for its earlier stages.

It refuses sizes that do not fill the world, and replicas that do not pair up. It expects modalities that passed
`checks.check`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

from lightning_mm5d.config.errors import ConfigError, nearest, one_of
from lightning_mm5d.config.features import parts
from lightning_mm5d.config.groups import path_of, value_of
from lightning_mm5d.config.modality import Modality, colocated_dp
from lightning_mm5d.config.options import AXES

_WORLD = "Trainer(devices=..., num_nodes=...)"


class Sizes(NamedTuple):
    """Lengths of a modality's axes."""

    dp: int
    pp: int
    cp: int
    tp: int


def solve(modalities: Mapping[str, Modality], world_size: int, loss_modality: str) -> dict[str, Sizes]:
    """Return the sizes of all modalities, with one common value for every unset `dp_size`.

    Args:
        modalities: configuration by name.
        world_size: number of ranks.
        loss_modality: name of the modality that computes the loss.

    Raises:
        ConfigError: when the sizes do not fill the world or do not pair up; it names the nearest worlds that fit.
    """
    own_ranks = {name: m.own_ranks_per_replica for name, m in modalities.items() if m.own_ranks_per_replica}
    given = {name: _owner(modalities, name).dp_size for name in own_ranks}
    fixed = sum(modalities[name].own_ranks(dp) for name, dp in given.items() if dp is not None)
    free = sum(own_ranks[name] for name, dp in given.items() if dp is None)
    needs = " + ".join(
        f"{name}: {'+'.join(map(str, modalities[name].lengths))} stages"
        if modalities[name].lengths
        else f"{name}: {count} * {'dp_size' if given[name] is None else given[name]}"
        for name, count in own_ranks.items()
    )
    if not free:
        axes = _axes(modalities, 1, loss_modality)
        if fixed != world_size:
            rule = f"The modalities ({needs}) fill {fixed} ranks"
            raise ConfigError(_WORLD, world_size, rule, f"Use {fixed} ranks")
        return axes
    common, remainder = divmod(world_size - fixed, free)
    rule = f"The modalities ({needs}) fill {f'{fixed} plus ' if fixed else ''}a multiple of {free} ranks"
    problem = ConfigError(_WORLD, world_size, rule, "")
    if common >= 1 and not remainder:
        try:
            return _axes(modalities, common, loss_modality)
        except ConfigError as error:
            problem = error
    fits = [fixed + n * free for n in nearest(common, lambda n: _fits(modalities, n, loss_modality))]
    if not fits:  # what is wrong is no matter of the size of the world
        return _axes(modalities, max(common, 1), loss_modality)
    fix = f"Nearest that fit: {one_of(fits)} ranks"
    if len(own_ranks) > 1 and world_size < fixed + free:
        fix += ", or let modalities share ranks with colocate_with"
    raise ConfigError(problem.field, problem.got, problem.rule, fix)


_SHARING = ("dp_shard_size", "ep_size")
"""fields that say how many of the ranks that hold the same layers share something"""


def _owner(modalities: Mapping[str, Modality], name: str) -> Modality:
    """The modality itself, or the one whose ranks it shares."""
    owner = modalities[name].owner
    return modalities[name if owner is None else owner.modality]


def _fits(modalities: Mapping[str, Modality], common: int, loss_modality: str) -> bool:
    """Whether `_axes` would succeed, without the cost of its advice."""
    replicas = {}
    for name, modality in modalities.items():
        owner = _owner(modalities, name)
        replicas[name], rest = owner.dp_size or common, 0
        if modality.owner is not None and modality.owner.pp is None:
            replicas[name], rest = divmod(replicas[name] * owner.ranks_per_replica, modality.ranks_per_replica)
        if rest or (owner is not modality and modality.dp_size not in (None, replicas[name])):
            return False
        copies = replicas[name] * modality.cp_size
        if any(copies % (value_of(modality, field) or 1) for field in _SHARING):
            return False
    if _unlike(modalities) is not None:
        return len(set(replicas.values())) == 1
    return all(_pair(dp, replicas[loss_modality]) for dp in replicas.values())


def _axes(modalities: Mapping[str, Modality], common: int, loss_modality: str) -> dict[str, Sizes]:
    """Sizes where each unset `dp_size` is `common`; refuses replicas that do not pair up."""
    axes: dict[str, Sizes] = {}
    owned: dict[str, int] = {}
    for name, modality in modalities.items():
        owner = _owner(modalities, name)
        dp = owner.dp_size or common
        owned[name] = owner.ranks(dp)
        if modality.owner is not None and modality.owner.pp is None:
            dp = colocated_dp(name, modality, owned[name])
        elif modality.dp_size not in (None, dp) and owner is not modality:
            rule = f"Its last stage shares the ranks of '{modality.owner}', of which there are {dp} replicas"
            fix = f"Use dp_size={dp}, or leave it unset"
            raise ConfigError(f"modalities.{name}.dp_size", modality.dp_size, rule, fix)
        axes[name] = Sizes(dp, modality.stages, modality.cp_size, modality.tp_size)
        _check_shards(name, modality, axes[name])
    _check_unlike(modalities, axes)
    for name, modality in modalities.items():
        if modality.owner is not None and modality.owner.pp is not None:
            continue  # it has the replicas of its owner, which is checked itself
        # of an owner and a colocated modality, only the colocated one's sizes can change alone
        colocated, other = (
            (loss_modality, name) if modalities[loss_modality].colocate_with == name else (name, loss_modality)
        )
        _check_pairs(colocated, modalities[colocated], axes[colocated].dp, owned[colocated], other, axes[other].dp)
    return axes


def _unlike(modalities: Mapping[str, Modality]) -> str | None:
    """The modality that says what each replica is like."""
    return next((name for name, modality in modalities.items() if modality.lengths or modality.pipeline.speeds), None)


def _check_unlike(modalities: Mapping[str, Modality], axes: Mapping[str, Sizes]) -> None:
    """Refuse ranks that work for several replicas where these have unlike numbers of microbatches."""
    unlike = _unlike(modalities)
    for name, size in axes.items():
        if unlike is not None and size.dp != axes[unlike].dp:
            what = "pipelines" if modalities[unlike].lengths else "speeds"
            rule = f"With {what} for each replica of {unlike!r} every modality has as many replicas, {axes[unlike].dp}"
            raise ConfigError(f"modalities.{name}.dp_size", size.dp, rule, f"Use dp_size={axes[unlike].dp}")


def _check_shards(name: str, modality: Modality, size: Sizes) -> None:
    ranks = size.dp * size.cp
    for sharing in _SHARING:
        shards = value_of(modality, sharing)
        if shards is None or ranks % shards == 0:
            continue
        what = "With the inferred dp_size it" if modality.dp_size is None else "It"
        rule = f"{what} must divide dp_size * cp_size = {size.dp} * {size.cp}"
        fits = nearest(shards, lambda n: ranks % n == 0, reach=ranks)
        raise ConfigError(f"modalities.{name}.{path_of(sharing)}", shards, rule, f"Use {one_of(fits)}")


def _check_pairs(name: str, modality: Modality, dp: int, ranks: int, other: str, replicas: int) -> None:
    if _pair(dp, replicas):
        return
    what = "The inferred dp_size" if modality.dp_size is None else "It"
    rule = f"{what} must divide the dp_size {replicas} of {other!r}, or be a multiple of it"
    if modality.colocate_with is None:
        each = modality.ranks_per_replica
        choices = nearest(dp, lambda n: _pair(n, replicas))
        fix = f"Use dp_size={one_of(f'{n} ({(n - dp) * each:+d} ranks)' for n in choices)}"
    else:
        products = sorted(ranks // n for n in nearest(dp, lambda n: ranks % n == 0 and _pair(n, replicas)))
        fix = f"A product pp_size * cp_size * tp_size of {one_of(products)} would fit"
    raise ConfigError(f"modalities.{name}.dp_size", dp, rule, fix)


def _pair(dp: int, replicas: int) -> bool:
    return dp % replicas == 0 or replicas % dp == 0


class Place(NamedTuple):
    """One rank's position in one modality."""

    rank: int
    node: int
    modality: str
    dp: int
    pp: int
    cp: int
    tp: int


class Share(NamedTuple):
    """What one encoder replica works on: microbatches ``range(start, M, step)`` of a loss_modality's replica."""

    replica: int
    start: int
    step: int


class Straddle(NamedTuple):
    """Ranks that talk much and do not share a node: a tensor parallel group, or a context parallel block."""

    modality: str
    axis: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions of all ranks. Make it with `Layout.build`.

    Args:
        size: number of ranks in the world.
        ranks_per_node: ranks per node; rank r is on node ``r // ranks_per_node``.
        loss_modality: name of the modality that computes the loss.
        axes: lengths of each modality's axes, in the order of the configuration.
        ranks: ranks of each modality, ``[pp * dp * cp * tp]``, tensor parallel fastest.
        pipelines: pipeline ranks of each replica, of the modalities where replicas have unlike numbers.
        speeds: of the replicas; None where they are equal.
        deals: whether samples are dealt out to replicas by their speeds, as with `pipelines` also where these are
            equal; else each replica draws its own.
    """

    size: int
    ranks_per_node: int
    loss_modality: str
    axes: dict[str, Sizes]
    ranks: dict[str, tuple[int, ...]]
    pipelines: dict[str, tuple[int, ...]] = field(default_factory=dict)
    speeds: tuple[float, ...] | None = None
    deals: bool = False

    @classmethod
    def build(
        cls,
        modalities: Mapping[str, Modality],
        *,
        world_size: int,
        loss_modality: str,
        ranks_per_node: int | None = None,
        placement: Sequence[int] | Sequence[str] | None = None,
    ) -> Layout:
        """Solve for the unset sizes and place the modalities.

        Every unset `dp_size` gets the same value, the one that fills the world exactly.

        Args:
            modalities: configuration by name; its order is the order of the ranks.
            world_size: number of ranks.
            loss_modality: name of the modality that computes the loss.
            ranks_per_node: ranks per node; all ranks are on one node when unset.
            placement: rank of each slot, or names of axes, outermost first, instead of the packing of this library.

        Raises:
            ConfigError: when the sizes do not fill the world, do not pair up, or the placement is wrong.
        """
        deals = any(
            spec.pipeline.pipelines is not None or spec.pipeline.speeds is not None for spec in modalities.values()
        )
        for replicas in parts("pipelines"):
            modalities = replicas.completed(modalities, world_size)
        axes = solve(modalities, world_size, loss_modality)
        pipelines = {name: modality.lengths for name, modality in modalities.items() if modality.lengths}
        speeds = next(
            (tuple(spec.pipeline.speeds) for spec in modalities.values() if spec.pipeline.speeds is not None), None
        )
        order = tuple(axis for axis in placement or () if isinstance(axis, str))
        blocks, slots = _slots(modalities, axes, _full_order(order, axes) if order else None)
        per_node = ranks_per_node or world_size

        def placed(order: Sequence[int]) -> Layout:
            ranks = {name: tuple(order[slot] for slot in slots[name]) for name in modalities}
            fields: Any = {"loss_modality": loss_modality, "pipelines": pipelines, "speeds": speeds, "deals": deals}
            return cls(size=world_size, ranks_per_node=per_node, axes=axes, ranks=ranks, **fields)

        if order:
            return placed(range(world_size))
        if placement is not None:
            ranks = [rank for rank in placement if not isinstance(rank, str)]
            _check_permutation(ranks, world_size)
            layout = placed(ranks)
            _check_ascending(layout, ranks, blocks)
            return layout
        layout = placed(range(world_size))
        if layout.straddling and (packed := _pack(modalities, axes, blocks, world_size, per_node)):
            layout = min(layout, placed(packed), key=lambda candidate: len(candidate.straddling))
        return layout

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names in the order of the configuration."""
        return tuple(self.axes)

    @property
    def num_replicas(self) -> int:
        """Replicas of the loss modality."""
        return self.axes[self.loss_modality].dp

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """All places, by modality and then in the order of its `ranks`."""
        return tuple(
            Place(rank, rank // self.ranks_per_node, name, dp, pp, cp, tp)
            for name, ranks in self.ranks.items()
            for rank, (pp, dp, cp, tp) in zip(ranks, self._positions(name), strict=True)
        )

    @cached_property
    def straddling(self) -> tuple[Straddle, ...]:
        """Tensor parallel groups and context parallel blocks that lie on more than one node."""
        straddles = []
        for name, ranks in self.ranks.items():
            _, _, cp, tp = self.axes[name]
            widths = {"tp": tp, "cp": cp * tp} if cp > 1 else {"tp": tp}
            for axis, width in widths.items():
                for first in range(0, len(ranks), width):
                    group = ranks[first : first + width]
                    if len({rank // self.ranks_per_node for rank in group}) > 1:
                        straddles.append(Straddle(name, axis, group))
        return tuple(straddles)

    def places_of(self, rank: int) -> tuple[Place, ...]:
        """Places of one rank: one, or several where modalities are colocated."""
        return self._places_by_rank[rank]

    def sizes(self, modality: str) -> Sizes:
        """Lengths of a modality's axes."""
        return self.axes[modality]

    def rank_of(self, modality: str, *, dp: int, pp: int, cp: int = 0, tp: int = 0) -> int:
        """Rank at one position of a modality."""
        size = self.axes[modality]
        index = (dp, pp, cp, tp)
        assert all(0 <= i < length for i, length in zip(index, size, strict=True)), (modality, index, size)
        assert self.has(modality, dp=dp, pp=pp), (modality, index, self.pipelines)
        lengths = self.pipelines.get(modality, (size.pp,) * size.dp)
        # replicas that have each of the earlier pipeline ranks, and of this one the replicas before
        before = sum(min(length, pp) for length in lengths) + sum(length > pp for length in lengths[:dp])
        return self.ranks[modality][(before * size.cp + cp) * size.tp + tp]

    def has(self, modality: str, *, dp: int, pp: int) -> bool:
        """Whether replica `dp` of a modality has a pipeline rank `pp`, which of unlike pipelines the longest have."""
        return modality not in self.pipelines or pp < self.pipelines[modality][dp]

    def ranks_of(
        self,
        modality: str,
        *,
        dp: int | None = None,
        pp: int | None = None,
        cp: int | None = None,
        tp: int | None = None,
    ) -> tuple[int, ...]:
        """Ranks of a modality at the given indices, all along the axes left out, tensor parallel fastest."""
        size = self.axes[modality]
        axes = ((pp, size.pp), (dp, size.dp), (cp, size.cp), (tp, size.tp))
        spans = [range(length) if index is None else (index,) for index, length in axes]
        there = ((p, d, c, t) for p, d, c, t in product(*spans) if self.has(modality, dp=d, pp=p))
        return tuple(self.rank_of(modality, pp=p, dp=d, cp=c, tp=t) for p, d, c, t in there)

    def microbatches(self, count: int) -> tuple[int, ...]:
        """How many of a step's microbatches each replica takes, by its speed, which is its number of ranks where unset.

        With unlike pipelines of 4 and 3 ranks and a `count` of 7 it is ``(8, 6)``; equal replicas take `count` each.

        Args:
            count: microbatches per replica on average, M.
        """
        speeds = self.speeds
        if speeds is None and self.pipelines:
            speeds = tuple(float(len(self.replica_ranks(replica))) for replica in range(self.num_replicas))
        return (count,) * self.num_replicas if speeds is None else tuple(shared_out(count * len(speeds), speeds))

    def microbatches_text(self, count: int) -> str:
        """`microbatches` in words: ``"7 per replica"``, or ``"8 and 6 of the replicas"``."""
        *others, last = self.microbatches(count)
        if set(others) <= {last}:
            return f"{last} per replica"
        return f"{', '.join(map(str, others))} and {last} of the replicas"

    def serves(self, modality: str, dp: int) -> tuple[Share, ...]:
        """What replica `dp` of a modality works on, by ascending replica of the loss modality."""
        dp_size, replicas = self.axes[modality].dp, self.num_replicas
        assert 0 <= dp < dp_size
        if dp_size > replicas:
            step = dp_size // replicas
            return (Share(dp // step, dp % step, step),)
        served = replicas // dp_size
        return tuple(Share(replica, 0, 1) for replica in range(dp * served, (dp + 1) * served))

    def instance_of(self, modality: str, replica: int, microbatch: int) -> int:
        """Replica of a modality that works on a microbatch of a replica of the loss_modality: undoes `serves`."""
        dp_size, replicas = self.axes[modality].dp, self.num_replicas
        assert 0 <= replica < replicas
        if dp_size > replicas:
            step = dp_size // replicas
            return replica * step + microbatch % step
        return replica // (replicas // dp_size)

    def replica_ranks(self, replica: int) -> tuple[int, ...]:
        """All ranks that work on microbatches of a replica of the loss modality, ascending."""
        ranks: set[int] = set()
        for name, size in self.axes.items():
            for turn in range(max(1, size.dp // self.num_replicas)):
                ranks.update(self.ranks_of(name, dp=self.instance_of(name, replica, turn)))
        return tuple(sorted(ranks))

    def replicas_of_rank(self, rank: int) -> tuple[int, ...]:
        """Replicas of the loss modality that any place of the rank serves, ascending."""
        shares = (self.serves(place.modality, place.dp) for place in self.places_of(rank))
        return tuple(sorted({share.replica for served in shares for share in served}))

    def same_ranks(self, a: str, b: str) -> bool:
        """Whether two modalities run as one: a single stage each, with equal sizes on the same ranks."""
        return self.axes[a].pp == 1 and self.axes[a] == self.axes[b] and self.ranks[a] == self.ranks[b]

    def _positions(self, modality: str) -> Iterator[tuple[int, ...]]:
        """All (pp, dp, cp, tp) of a modality in the order of its slots."""
        every = _positions(self.axes[modality])
        return (position for position in every if self.has(modality, pp=position[0], dp=position[1]))

    @cached_property
    def _places_by_rank(self) -> tuple[tuple[Place, ...], ...]:
        by_rank: list[list[Place]] = [[] for _ in range(self.size)]
        for place in self.places:
            by_rank[place.rank].append(place)
        return tuple(map(tuple, by_rank))


def _full_order(order: Sequence[str], axes: Mapping[str, Sizes]) -> tuple[str, ...]:
    """All axes in the order of a placement; those that it leaves out have one rank each.

    Raises:
        ConfigError: it leaves out an axis with more than one rank, or puts tp outside cp where both have several.
    """
    rest = tuple(axis for axis in AXES if axis not in order)
    for name, size in axes.items():
        lacking = [axis for axis in rest if getattr(size, axis) > 1]
        if lacking:
            sizes = ", ".join(f"{axis} {getattr(size, axis)}" for axis in lacking)
            rule = f"It names every axis with more than one rank, outermost first, and {name!r} has {sizes}"
            fits = [axis for axis in AXES if axis in lacking or axis in order]
            raise ConfigError("placement", list(order), rule, f"Use for instance {fits}")
        if min(size.cp, size.tp) > 1 and order.index("tp") < order.index("cp"):
            fits = [{"cp": "tp", "tp": "cp"}.get(axis, axis) for axis in order]
            rule = f"Of the ranks that share a sequence, those that share a layer are neighbours, and {name!r} has both"
            raise ConfigError("placement", list(order), rule, f"Use {fits}, with cp before tp")
    return (*order, *rest)


def _ordered(block: Sequence[int], size: Sizes, order: Sequence[str] | None) -> Sequence[int]:
    """The slots of a block in the order of `_positions`, where `order` says how axes lie in it, outermost first."""
    if order is None:  # that of `AXES`, which unlike pipelines have too
        return block
    stride = {axis: math.prod(getattr(size, inner) for inner in order[at + 1 :]) for at, axis in enumerate(order)}
    return [
        block[sum(stride[axis] * index for axis, index in zip(AXES, position, strict=True))]
        for position in _positions(size)
    ]


def _positions(size: Sizes) -> Iterator[tuple[int, ...]]:
    """All (pp, dp, cp, tp) of a modality in the order of its slots."""
    return product(range(size.pp), range(size.dp), range(size.cp), range(size.tp))


def _slots(
    modalities: Mapping[str, Modality], axes: Mapping[str, Sizes], order: Sequence[str] | None
) -> tuple[dict[str, range], dict[str, Sequence[int]]]:
    """The block of own slots of each modality, and all its slots: own ones, then those of its owner.

    Axes lie in each block as `order` says; slots are in the order of `_positions`.
    """
    blocks, first = {}, 0
    for name, modality in modalities.items():
        if modality.own_ranks_per_replica:
            blocks[name] = range(first, first := first + modality.own_ranks(axes[name].dp))
    slots: dict[str, Sequence[int]] = {}
    for name, modality in modalities.items():
        if modality.owner is None:
            slots[name] = _ordered(blocks[name], axes[name], order)
        elif modality.owner.pp is None:
            slots[name] = _ordered(blocks[modality.owner.modality], axes[name], order)
        else:
            owner = modality.owner.modality
            stage = math.prod(axes[name]) // axes[name].pp  # each replica of the owner has its pipeline rank
            first = modality.owner.pp * stage
            own_slots = _ordered(blocks.get(name, ()), axes[name]._replace(pp=axes[name].pp - 1), order)
            slots[name] = [*own_slots, *_ordered(blocks[owner], axes[owner], order)[first : first + stage]]
    return blocks, slots


def _pack(
    modalities: Mapping[str, Modality],
    axes: Mapping[str, Sizes],
    blocks: Mapping[str, range],
    world_size: int,
    per_node: int,
) -> list[int] | None:
    """Rank of each slot, whole context parallel blocks (or at least tensor parallel groups) within nodes.

    First-fit decreasing bin packing (D. S. Johnson, 1973). Equal units are placed in ascending order, so
    ranks still ascend along every axis. None where the packing leaves something over.
    """
    units = {}
    for name in blocks:
        sharing = [axes[n] for n, m in modalities.items() if name in (n, m.colocate_with)]
        wide, narrow = math.lcm(*(g.cp * g.tp for g in sharing)), math.lcm(*(g.tp for g in sharing))
        units[name] = next((unit for unit in (wide, narrow) if unit <= per_node), 1)
    order = [0] * world_size
    used = list(range(0, world_size, per_node))  # first free rank of each node
    for name, unit in sorted(units.items(), key=lambda item: -item[1]):
        starts = iter(blocks[name][::unit])
        slot = next(starts, None)
        for node in range(len(used)):
            end = min((node + 1) * per_node, world_size)
            while slot is not None and used[node] + unit <= end:
                order[slot : slot + unit] = range(used[node], used[node] + unit)
                used[node] += unit
                slot = next(starts, None)
        if slot is not None:
            return None
    return order


def _check_permutation(placement: Sequence[int], world_size: int) -> None:
    ranks = [rank for rank in placement if isinstance(rank, int) and not isinstance(rank, bool)]
    valid = [rank for rank in dict.fromkeys(ranks) if 0 <= rank < world_size]
    missing = sorted(set(range(world_size)) - set(valid))
    if missing or len(valid) < len(placement):
        rule = f"It names each of the ranks 0 to {world_size - 1} once"
        raise ConfigError("placement", list(placement), rule, f"The nearest is {valid + missing}")


def _check_ascending(layout: Layout, placement: Sequence[int], blocks: Mapping[str, range]) -> None:
    """Refuse a mesh that torch would build wrongly: it sorts the ranks of a group."""
    for _, _, name, dp, pp, cp, tp in layout.places:
        rank = layout.rank_of(name, dp=dp, pp=pp, cp=cp, tp=tp)
        last = layout.sizes(name).tp - 1  # of one cp index all ranks come before those of the next
        for axis, before in (
            ("dp", (dp - 1, cp, tp)),
            ("cp", (dp, cp - 1, last if tp == 0 else tp)),
            ("tp", (dp, cp, tp - 1)),
        ):
            if min(before) >= 0 and layout.has(name, dp=before[0], pp=pp):
                other = layout.rank_of(name, pp=pp, dp=before[0], cp=before[1], tp=before[2])
                if other > rank:
                    fixed = [r for block in blocks.values() for r in sorted(placement[slot] for slot in block)]
                    rule = f"Ranks must ascend along {axis}, and in {name!r} {other} comes before {rank}"
                    raise ConfigError("placement", list(placement), rule, f"{fixed} would do")


def even_lengths(size: int, count: int) -> list[int]:
    """Return how many of `size` items each of `count` ranks gets: ``even_lengths(7, 3) == [3, 2, 2]``."""
    return [size // count + (index < size % count) for index in range(count)]


def even_ranges(size: int, count: int) -> list[tuple[int, int]]:
    """Return ``(start, stop)`` of each of them: ``even_ranges(7, 3) == [(0, 3), (3, 5), (5, 7)]``."""
    return list(pairwise(accumulate(even_lengths(size, count), initial=0)))


def even_blocks(size: int, count: int, block: int) -> list[tuple[int, int]]:
    """Return `even_ranges` of blocks of items, the last of which may have fewer: their starts are multiples of `block`.

    ``even_blocks(50, 3, 16) == [(0, 32), (32, 48), (48, 50)]``
    """
    return [(min(a * block, size), min(b * block, size)) for a, b in even_ranges(-(-size // block), count)]


def shared_out(size: int, weights: Sequence[float]) -> list[int]:
    """Return how many of `size` items each rank gets in proportion to its weight: ``shared_out(14, [4, 3]) == [8, 6]``.

    Each gets one at least, so `size` is at least their number; what is left over goes to the largest remainders.
    """
    exact = [size * weight / sum(weights) for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) != size:
        step = 1 if sum(counts) < size else -1
        spare = [index for index, count in enumerate(counts) if step > 0 or count > 1]
        counts[max(spare, key=lambda index: step * (exact[index] - counts[index]))] += step
    return counts
