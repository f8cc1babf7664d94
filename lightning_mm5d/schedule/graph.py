"""The graph of stages that a schedule is built for: ranks, microbatches and costs of each stage.

A multimodal pipeline is not a chain: encoders run side by side and the language model waits for all of them.
So stages form a directed acyclic graph, and a chain is the special case. Replicas need no rules of their own:
microbatch ids are global over all replicas of the loss modality, and each instance of a stage lists the ids that it
works on, whether its modality has more or fewer replicas than the loss modality.

Graphs that no schedule could run are refused: edges to unknown stages, cycles, a microbatch that a stage works on
twice or not at all, instances that disagree on the order of microbatches (messages are first in, first out), and a
stage without backward that a stage with backward feeds.

Actions: what a rank does with one microbatch of one stage.

A schedule is a list of actions for each rank: plain data that is executed, validated and simulated. The graph's edges
imply the messages. After a forward a rank sends to the successors' instances of that microbatch. After a full backward
or an input gradient it sends to the predecessors that run backwards. A weight gradient sends nothing, so it may wait
(Qi et al. 2023, arXiv:2401.10241).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise


class StageKey(str):
    """Key of a stage, the string ``"vision.0"`` for stage 0 of the modality ``vision``.

    It is a string: tables, messages and JSON show it as it is, and it equals a plain string of the same text.

    Args:
        modality: name of the modality.
        number: index of the stage within the modality, from 0.
    """

    modality: str
    number: int

    def __new__(cls, modality: str, number: int) -> StageKey:
        key = super().__new__(cls, f"{modality}.{number}")
        key.modality, key.number = modality, number
        return key

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return self.modality, self.number

    @classmethod
    def parse(cls, text: str) -> StageKey:
        """Return the key for a string such as ``"vision.0"``, or `text` itself if it is a key.

        Raises:
            ValueError: `text` is not the name of a modality, a dot and a number.
        """
        if isinstance(text, cls):
            return text
        modality, dot, number = text.rpartition(".")
        if not dot or not modality or not number.isdecimal():
            raise ValueError(f"a stage is named by its modality and its number, as in 'vision.0', got {text!r}")
        return cls(modality, int(number))


@dataclass(frozen=True, kw_only=True)
class Node:
    """One instance of a stage on one rank.

    Args:
        stage: key of the stage, ``"<modality>.<index>"``, for instance ``"vision.0"``.
        rank: the rank that runs it. It may stand for several ranks that run the same actions in the same order, such
            as those of a tensor parallel group; it is then the first of them (`Topology.lead_of_rank`).
        microbatches: global ids of the microbatches that it works on, in order. An instance that serves
            several loss replicas should interleave theirs, or one replica waits for the other.
        forward_cost: duration of a forward in any unit, the same in the whole graph.
        backward_cost: duration of a full backward; 0 means that there is none (nothing trainable at or before it).
        weight_cost: the part of ``backward_cost`` that computes weight gradients; 0 where nothing in the stage is
            trained. By default half of it, or all of it where the stage passes no gradient on.
        replica: number of this instance among those of its stage; a label only.
    """

    stage: StageKey
    rank: int
    microbatches: tuple[int, ...]
    forward_cost: float = 1.0
    backward_cost: float = 2.0
    weight_cost: float | None = None
    replica: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", StageKey.parse(self.stage))


@dataclass(frozen=True)
class Graph:
    """Stages, their instances and edges.

    Args:
        nodes: all instances of all stages.
        edges: pairs ``(source stage, destination stage)``; the source's output is an input of the
            destination.

    Raises:
        ValueError: no schedule could run the graph (see the module's docstring).
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[StageKey, StageKey], ...]

    def __post_init__(self) -> None:
        edges = tuple((StageKey.parse(source), StageKey.parse(target)) for source, target in self.edges)
        object.__setattr__(self, "edges", edges)
        self._check_nodes()
        self._check_edges()
        self._check_microbatches()

    @cached_property
    def stages(self) -> tuple[StageKey, ...]:
        """All stages, in the order of the nodes."""
        return tuple(dict.fromkeys(node.stage for node in self.nodes))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted({node.rank for node in self.nodes}))

    @cached_property
    def microbatches(self) -> tuple[int, ...]:
        """All microbatch ids, in one order that contains the order of every instance."""
        before: dict[int, set[int]] = {m: set() for node in self.nodes for m in node.microbatches}
        for node in self.nodes:
            for earlier, later in pairwise(node.microbatches):
                before[later].add(earlier)
        level: dict[int, int] = {}
        for m in TopologicalSorter(before).static_order():
            level[m] = 1 + max((level[earlier] for earlier in before[m]), default=-1)
        return tuple(sorted(level, key=lambda m: (level[m], m)))

    def instances(self, stage: StageKey) -> tuple[Node, ...]:
        """All nodes of ``stage``, in the order in which they were given."""
        return self._instances[stage]

    def node_of(self, stage: StageKey, microbatch: int) -> Node:
        """The instance of ``stage`` that works on ``microbatch``."""
        return self._node_of[stage, microbatch]

    def predecessors(self, stage: StageKey) -> tuple[StageKey, ...]:
        """The stages that feed ``stage``, in the order of the edges."""
        return self._predecessors[stage]

    def successors(self, stage: StageKey) -> tuple[StageKey, ...]:
        """The stages that ``stage`` feeds, in the order of the edges."""
        return self._successors[stage]

    def distance_to_end(self, stage: StageKey) -> int:
        """Number of edges on the longest path from ``stage`` to a stage that feeds none."""
        return self._distances[stage]

    def has_backward(self, stage: StageKey) -> bool:
        """Whether ``stage`` runs backwards, which it does if anything at or before it is trained."""
        return self._instances[stage][0].backward_cost > 0

    def weight_cost(self, node: Node) -> float:
        """Return ``node.weight_cost``, or its default."""
        if node.weight_cost is not None:
            return node.weight_cost
        passes_on = any(self.has_backward(src) for src in self._predecessors[node.stage])
        return node.backward_cost / 2 if passes_on else node.backward_cost

    def splits(self, node: Node) -> bool:
        """Whether ``node``'s backward can be split: its input gradient and its weight gradient both take time."""
        return 0 < self.weight_cost(node) < node.backward_cost

    def stages_of(self, rank: int) -> tuple[StageKey, ...]:
        """Return the stages on ``rank`` in the order of the pipeline; a stage's index here is its chunk number."""
        return self._stages_of[rank]

    @cached_property
    def _stages_of(self) -> dict[int, tuple[StageKey, ...]]:
        mine: dict[int, list[StageKey]] = {rank: [] for rank in self.ranks}
        for node in self.nodes:
            mine[node.rank].append(node.stage)
        return {
            rank: tuple(sorted(stages, key=lambda stage: (-self._distances[stage], stage)))
            for rank, stages in mine.items()
        }

    @cached_property
    def _instances(self) -> dict[StageKey, tuple[Node, ...]]:
        return {stage: tuple(node for node in self.nodes if node.stage == stage) for stage in self.stages}

    @cached_property
    def _node_of(self) -> dict[tuple[StageKey, int], Node]:
        return {(node.stage, m): node for node in self.nodes for m in node.microbatches}

    @cached_property
    def _predecessors(self) -> dict[StageKey, tuple[StageKey, ...]]:
        return {stage: tuple(src for src, dst in self.edges if dst == stage) for stage in self.stages}

    @cached_property
    def _successors(self) -> dict[StageKey, tuple[StageKey, ...]]:
        return {stage: tuple(dst for src, dst in self.edges if src == stage) for stage in self.stages}

    @cached_property
    def _distances(self) -> dict[StageKey, int]:
        distances: dict[StageKey, int] = {}
        for stage in TopologicalSorter(self._successors).static_order():
            distances[stage] = 1 + max((distances[dst] for dst in self._successors[stage]), default=-1)
        return distances

    def _check_nodes(self) -> None:
        for node in self.nodes:
            for name, cost in (("forward_cost", node.forward_cost), ("backward_cost", node.backward_cost)):
                if not (math.isfinite(cost) and cost >= 0):
                    raise ValueError(
                        f"{node.stage} on rank {node.rank}: {name} is {cost}. "
                        "A cost is a finite number that is not negative. Use 1.0 where it is not known."
                    )
            if node.weight_cost is not None and not 0 <= node.weight_cost <= node.backward_cost:
                raise ValueError(
                    f"{node.stage} on rank {node.rank}: weight_cost is {node.weight_cost}. It is a part of "
                    f"backward_cost, which is {node.backward_cost}. Use a number from 0 to that, or None."
                )
        for (stage, rank), count in Counter((node.stage, node.rank) for node in self.nodes).items():
            if count > 1:
                raise ValueError(
                    f"{stage}: rank {rank} has {count} instances of it. A rank has at most one "
                    "instance of a stage. Put their microbatches into one."
                )
        for stage, instances in self._instances.items():
            if len({node.backward_cost > 0 for node in instances}) > 1:
                raise ValueError(
                    f"{stage}: backward_cost is {[node.backward_cost for node in instances]}. Either all "
                    "instances of a stage run backwards or none does. Make all of them 0, or none."
                )

    def _check_edges(self) -> None:
        for edge, count in Counter(self.edges).items():
            for stage in edge:
                if stage not in self._instances:
                    raise ValueError(
                        f"edge {edge}: no node has the stage {stage!r}. Edges join stages of the graph. "
                        f"Use two of {', '.join(self.stages)}."
                    )
            if count > 1:
                raise ValueError(f"edge {edge}: given {count} times. Give each edge once.")
        try:
            _ = self._distances
        except CycleError as error:
            raise ValueError(
                f"edges: {' -> '.join(reversed(error.args[1]))} is a cycle. Stages feed later stages only. "
                "Remove one of these edges."
            ) from None
        for src, dst in self.edges:
            if self.has_backward(src) and not self.has_backward(dst):
                raise ValueError(
                    f"edge {(src, dst)}: {src} runs backwards but {dst} does not (backward_cost 0). "
                    f"Gradients reach {src} through {dst}. Give {dst} the cost of its input gradient."
                )

    def _check_microbatches(self) -> None:
        expected = {m for node in self.nodes for m in node.microbatches}
        for stage, instances in self._instances.items():
            counts = Counter(m for node in instances for m in node.microbatches)
            for m in sorted(expected):
                if counts[m] != 1:
                    raise ValueError(
                        f"{stage}: {counts[m]} of its instances work on microbatch {m}. Every stage works on "
                        "every microbatch exactly once. List it in one instance."
                    )
        try:
            _ = self.microbatches
        except CycleError as error:
            raise ValueError(
                f"nodes: their orders put the microbatches {error.args[1]} in a circle. Messages between "
                "two instances keep their order, so all instances must agree on one. Use one order in all of them."
            ) from None


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
