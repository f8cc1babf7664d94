"""Enumerates placements of modalities on ranks; each splits layers so that the largest load of a rank is smallest.

There are four ways to place an encoder. It has its own ranks; its last stage shares the language model's first rank,
after own ranks or without any; each of the language model's ranks runs a replica of it on some of the microbatches; or
the first rank of another encoder runs all of it. For every combination of ways, all numbers of ranks that add up to
`num_ranks` are tried. There may be no placement.

Divides rows of layers over ranks with the smallest possible largest load, also where rows share a rank.

An encoder's last layers and the language model's first layers may share a rank. The two rows must then be balanced
together, because the shared rank has the load of both.

Bisection over whole numbers finds the smallest bound that all ranks can keep. A greedy filling tests a bound: a
colocated row fills its own ranks from its first layer on, the owner fills its ranks from its last layer back, and the
remaining layers are the least load that the shared rank can have. (Bisection for one row: S. H. Bokhari, *Partitioning
problems in parallel, pipelined, and distributed computing*, 1988.) Callers make sure that every part gets a layer.

The graph of a placement, the stages of one replica with their costs, is built by the code that plans a run. Its costs
are those of `Unit`s, in which one parameter stands for all trained ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from lightning_mm5d.config.groups import PipelineTemplate, with_fields
from lightning_mm5d.config.modality import Modality, Owner
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import StageCut
from lightning_mm5d.partition.costs import Unit, balance, costed, kept_of
from lightning_mm5d.schedule import Graph
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.tools.planner.outcomes import plan_of_stages
from lightning_mm5d.tools.planner.rank_memory import span_of

Sums = tuple[int, ...]
"""Prefix sums of a row's costs, from 0: a row of costs 2, 1, 4 is (0, 2, 3, 7)."""


class Division(NamedTuple):
    """The layers and the load of each rank.

    Attributes:
        loads: load of each rank: first the owner's ranks, the shared one first, then the own ranks of each colocated
            row.
        owner: number of layers of each of the owner's parts.
        colocated: for each colocated row the number of layers of its parts; the last part is on the shared rank.
    """

    loads: tuple[int, ...]
    owner: tuple[int, ...]
    colocated: tuple[tuple[int, ...], ...]

    @property
    def busiest(self) -> int:
        """The largest load of a rank."""
        return max(self.loads)


