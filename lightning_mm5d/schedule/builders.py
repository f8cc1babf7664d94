"""Builds schedules: which worker runs which forward or backward when.

One greedy list scheduler serves all schedules. It plays the pipeline through in simulated time; a worker that
gets free takes the best action that is ready. Schedules differ in what they hold back:

* ``gpipe`` holds back backwards until the worker has run all its forwards (Huang et al. 2019,
  arXiv:1811.06965): activations of all microbatches at once, for the simplest order.
* ``1f1b`` runs backwards first, and holds back forwards of a stage that has as many microbatches in flight as
  there are stages from it to the end (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503). In a graph
  the longest way to the end counts, so that encoders side by side fill the language model's pipeline
  together, as in Cornstarch (Jang et al. 2025, arXiv:2503.11367).

No schedule of it can deadlock, whatever shares a worker. Instances run microbatches in one common order. So
of the first microbatch that is not finished something is always ready, and never held back, since nothing
earlier is in flight anywhere. All ties are broken by names and numbers: ranks that build from equal graphs
get equal schedules.
"""

from __future__ import annotations

import difflib
import heapq
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lightning_mm5d.errors import ConfigError
from lightning_mm5d.schedule.actions import Action, Kind, Schedule
from lightning_mm5d.schedule.graph import Graph, Node

SCHEDULES = ("gpipe", "1f1b")
"""The names that `build` knows."""


def build(name: str, graph: Graph, *, forward_only: bool = False) -> Schedule:
    """Builds a schedule that passes `validate`; the same one in every process that passes an equal graph.

    Args:
        name: one of `SCHEDULES`.
        graph: the stages, with costs, which decide on the order where workers have a choice.
        forward_only: leave out backwards, for validation and prediction. All schedules are then the same.

    Returns:
        For every worker of the graph its actions in order.

    Raises:
        ConfigError: for a name that is not known.
    """
    if name not in SCHEDULES:
        nearest = difflib.get_close_matches(str(name), SCHEDULES, n=1, cutoff=0.4) or [SCHEDULES[-1]]
        raise ConfigError("schedule", name, f"It must be one of {', '.join(SCHEDULES)}", f"Use {nearest[0]!r}")
    limits = in_flight_limits(graph) if name == "1f1b" and not forward_only else {}
    return _ListScheduler(graph, limits, forwards_first=name == "gpipe", forward_only=forward_only).run()


def in_flight_limits(graph: Graph) -> dict[str, int]:
    """For each stage that runs backwards, the most microbatches in flight per instance under ``1f1b``.

    A microbatch is in flight from the start of its forward to the end of its backward. The limit is the
    number of stages on the longest way to the end, times the terminal replicas per instance, rounded up.
    """
    ends = [stage for stage in graph.stages if not graph.successors(stage)]
    terminal = max((len(graph.instances(stage)) for stage in ends), default=0)
    return {
        stage: math.ceil((graph.distance_to_end(stage) + 1) * terminal / len(graph.instances(stage)))
        for stage in graph.stages
        if graph.has_backward(stage)
    }


@dataclass(slots=True)
class _Progress:
    """How far one instance is: the number of forwards and backwards that it has started."""

    node: Node
    limit: float
    forwards: int = 0
    backwards: int = 0

    def start(self, kind: Kind) -> float:
        """Starts the next action of ``kind`` and returns its cost."""
        if kind is Kind.F:
            self.forwards += 1
            return self.node.forward_cost
        self.backwards += 1
        return self.node.backward_cost


class _Choice(NamedTuple):
    """An action that a worker could start now; the lowest priority comes first."""

    action: Action
    progress: _Progress
    priority: tuple[bool, int, int, str]


class _ListScheduler:
    def __init__(self, graph: Graph, limits: dict[str, int], *, forwards_first: bool, forward_only: bool) -> None:
        self.graph = graph
        self.forwards_first = forwards_first
        self.backward_stages = {s for s in graph.stages if graph.has_backward(s) and not forward_only}
        self.position = {m: position for position, m in enumerate(graph.microbatches)}
        self.progress: dict[int, list[_Progress]] = defaultdict(list)
        for node in graph.nodes:
            self.progress[node.worker].append(_Progress(node, limits.get(node.stage, math.inf)))
        self.ended: set[tuple[Kind, str, int]] = set()

    def run(self) -> Schedule:
        schedule: Schedule = {worker: [] for worker in self.graph.workers}
        running: list[tuple[float, int, Action]] = []  # a heap of (end, worker, action), one entry a worker
        free = set(self.graph.workers)
        woken = set(free)
        now = 0.0
        while True:
            for worker in sorted(woken & free):
                if choice := self._choose(worker):
                    end = now + choice.progress.start(choice.action.kind)
                    schedule[worker].append(choice.action)
                    heapq.heappush(running, (end, worker, choice.action))
                    free.remove(worker)
            if not running:
                break
            woken = set()
            now = running[0][0]
            while running and running[0][0] == now:
                _, worker, action = heapq.heappop(running)
                self.ended.add((action.kind, action.stage, action.microbatch))
                free.add(worker)
                woken |= {worker, *self._receivers(action)}
        self._assert_complete()
        return schedule

    def _choose(self, worker: int) -> _Choice | None:
        """The ready action that comes first: backwards, then earlier microbatches, then earlier stages."""
        return min(self._ready(worker), key=lambda choice: choice.priority, default=None)

    def _ready(self, worker: int) -> Iterator[_Choice]:
        graph, ended, mine = self.graph, self.ended, self.progress[worker]
        forwards_left = any(progress.forwards < len(progress.node.microbatches) for progress in mine)
        for progress in mine:
            stage, microbatches = progress.node.stage, progress.node.microbatches
            in_flight = progress.forwards - progress.backwards
            if progress.forwards < len(microbatches) and in_flight < progress.limit:
                m = microbatches[progress.forwards]
                if all((Kind.F, src, m) in ended for src in graph.predecessors(stage)):
                    yield self._choice(Kind.F, progress, m)
            if self.forwards_first and forwards_left:
                continue
            if stage in self.backward_stages and in_flight > 0:
                m = microbatches[progress.backwards]
                if all((Kind.B, dst, m) in ended for dst in graph.successors(stage)):
                    yield self._choice(Kind.B, progress, m)

    def _choice(self, kind: Kind, progress: _Progress, microbatch: int) -> _Choice:
        stage = progress.node.stage
        distance = self.graph.distance_to_end(stage)
        priority = (kind is Kind.F, self.position[microbatch], -distance, stage)
        return _Choice(Action(kind, stage, microbatch), progress, priority)

    def _receivers(self, action: Action) -> Iterator[int]:
        graph = self.graph
        neighbours = graph.successors if action.kind is Kind.F else graph.predecessors
        for stage in neighbours(action.stage):
            yield graph.node_of(stage, action.microbatch).worker

    def _assert_complete(self) -> None:
        for mine in self.progress.values():
            for progress in mine:
                node, count = progress.node, len(progress.node.microbatches)
                backwards = count if node.stage in self.backward_stages else 0
                assert (progress.forwards, progress.backwards) == (count, backwards), (
                    f"{node.stage} on worker {node.worker} stopped after {progress.forwards} forwards and "
                    f"{progress.backwards} backwards of {count} microbatches: nothing can run any more"
                )
