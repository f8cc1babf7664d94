"""What a rank does, one step at a time: the alphabet in which schedules are written.

A schedule is plain data, so that the same lists can be executed, validated and simulated. Messages are
implied by the graph's edges: after a forward a rank sends to the successors' instances of that microbatch,
after a backward or its input-gradient half to those predecessors that run backwards, in both cases where they are
on another rank. The weight-gradient half sends nothing, so it may wait (Qi et al. 2023, arXiv:2401.10241).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.stage_key import StageKey


class Kind(Enum):
    """Forward, whole backward, and the halves of a backward: input gradient and weight gradient."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One microbatch (its global id) through one stage, in one of the ways of `Kind`."""

    kind: Kind
    stage: StageKey
    microbatch: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", StageKey.parse(self.stage))  # a user's own schedule may write strings

    def __str__(self) -> str:
        return f"{self.kind.value}({self.stage}, {self.microbatch})"

    @property
    def provides(self) -> Action:
        """The action that others wait for: a B in place of an I, since both pass the gradient on."""
        return Action(Kind.B, self.stage, self.microbatch) if self.kind is Kind.I else self

    @property
    def passes_gradients(self) -> bool:
        """Whether predecessors get their gradients after it."""
        return self.kind in (Kind.B, Kind.I)

    @property
    def frees(self) -> bool:
        """Whether the microbatch's activations are dropped after it."""
        return self.kind in (Kind.B, Kind.W)


Schedule = dict[int, list[Action]]
"""For each rank the actions that it runs, in order."""


def dependencies(action: Action, graph: Graph) -> list[Action]:
    """What must have ended before ``action`` may start, whichever rank runs it, as `Action.provides` names it."""
    stage, m = action.stage, action.microbatch
    if action.kind is Kind.F:
        return [Action(Kind.F, src, m) for src in graph.predecessors(stage)]
    if action.kind is Kind.W:
        return [Action(Kind.B, stage, m)]
    return [Action(Kind.F, stage, m), *(Action(Kind.B, dst, m) for dst in graph.successors(stage))]


def cost(action: Action, graph: Graph) -> float:
    """How long ``action`` takes, in the unit of the graph's costs."""
    node = graph.node_of(action.stage, action.microbatch)
    if action.kind is Kind.F:
        return node.forward_cost
    weight = graph.weight_cost(node)
    return {Kind.B: node.backward_cost, Kind.I: node.backward_cost - weight, Kind.W: weight}[action.kind]