@dataclass(frozen=True)
class Group:
    """A row, and the colocated rows whose last part is on its first rank.

    Args:
        owner: the row.
        parts: number of the owner's ranks.
        colocated: for each colocated row, its sums and the number of its own ranks before the shared one.
        beside: constant load of each of the owner's ranks, descending; none by default. (With an ascending load the
            filling could leave a large layer to a rank without room for it.)
    """

    owner: Sums
    parts: int
    colocated: tuple[tuple[Sums, int], ...] = ()
    beside: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert list(self.beside) == sorted(self.beside, reverse=True), self.beside

    @property
    def total(self) -> int:
        """The sum of all loads."""
        return self.owner[-1] + sum(sums[-1] for sums, _ in self.colocated) + sum(self.beside)

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.parts + sum(own_ranks for _, own_ranks in self.colocated)

    def within(self, bound: int) -> Division | None:
        """Return a division with all loads at most `bound`, or None if there is none."""
        beside = self.beside or (0,) * self.parts
        stops = [len(self.owner) - 1]
        for part in range(self.parts - 1, 0, -1):
            start = max(bisect_left(self.owner, self.owner[stops[0]] - bound + beside[part]), part)
            if start >= stops[0]:
                return None
            stops.insert(0, start)
        shared = self.owner[stops[0]] + beside[0]
        colocated: list[list[int]] = []
        for sums, own_ranks in self.colocated:
            ends = [0]
            for left in range(own_ranks, 0, -1):
                end = min(bisect_right(sums, sums[ends[-1]] + bound) - 1, len(sums) - 1 - left)
                if end <= ends[-1]:
                    return None
                ends.append(end)
            shared += sums[-1] - sums[ends[-1]]
            colocated.append([*ends, len(sums) - 1])
        return self._division([0, *stops], colocated) if shared <= bound else None

    def divide(self, limit: int | None = None) -> Division | None:
        """Return a division with the smallest possible largest load, or None if that is above `limit`."""
        limit = self.total if limit is None else limit
        least = -(-self.total // self.ranks)
        best = self.within(limit) if least <= limit else None
        if best is None:
            return None
        while least < best.busiest:
            middle = (least + best.busiest) // 2
            better = self.within(middle)
            if better is None:
                least = middle + 1
            else:
                best = better
        return best

    def evened(self, division: Division) -> Division:
        """Return the division with layers spread evenly over ranks that are not shared; the largest load stays.

        Filling alone leaves the last rank of a row with too little.
        """
        first = division.owner[0]
        colocated = []
        for (sums, _), sizes in zip(self.colocated, division.colocated, strict=True):
            upto = sum(sizes[:-1])
            colocated.append([0, *accumulate([*_even(sums, 0, upto, len(sizes) - 1), sizes[-1]])])
        owner = [0, *accumulate([first, *_even(self.owner, first, len(self.owner) - 1, self.parts - 1)])]
        spread = self._division(owner, colocated)
        return spread if spread.busiest <= division.busiest else division

    def _division(self, owner: Sequence[int], colocated: Sequence[Sequence[int]]) -> Division:
        """The division for the ends of each row's parts, from 0 to the number of layers."""
        beside = self.beside or (0,) * self.parts
        loads = [self.owner[b] - self.owner[a] + more for (a, b), more in zip(pairwise(owner), beside, strict=True)]
        for (sums, _), ends in zip(self.colocated, colocated, strict=True):
            *own_loads, shared = (sums[b] - sums[a] for a, b in pairwise(ends))
            loads[0] += shared
            loads += own_loads
        sizes = [tuple(b - a for a, b in pairwise(ends)) for ends in (owner, *colocated)]
        return Division(tuple(loads), sizes[0], tuple(sizes[1:]))


def fewest(sums: Sums, bound: int) -> int | None:
    """Return the fewest ranks that keep `bound` for one row, or None if a single layer costs more."""
    start, parts = 0, 0
    while start < len(sums) - 1:
        end = bisect_right(sums, sums[start] + bound) - 1
        if end == start:
            return None
        start, parts = end, parts + 1
    return parts


def _even(sums: Sums, start: int, stop: int, parts: int) -> list[int]:
    return balance([b - a for a, b in pairwise(sums[start : stop + 1])], parts) if parts else []


_BITS = 50  # of the sum of all costs, which are scaled and rounded to integers


@dataclass(frozen=True)
class Placement:
    """Where each modality runs, and how its layers are split.

    Attributes:
        owners: whose ranks each encoder shares; None for ranks of its own.
        sizes: layers of each modality's stages, in order.
        loads: work of each rank in a step, scaled to integers.
    """

    owners: Mapping[str, Owner | None]
    sizes: Mapping[str, tuple[int, ...]]
    loads: tuple[int, ...]

    @cached_property
    def shared(self) -> int:
        """How many stages of colocated encoders share a rank with their owner, each replica counted."""
        colocated = (owner for owner in self.owners.values() if owner is not None)
        return sum(len(self.sizes[owner.modality]) if owner.pp is None else 1 for owner in colocated)

    @cached_property
    def order(self) -> tuple[int, int, int]:
        """Sort key, best first: the largest load, then the number of shared stages, then the sum of squared loads."""
        return max(self.loads), self.shared, sum(load * load for load in self.loads)


class Space:
    """The modalities and ranks of a search, and all their placements.

    Args:
        costs: for each modality the cost of each layer per microbatch, forward and backward; units before and after the
            layers count with the first and the last layer.
        modalities: the configuration; modalities share ranks only where their tp_size and cp_size are equal.
        num_ranks: ranks of one replica, all of which are used.
        loss_modality: the modality that the encoders feed.
        num_microbatches: M.

    Attributes:
        scale: factor from costs to loads, before rounding.
        seen: number of placements that `best` has split.
    """

    def __init__(
        self,
        costs: Mapping[str, Sequence[float]],
        modalities: Mapping[str, Modality],
        num_ranks: int,
        *,
        loss_modality: str,
        num_microbatches: int,
    ) -> None:
        self.scale = 2.0 ** (_BITS - math.frexp(sum(map(sum, costs.values())))[1])
        self.seen = 0
        self._sums: dict[str, Sums] = {
            name: tuple(accumulate((round(cost * self.scale) * num_microbatches for cost in row), initial=0))
            for name, row in costs.items()
        }
        self._everything = sum(sums[-1] for sums in self._sums.values())
        self._layers = {name: len(row) for name, row in costs.items()}
        self._kinds = {name: (modality.tp_size, modality.cp_size) for name, modality in modalities.items()}
        self._widths = {name: math.prod(kind) for name, kind in self._kinds.items()}
        self._encoders = [name for name in modalities if name != loss_modality]
        self._num_ranks, self._loss_modality, self._num_microbatches = num_ranks, loss_modality, num_microbatches
        self._limit = 0
        self._divisions: dict[tuple[str, int, tuple[str, ...]], Division] = {}

    def best(self, count: int) -> list[Placement]:
        """Return the first `count` placements by their `order`."""
        # skip placements with loads 25 % above what is possible without sharing, unless there are no others
        return self._within(self._apart() * 5 // 4, count) or self._within(self._everything, count)

    def _within(self, limit: int, count: int) -> list[Placement]:
        ranked: list[tuple[tuple[int, int, int], int, Placement]] = []
        self._limit = limit
        for owners in self._ways():
            for ranks in self._counts(owners, self._num_ranks):
                placement = self._placed(owners, ranks)
                if placement is None:
                    continue
                self.seen += 1
                insort(ranked, (placement.order, self.seen, placement))
                if len(ranked) > count:
                    ranked.pop()
                    self._limit = ranked[-1][0][0]
        return [placement for *_, placement in ranked]

    def _apart(self) -> int:
        """The smallest possible largest load without shared ranks; the sum of all costs if there are too few ranks."""
        low, high = 0, self._everything
        while low < high:
            middle = (low + high) // 2
            parts = {name: fewest(sums, middle) for name, sums in self._sums.items()}
            needed = sum((n or self._num_ranks + 1) * self._widths[name] for name, n in parts.items())
            low, high = (low, middle) if needed <= self._num_ranks else (middle + 1, high)
        return low

    def _ways(self) -> Iterator[dict[str, Owner | None]]:
        """Every assignment of owners to encoders; an owner has its own ranks."""
        options: list[list[Owner | None]] = []
        for name in self._encoders:
            same = [other for other in self._kinds if other != name and self._kinds[other] == self._kinds[name]]
            options.append([None, *(Owner(other, 0) for other in same)])
            if self._loss_modality in same:
                options[-1].append(Owner(self._loss_modality, None))
        for choice in product(*options):
            owners = dict(zip(self._encoders, choice, strict=True))
            if all(owner is None or owners.get(owner.modality) is None for owner in choice):
                yield owners

    def _counts(self, owners: Mapping[str, Owner | None], num_ranks: int) -> Iterator[dict[str, int]]:
        """All numbers of own ranks by modality that add up to `num_ranks`; unnamed encoders have no own rank."""
        spans: dict[str, tuple[int, int]] = {}
        for name, owner in owners.items():
            if owner is None:
                least = fewest(self._sums[name], self._limit)
                spans[name] = (least or self._layers[name] + 1, self._layers[name])
            elif owner == Owner(self._loss_modality, 0):
                spans[name] = (0, self._layers[name] - 1)
        # with one rank of the loss modality, a replica on each rank equals the last stage on the first rank
        several = Owner(self._loss_modality, None) in owners.values()
        spans[self._loss_modality] = (1 + several, self._layers[self._loss_modality])
        for counts in _fillings([(*span, self._widths[name]) for name, span in spans.items()], num_ranks):
            yield dict(zip(spans, counts, strict=True))

    def _placed(self, owners: Mapping[str, Owner | None], ranks: Mapping[str, int]) -> Placement | None:
        """The best placement for given owners and numbers of ranks, or None if its largest load is above the limit."""
        sizes: dict[str, tuple[int, ...]] = {name: (layers,) for name, layers in self._layers.items()}
        loads: list[int] = []
        for name in (*(name for name, owner in owners.items() if owner is None), self._loss_modality):
            colocated = tuple(encoder for encoder, owner in owners.items() if owner == Owner(name, 0))
            if name == self._loss_modality:
                division = self._with_loss(owners, colocated, ranks)
            elif ranks[name] == 1 and name != next(each for each in self._encoders if each in (name, *colocated)):
                return None  # equals the placement in which the first of them is the owner
            else:
                division = self._apart_from_loss(name, ranks[name], colocated)
            if division is None:
                return None
            sizes |= {name: division.owner, **dict(zip(colocated, division.colocated, strict=True))}
            loads += division.loads
        return Placement(owners, sizes, tuple(loads))

    def _apart_from_loss(self, name: str, parts: int, colocated: tuple[str, ...]) -> Division | None:
        key = (name, parts, colocated)
        if key not in self._divisions:
            group = Group(self._sums[name], parts, tuple((self._sums[encoder], 0) for encoder in colocated))
            division = group.divide()
            assert division is not None
            self._divisions[key] = group.evened(division)
        return self._divisions[key] if self._divisions[key].busiest <= self._limit else None

    def _with_loss(
        self, owners: Mapping[str, Owner | None], colocated: tuple[str, ...], ranks: Mapping[str, int]
    ) -> Division | None:
        parts, count = ranks[self._loss_modality], self._num_microbatches
        everywhere = [name for name, owner in owners.items() if owner == Owner(self._loss_modality, None)]
        each = sum(self._sums[name][-1] // count for name in everywhere)
        beside = tuple(each * len(range(part, count, parts)) for part in range(parts))
        group = Group(
            self._sums[self._loss_modality], parts, tuple((self._sums[g], ranks[g]) for g in colocated), beside
        )
        division = group.divide(self._limit)
        return division and group.evened(division)


def _fillings(spans: Sequence[tuple[int, int, int]], total: int) -> Iterator[tuple[int, ...]]:
    """All tuples of numbers within their (smallest, largest, width) whose sum, weighted by width, is `total`."""
    (low, high, width), *others = spans
    if not others:
        count, rest = divmod(total, width)
        if not rest and low <= count <= high:
            yield (count,)
        return
    needed = sum(least * each for least, _, each in others)
    for count in range(low, min(high, (total - needed) // width) + 1):
        for further in _fillings(others, total - count * width):
            yield (count, *further)


def plain(name: str, row: Sequence[Unit], trainable: frozenset[str]) -> list[Unit]:
    """Return the units, each with one parameter that stands for all its trained ones, or with none."""
    trained = [[cost for full, cost in unit.costs.items() if full in trainable] for unit in row]
    return [
        replace(unit, costs={f"{name}.{index}": sum(costs)} if costs else {})
        for index, (unit, costs) in enumerate(zip(row, trained, strict=True))
    ]


def recomputing(
    rows: Mapping[str, Sequence[Unit]], modalities: Mapping[str, Modality], placement: Placement
) -> dict[str, Sequence[Unit]]:
    """Return the units with what recomputation adds to the backwards of `modalities`."""
    again = {
        name: costed(rows[name], kept_of(name, modality, placement.sizes[name]))
        for name, modality in modalities.items()
        if len(rows[name]) > 2
    }
    return {**rows, **again}


def layer_costs(row: Sequence[float]) -> list[float]:
    """Return the costs of the layers; the units before and after them count with the first and the last layer."""
    first, *layers, last = row
    if not layers:
        return [first + last]
    layers[0] += first
    layers[-1] += last
    return layers


def configured(modalities: Mapping[str, Modality], placement: Placement, loss_modality: str) -> dict[str, Modality]:
    """Return the placement as configuration."""
    placed = {}
    for name, modality in modalities.items():
        sizes, owner = placement.sizes[name], placement.owners.get(name)
        if owner is not None and len(sizes) == len(placement.sizes[owner.modality]) == 1:
            owner = Owner(owner.modality, None)  # equal, and shorter to write
        placed[name] = with_fields(
            modality,
            dp_size=modality.dp_size if name == loss_modality else None,
            pp_size=len(sizes) if len(sizes) > 1 else None,
            pipeline_template=PipelineTemplate(stages=list(sizes)) if len(sizes) > 1 else None,
            pp_chunks=1,
            colocate_with=None if owner is None else str(owner),
            cost=None,
        )
    return placed


def replica_graph(
    rows: Mapping[str, Sequence[Unit]],
    modalities: Mapping[str, Modality],
    placement: Placement,
    loss_modality: str,
    num_microbatches: int,
    late: Collection[str],
) -> Graph:
    """Return the graph of stages of one replica, built by the code that plans the training.

    Tensor and context parallel ranks of a stage run the same actions, so one rank stands for all of them.
    """
    placed = {
        name: with_fields(modality, dp_size=None, dp_shard_size=None, tp_size=1, cp_size=1, ep_size=1, expert_tp_size=1)
        for name, modality in configured(modalities, placement, loss_modality).items()
    }
    stages: dict[str, tuple[StageCut, ...]] = {}
    units: dict[StageKey, tuple[Unit, ...]] = {}
    for name, sizes in placement.sizes.items():
        ends = [0, *accumulate(sizes)]
        stages[name] = tuple(StageCut(name, index, *span) for index, span in enumerate(pairwise(ends)))
        for cut in stages[name]:
            units[cut.name] = tuple(rows[name][span_of(cut, stages[name])])
    num_ranks = sum(modality.own_ranks_per_replica for modality in placed.values())
    layout = Layout.build(placed, world_size=num_ranks, loss_modality=loss_modality)
    plan = plan_of_stages(layout, placed, stages, units, late)
    return plan.graphs.graph(range(layout.num_replicas), num_microbatches, frozenset(plan.partition.owners))
