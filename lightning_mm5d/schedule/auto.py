"""``auto``: searches for the shortest schedule within a bound on activations.

The search plays the rules of the named schedules, then mixtures of them, then climbs: it changes the limit of one stage
at a time. The number of rules played depends on the number of actions and not on a clock, because all ranks must find
the same schedule. For 16 ranks and 32 microbatches it takes about half a second. It stops early at the lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle, product
from typing import NamedTuple

from lightning_mm5d.schedule.bound import lower_bound
from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.greedy import Pipeline, Played, Rules
from lightning_mm5d.schedule.interleaved import interleaved, turns
from lightning_mm5d.schedule.plain import gpipe, in_flight_limits, one_f_one_b
from lightning_mm5d.schedule.validate import ScheduleError
from lightning_mm5d.schedule.zero_bubble import PATIENCE, zero_bubble

_ACTIONS = 60_000
"""Actions that a search plays in total, at about 10 microseconds each."""
_FEWEST, _MOST = 26, 300
"""The least and the most rules that a search plays."""

_LIMITS = ((1.0, 0), (1.0, 1), (1.25, 0), (1.5, 0), (2.0, 0), (math.inf, 0))
"""Limits on microbatches in flight: those of ``1f1b`` times the first number, plus the second."""


class _Mixture(NamedTuple):
    """One choice for all that the named schedules vary; fields are as in `Rules`, ``turns`` is its ``groups``."""

    limits: tuple[float, int]
    split: bool
    eager: bool
    lazy: bool
    turns: bool
    patience: float


_FIRST = (
    _Mixture((1.25, 0), split=True, eager=True, lazy=True, turns=False, patience=0.0),
    _Mixture((1.0, 0), split=False, eager=True, lazy=True, turns=True, patience=0.0),
    _Mixture((1.5, 0), split=True, eager=False, lazy=True, turns=False, patience=PATIENCE),
    _Mixture((math.inf, 0), split=True, eager=False, lazy=True, turns=True, patience=0.0),
    _Mixture((1.0, 1), split=False, eager=True, lazy=True, turns=False, patience=0.0),
    _Mixture((1.0, 1), split=False, eager=True, lazy=True, turns=True, patience=0.0),
    _Mixture((1.0, 1), split=True, eager=False, lazy=False, turns=False, patience=0.0),
    _Mixture((math.inf, 0), split=False, eager=False, lazy=False, turns=False, patience=0.0),
    _Mixture((1.0, 0), split=False, eager=False, lazy=True, turns=True, patience=0.0),
    _Mixture((math.inf, 0), split=False, eager=True, lazy=True, turns=False, patience=0.0),
    _Mixture((1.5, 0), split=False, eager=True, lazy=True, turns=True, patience=0.0),
)
"""The mixtures tried first. They shortened the makespans of 276 graphs most: chains with and without chunks, and
encoders, trained or frozen, that feed a language model, on their own ranks and colocated."""


def auto(graph: Graph, max_activations: int | Mapping[int, int] | None = None) -> Played:
    """Searches for the shortest schedule.

    Args:
        graph: the stages; their placement stays.
        max_activations: the most activations that a rank may hold, one number for all ranks or by rank; ranks that
            are not named have no bound. By default the most that any rank holds under ``1f1b``, ``interleaved`` or
            ``zero_bubble``.

    Raises:
        ScheduleError: all schedules that it finds hold more.
    """
    search = _Search(graph, max_activations)
    search.run()
    return search.answer()


class _Search:
    def __init__(self, graph: Graph, max_activations: int | Mapping[int, int] | None) -> None:
        self.graph, self.pipeline = graph, Pipeline(graph)
        actions = sum(len(node.microbatches) * (3 if graph.has_backward(node.stage) else 1) for node in graph.nodes)
        self.plays_left = min(_MOST, max(_FEWEST, _ACTIONS // max(actions, 1)))
        self.enough = lower_bound(graph) * (1 + 1e-9)
        self.best: tuple[Rules, Played] | None = None
        self.frugal: Played | None = None
        named = [(rules, self.pipeline.play(rules)) for make in _NAMED for rules in make(graph)]
        self.plays_left -= len(named)
        if max_activations is None:
            max_activations = max((max(played.held.values()) for _, played in named), default=0)
        if not isinstance(max_activations, Mapping):
            max_activations = dict.fromkeys(graph.ranks, max_activations)
        self.bound = max_activations
        for rules, played in named:
            self._offer(rules, played)

    def run(self) -> None:
        for rules in (*gpipe(self.graph), *self._mixtures()):
            if self._done():
                return
            self._try(rules)
        if self.best is None:
            self._shrink()
        if self.best is not None:
            self._climb()

    def answer(self) -> Played:
        if self.best is None:
            assert self.frugal is not None
            rank = next(rank for rank, held in self.frugal.held.items() if held > self.bound.get(rank, held))
            raise ScheduleError(
                f"schedule auto: max_activations is {self.bound[rank]} on rank {rank}, but no schedule was found "
                f"that holds fewer than {self.frugal.held[rank]} there. Allow that many, or use fewer stages."
            )
        return self.best[1]

    def _mixtures(self) -> Iterator[Rules]:
        """Rules for each mixture: first those of `_FIRST`, then all others."""
        limits, grouped = in_flight_limits(self.graph), turns(self.graph)
        every = (
            _Mixture(scale, split, eager, lazy, in_turns, patience)
            for split in (True, False)
            for eager, lazy, in_turns in product((True, False), repeat=3)
            for patience in ((PATIENCE, 0.0) if split else (0.0,))
            for scale in _LIMITS
        )
        for mixture in dict.fromkeys([*_FIRST, *every]):
            if (mixture.turns and not grouped) or (mixture.split and not any(self.pipeline.splits)):
                continue
            factor, more = mixture.limits
            scaled = {} if factor == math.inf else {s: math.ceil(factor * limit) + more for s, limit in limits.items()}
            yield Rules(
                in_flight=scaled,
                held=self.bound,
                split=mixture.split,
                eager=mixture.eager,
                lazy=mixture.lazy,
                groups=grouped if mixture.turns else {},
                patience=mixture.patience,
            )

    def _shrink(self) -> None:
        """Halves the number of microbatches in flight until the schedule fits the bound or only one is left."""
        limit = max(self.bound.values())
        while limit > 0 and not self._try(Rules(in_flight=dict.fromkeys(self.graph.stages, limit), held=self.bound)):
            limit //= 2

    def _climb(self) -> None:
        """Raises or lowers the limit of one stage at a time, until no such change shortens the schedule."""
        limits = in_flight_limits(self.graph)
        moves = cycle(product(sorted(limits), (1, -1)))
        since = 0
        while since < 2 * len(limits) and not self._done():
            assert self.best is not None
            (stage, step), rules = next(moves), self.best[0]
            limit = rules.in_flight.get(stage, limits[stage]) + step
            improved = limit > 0 and self._try(replace(rules, flush=False, in_flight={**rules.in_flight, stage: limit}))
            since = 0 if improved else since + 1

    def _try(self, rules: Rules) -> bool:
        self.plays_left -= 1
        return self._offer(rules, self.pipeline.play(rules))

    def _offer(self, rules: Rules, played: Played) -> bool:
        """Keeps ``played`` if it fits the bound and is shorter than the best so far; returns whether it does."""
        excess = self._excess(played)
        if self.frugal is None or excess < self._excess(self.frugal):
            self.frugal = played
        if excess > 0 or (self.best is not None and played.makespan >= self.best[1].makespan * (1 - 1e-9)):
            return False
        self.best = rules, played
        return True

    def _excess(self, played: Played) -> int:
        """By how many activations the fullest rank is above its bound; at most 0 if the schedule fits."""
        return max((held - self.bound.get(rank, held) for rank, held in played.held.items()), default=0)

    def _done(self) -> bool:
        return self.plays_left <= 0 or (self.best is not None and self.best[1].makespan <= self.enough)


_NAMED = (one_f_one_b, interleaved, zero_bubble)
