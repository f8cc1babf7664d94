"""Actions: what a rank does with one microbatch of one stage.

A schedule is a list of actions for each rank: plain data that is executed, validated and simulated. The graph's edges
imply the messages. After a forward a rank sends to the successors' instances of that microbatch. After a full backward
or an input gradient it sends to the predecessors that run backwards. A weight gradient sends nothing, so it may wait
(Qi et al. 2023, arXiv:2401.10241).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.stage_key import StageKey


class Kind(Enum):
    """Forward, full backward, and the parts of a split backward: input gradient (dgrad) and weight gradient (wgrad)."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One microbatch, by its global id, through one stage."""

    kind: Kind
    stage: StageKey
    microbatch: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", StageKey.parse(self.stage))  # users' schedules may hold strings

    def __str__(self) -> str:
        return f"{self.kind.value}({self.stage}, {self.microbatch})"

    @property
    def provides(self) -> Action:
        """The action as `dependencies` names it: B in place of I, because both pass the gradient on."""
        return Action(Kind.B, self.stage, self.microbatch) if self.kind is Kind.I else self

    @property
    def passes_gradients(self) -> bool:
        """Whether it sends gradients to predecessors: B and I."""
        return self.kind in (Kind.B, Kind.I)

    @property
    def frees(self) -> bool:
        """Whether it frees the microbatch's activations: B and W."""
        return self.kind in (Kind.B, Kind.W)


Schedule = dict[int, list[Action]]
"""For each rank the actions that it runs, in order."""


def dependencies(action: Action, graph: Graph) -> list[Action]:
    """The actions, of any rank, that must have ended before ``action`` may start; a backward is always named as B."""
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
