"""Graphs of stages that several test files schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from random import Random

from lightning_mm5d.config.modality import Modality, for_schedule
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.schedule import Graph, Kind, Node, Schedule, place
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.tools.planner.outcomes import sketch


def most_in_flight(schedule: Schedule, graph: Graph) -> dict[str, int]:
    """For each stage with backward the most microbatches that an instance has in flight at a time.

    They are so from the start of the forward to the end of the full backward or weight gradient.
    """
    most: Counter[str] = Counter()
    for actions in schedule.values():
        in_flight: Counter[str] = Counter()
        for action in actions:
            if graph.has_backward(action.stage):
                in_flight[action.stage] += (action.kind is Kind.F) - action.frees
                most[action.stage] = max(most[action.stage], in_flight[action.stage])
    return dict(most)


def links(modality: str, depth: int) -> list[tuple[StageKey, StageKey]]:
    """The edges between the ``depth`` stages of a modality."""
    return [(StageKey(modality, i), StageKey(modality, i + 1)) for i in range(depth - 1)]


def chain(depth: int, microbatches: int, *, forward_cost: float = 1.0, backward_cost: float = 2.0) -> Graph:
    """``language.0`` to ``language.<depth - 1>``, each on its own rank."""
    nodes = [
        Node(
            stage=StageKey("language", i),
            rank=i,
            microbatches=tuple(range(microbatches)),
            forward_cost=forward_cost,
            backward_cost=backward_cost,
        )
        for i in range(depth)
    ]
    return Graph(tuple(nodes), tuple(links("language", depth)))


def chunked(
    ranks: int,
    chunks: int,
    microbatches: int,
    *,
    schedule: str = "interleaved",
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Graph:
    """A chain of ``ranks * chunks`` stages placed for ``schedule``; ``times`` of a chunk's F, I and W."""
    depth = ranks * chunks
    forward, inputs, weights = times
    nodes = [
        Node(
            stage=StageKey("language", i),
            rank=rank,
            microbatches=tuple(range(microbatches)),
            forward_cost=forward,
            backward_cost=inputs + weights,
            weight_cost=weights,
        )
        for i, rank in enumerate(place(schedule, depth, ranks))
    ]
    return Graph(tuple(nodes), tuple(links("language", depth)))


def case(microbatches: int, *, schedule: str = "1f1b", frozen: Collection[str] = (), **modalities: Modality) -> Graph:
    """One replica of a configuration whose last modality is the language model, placed for ``schedule``."""
    placed = for_schedule(modalities, "zbv" if schedule == "interleaved" else schedule, "language")
    ranks = sum(modality.ranks_per_replica for modality in modalities.values() if modality.colocate_with is None)
    layout = Layout.build(placed, world_size=ranks, loss_modality="language")
    return sketch(layout, placed, microbatches, frozen=frozen, v_shaped=schedule == "zbv")


def tree(microbatches: int, *, frozen: tuple[str, ...] = (), **depths: int) -> Graph:
    """Modalities of the given depths, all feeding the last one; a rank per stage, in order."""
    *encoders, loss_modality = depths
    stages = [StageKey(modality, i) for modality, depth in depths.items() for i in range(depth)]
    edges = [edge for modality, depth in depths.items() for edge in links(modality, depth)]
    edges += [(StageKey(encoder, depths[encoder] - 1), StageKey(loss_modality, 0)) for encoder in encoders]
    nodes = [
        Node(
            stage=stage,
            rank=rank,
            microbatches=tuple(range(microbatches)),
            backward_cost=0.0 if stage.modality in frozen else 2.0,
        )
        for rank, stage in enumerate(stages)
    ]
    return Graph(tuple(nodes), tuple(edges))


def interleaved(replicas: int, each: int) -> tuple[int, ...]:
    """The microbatches of all loss replicas, taking turns; replica r starts at r * each."""
    return tuple(replica * each + i for i in range(each) for replica in range(replicas))


def random_graph(rng: Random) -> Graph:
    """Random encoders and depths, skip edges, costs, frozen encoders, replica counts and shared ranks."""
    depths = {f"encoder{i}": rng.randint(1, 3) for i in range(rng.randint(0, 3))}
    depths["language"] = rng.randint(1, 4)
    frozen = {modality for modality in depths if modality != "language" and rng.random() < 0.3}
    edges = [edge for modality, depth in depths.items() for edge in links(modality, depth)]
    for modality, depth in depths.items():
        if modality != "language":
            fed = rng.sample(range(depths["language"]), rng.randint(1, depths["language"]))
            edges += [(StageKey(modality, depth - 1), StageKey("language", i)) for i in fed]
    each, loss_replicas = rng.randint(1, 7), rng.randint(1, 4)
    order = interleaved(loss_replicas, each)
    nodes: list[Node] = []
    for modality, depth in depths.items():
        replicas = loss_replicas if modality == "language" else rng.randint(1, 6)
        for stage in (StageKey(modality, i) for i in range(depth)):
            forward_cost = rng.choice([0.0, 0.3, 1.0, 1.0, 2.5])
            for replica in range(replicas):
                mine = order[replica::replicas]
                if modality == "language":
                    mine = tuple(m for m in order if m // each == replica)
                taken = {node.rank for node in nodes if node.stage == stage}
                nodes.append(
                    Node(
                        stage=stage,
                        rank=rng.choice([rank for rank in range(16) if rank not in taken]),
                        microbatches=mine,
                        forward_cost=forward_cost,
                        backward_cost=0.0 if modality in frozen else rng.choice([0.5, 1.0, 2.0]),
                        replica=replica,
                    )
                )
    rng.shuffle(nodes)
    return Graph(tuple(nodes), tuple(edges))
