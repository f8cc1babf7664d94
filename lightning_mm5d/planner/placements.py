"""All ways to place modalities on ranks, each divided so that its busiest rank has least to do.

An encoder has ranks of its own; or its last stage shares the language model's first rank, with or without ranks of its
own before it; or each of the language model's ranks runs a replica of it on some of the microbatches; or the first
rank of another encoder runs it whole. For every way all numbers of ranks that fill the world are tried.

It refuses nothing; there may be no placement at all.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product

from lightning_mm5d.config.modality import Host, Modality
from lightning_mm5d.planner.cuts import Division, Group, Sums, fewest

_BITS = 50  # of the sum of all costs, when they are made whole numbers


@dataclass(frozen=True)
class Placement:
    """Where each modality runs and how its layers are divided.

    Attributes:
        hosts: where each encoder is a guest; None for ranks of its own.
        sizes: layers of each modality's stages, in order.
        loads: work of each rank in a step, as whole numbers.
    """

    hosts: Mapping[str, Host | None]
    sizes: Mapping[str, tuple[int, ...]]
    loads: tuple[int, ...]

    @cached_property
    def shared(self) -> int:
        """How many stages of guests share a rank with their host, each replica counted."""
        guests = (host for host in self.hosts.values() if host is not None)
        return sum(len(self.sizes[host.modality]) if host.pp is None else 1 for host in guests)

    @cached_property
    def order(self) -> tuple[int, int, int]:
        """What is smaller is better: the largest load, then shared stages, then how uneven the loads are."""
        return max(self.loads), self.shared, sum(load * load for load in self.loads)


class Space:
    """What there is to place.

    Args:
        costs: of each modality's layers, what a step takes per microbatch; what runs before and after the layers counts
            with the first and the last one.
        modalities: the configuration; modalities share ranks only where their tp_size and cp_size are the same.
        num_ranks: ranks of one replica, all of which are used.
        loss_modality: the modality that the encoders feed.
        num_microbatches: M.

    Attributes:
        scale: loads are costs of a step times this, rounded.
        seen: how many placements `best` has divided.
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
        self._num_ranks, self._terminal, self._num_microbatches = num_ranks, loss_modality, num_microbatches
        self._limit = 0
        self._alone: dict[tuple[str, int, tuple[str, ...]], Division] = {}

    @property
    def most_ranks(self) -> int:
        """The most ranks that can be filled, with a layer for each stage."""
        return sum(self._widths[name] * layers for name, layers in self._layers.items())

    def fills(self, num_ranks: int) -> bool:
        """Whether there is a placement on so many ranks."""
        self._limit = self._everything
        within = num_ranks <= self.most_ranks
        return within and any(True for hosts in self._ways() for _ in self._counts(hosts, num_ranks))

    def best(self, count: int) -> list[Placement]:
        """Return the `count` placements that come first by their `order`."""
        # what is a quarter above a load that is known to be possible is not looked at, unless nothing else is there
        return self._within(self._apart() * 5 // 4, count) or self._within(self._everything, count)

    def _within(self, limit: int, count: int) -> list[Placement]:
        kept: list[tuple[tuple[int, int, int], int, Placement]] = []
        self._limit = limit
        for hosts in self._ways():
            for ranks in self._counts(hosts, self._num_ranks):
                placement = self._placed(hosts, ranks)
                if placement is None:
                    continue
                self.seen += 1
                insort(kept, (placement.order, self.seen, placement))
                if len(kept) > count:
                    kept.pop()
                    self._limit = kept[-1][0][0]
        return [placement for *_, placement in kept]

    def _apart(self) -> int:
        """The smallest largest load where nothing is shared, or that of one rank where there are too few for that."""
        low, high = 0, self._everything
        while low < high:
            middle = (low + high) // 2
            parts = {name: fewest(sums, middle) for name, sums in self._sums.items()}
            needed = sum((n or self._num_ranks + 1) * self._widths[name] for name, n in parts.items())
            low, high = (low, middle) if needed <= self._num_ranks else (middle + 1, high)
        return low

    def _ways(self) -> Iterator[dict[str, Host | None]]:
        """Every assignment of hosts to encoders; a host has ranks of its own."""
        options: list[list[Host | None]] = []
        for name in self._encoders:
            alike = [other for other in self._kinds if other != name and self._kinds[other] == self._kinds[name]]
            options.append([None, *(Host(other, 0) for other in alike)])
            if self._terminal in alike:
                options[-1].append(Host(self._terminal, None))
        for choice in product(*options):
            hosts = dict(zip(self._encoders, choice, strict=True))
            if all(host is None or hosts.get(host.modality) is None for host in choice):
                yield hosts

    def _counts(self, hosts: Mapping[str, Host | None], num_ranks: int) -> Iterator[dict[str, int]]:
        """All numbers of own stages that fill the ranks; encoders that run whole on another one's rank have none."""
        spans: dict[str, tuple[int, int]] = {}
        for name, host in hosts.items():
            if host is None:
                least = fewest(self._sums[name], self._limit)
                spans[name] = (least or self._layers[name] + 1, self._layers[name])
            elif host == Host(self._terminal, 0):
                spans[name] = (0, self._layers[name] - 1)
        # on one rank of the loss modality a replica on each is the same as the last stage on the first
        several = Host(self._terminal, None) in hosts.values()
        spans[self._terminal] = (1 + several, self._layers[self._terminal])
        for counts in _fillings([(*span, self._widths[name]) for name, span in spans.items()], num_ranks):
            yield dict(zip(spans, counts, strict=True))

    def _placed(self, hosts: Mapping[str, Host | None], ranks: Mapping[str, int]) -> Placement | None:
        """The best division of one way with its ranks counted; None where its largest load is above the limit."""
        sizes: dict[str, tuple[int, ...]] = {name: (layers,) for name, layers in self._layers.items()}
        loads: list[int] = []
        for name in (*(name for name, host in hosts.items() if host is None), self._terminal):
            guests = tuple(guest for guest, host in hosts.items() if host == Host(name, 0))
            if name == self._terminal:
                division = self._with_terminal(hosts, guests, ranks)
            elif ranks[name] == 1 and name != next(each for each in self._encoders if each in (name, *guests)):
                return None  # the same placement as the one where the first of them is the host
            else:
                division = self._apart_from_terminal(name, ranks[name], guests)
            if division is None:
                return None
            sizes |= {name: division.host, **dict(zip(guests, division.guests, strict=True))}
            loads += division.loads
        return Placement(hosts, sizes, tuple(loads))

    def _apart_from_terminal(self, name: str, parts: int, guests: tuple[str, ...]) -> Division | None:
        key = (name, parts, guests)
        if key not in self._alone:
            group = Group(self._sums[name], parts, tuple((self._sums[guest], 0) for guest in guests))
            division = group.divide()
            assert division is not None
            self._alone[key] = group.evened(division)
        return self._alone[key] if self._alone[key].busiest <= self._limit else None

    def _with_terminal(
        self, hosts: Mapping[str, Host | None], guests: tuple[str, ...], ranks: Mapping[str, int]
    ) -> Division | None:
        parts, count = ranks[self._terminal], self._num_microbatches
        everywhere = [name for name, host in hosts.items() if host == Host(self._terminal, None)]
        each = sum(self._sums[name][-1] // count for name in everywhere)
        beside = tuple(each * len(range(part, count, parts)) for part in range(parts))
        group = Group(self._sums[self._terminal], parts, tuple((self._sums[g], ranks[g]) for g in guests), beside)
        division = group.divide(self._limit)
        return division and group.evened(division)


def _fillings(spans: Sequence[tuple[int, int, int]], total: int) -> Iterator[tuple[int, ...]]:
    """All numbers, each from its (smallest, largest, width), that times their widths sum to `total`."""
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
