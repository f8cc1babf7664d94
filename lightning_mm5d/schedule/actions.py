"""What a worker does, one step at a time: the alphabet in which schedules are written.

A schedule is plain data, so that the same lists can be executed, validated and simulated. Messages are
implied by the graph's edges: after a forward a worker sends to the successors' instances of that microbatch,
after a backward to those predecessors that run backwards, in both cases where they are on another worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_mm5d.schedule.graph import Graph


class Kind(Enum):
    """Forward or backward."""

    F = "F"
    B = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """The forward or the backward of one microbatch (its global id) through one stage."""

    kind: Kind
    stage: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}({self.stage}, {self.microbatch})"


Schedule = dict[int, list[Action]]
"""For each worker the actions that it runs, in order."""


def dependencies(action: Action, graph: Graph) -> list[Action]:
    """The actions that must have ended before ``action`` may start, whichever worker runs them."""
    stage, m = action.stage, action.microbatch
    if action.kind is Kind.F:
        return [Action(Kind.F, src, m) for src in graph.predecessors(stage)]
    return [Action(Kind.F, stage, m), *(Action(Kind.B, dst, m) for dst in graph.successors(stage))]
