"""Compares schedules of a graph, as plain values for a table or JSON; makes graphs of cases without a model.

A case is what papers draw: so many stages of each modality, so long each. It refuses what such a description lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_mm5d.errors import ConfigError
from lightning_mm5d.schedule.builders import SCHEDULES, build, place
from lightning_mm5d.schedule.custom import label
from lightning_mm5d.schedule.graph import Graph, Node
from lightning_mm5d.schedule.simulate import simulate

_FIELDS = ("stages", "cost", "backward", "frozen", "projector", "chunks")


def compare(
    graph: Graph | Callable[[str], Graph],
    names: Iterable[str] = SCHEDULES,
    *,
    transfer_cost: float | Callable[[str, str], float] = 0.0,
) -> list[dict[str, Any]]:
    """Simulates schedules side by side.

    Args:
        graph: the stages; or a function from the schedule's name to them, where placements differ. ``auto`` then
            takes the best over the placements of all names.
        names: of `SCHEDULES`.
        transfer_cost: as in `simulate`.

    Returns:
        For each name ``{"schedule", "makespan", "bubble", "ranks"}``: bubble is the share of the workers' time in
        which they idle; ranks holds for each ``{"rank", "modality", "stage", "peak_activations", "actions"}``.
        Modality is joined with ``+`` where a rank has several, stage is the index of its first, and actions are
        written as in `custom`: ``F0``, ``B0``, ``I0``, ``W0``, with ``.chunk`` where a rank has several stages.
        Peak activations count stages: two of chunks half as long are as much as one.
    """
    names = list(names)
    return [_best(name, _graphs(graph, name, names), transfer_cost) for name in names]


def case(
    modalities: Mapping[str, Mapping[str, Any]],
    microbatches: int,
    *,
    schedule: str = "1f1b",
) -> Graph:
    """The graph of a case: all modalities feed the first stage of the last one, and each has ranks of its own.

    Args:
        modalities: for each, in order: ``stages``, how many ranks it has; ``cost``, the forward's duration on a rank
            (a number, or one per rank; 1 by default); ``backward``, how many forwards a backward takes where all is
            trained (2 by default; half of it where the modality is frozen but passes gradients on); ``frozen``
            (by default not); ``projector``, the forward's duration of a trained projector at its end (0: none);
            ``chunks``, stages per rank under ``interleaved`` (2 by default).
        microbatches: M.
        schedule: decides on the placement: ``interleaved`` and ``zbv`` cut each rank's layers into chunks. Only the
            last modality is cut where it has several ranks; encoders keep a stage a rank.

    Raises:
        ConfigError: for fields that are not known and numbers that cannot be.
    """
    nodes: list[Node] = []
    edges: list[tuple[str, str]] = []
    ends: list[str] = []
    first_rank = 0
    trained_before = False
    *_, terminal = modalities
    for name, given in modalities.items():
        _check(name, given)
        ranks, frozen = int(given.get("stages", 1)), bool(given.get("frozen", False))
        costs = _costs(name, given.get("cost", 1.0), ranks)
        chunks = {"interleaved": int(given.get("chunks", 2)), "zbv": 2}.get(schedule, 1)
        chunks = chunks if name == terminal and ranks > 1 else 1
        places = place(schedule, ranks * chunks, ranks)
        keys = [f"{name}.{index}" for index in range(ranks * chunks)]
        gradients = name == terminal and trained_before
        for key, rank in zip(keys, places, strict=True):
            forward = costs[rank] / chunks
            full = float(given.get("backward", 2.0)) * forward
            backward, weight = backward_costs(full, trains=not frozen, passes_on=gradients)
            if key == keys[-1] and given.get("projector", 0.0):
                projector = float(given["projector"])
                forward += projector
                more, more_weight = backward_costs(2 * projector, trains=True, passes_on=gradients or not frozen)
                backward, weight = backward + more, weight + more_weight
            nodes.append(
                Node(
                    stage=key,
                    worker=first_rank + rank,
                    microbatches=tuple(range(microbatches)),
                    forward_cost=forward,
                    backward_cost=backward,
                    weight_cost=weight,
                )
            )
            gradients = gradients or backward > 0
        edges += pairwise(keys)
        if name == terminal:
            edges += [(end, keys[0]) for end in ends]
        ends.append(keys[-1])
        trained_before = trained_before or gradients
        first_rank += ranks
    return Graph(tuple(nodes), tuple(edges))


def backward_costs(full: float, *, trains: bool, passes_on: bool, recompute: float = 0.0) -> tuple[float, float]:
    """What a stage's backward costs, and how much of that computes weight gradients.

    Args:
        full: duration where all is trained and a gradient is passed on, in two equal halves.
        trains: whether the stage's layers are trained.
        passes_on: whether something before the stage is trained.
        recompute: duration of running its forward again, where activations are recomputed.

    Returns:
        ``(backward_cost, weight_cost)`` of a `Node`: nothing; half of ``full`` for input gradients alone; or all of
        it. A stage that trains but passes nothing on still needs the gradients between its layers: all of it is
        weight gradient, for nobody waits for it.
    """
    if not trains:
        return (full / 2 + recompute, 0.0) if passes_on else (0.0, 0.0)
    return full + recompute, full / 2 if passes_on else full + recompute


def _graphs(graph: Graph | Callable[[str], Graph], name: str, names: Sequence[str]) -> list[Graph]:
    if isinstance(graph, Graph):
        return [graph]
    return [graph(other) for other in dict.fromkeys(names)] if name == "auto" else [graph(name)]


def _best(name: str, graphs: list[Graph], transfer_cost: float | Callable[[str, str], float]) -> dict[str, Any]:
    return min((_row(name, graph, transfer_cost) for graph in graphs), key=lambda row: row["makespan"])


def _row(name: str, graph: Graph, transfer_cost: float | Callable[[str, str], float]) -> dict[str, Any]:
    schedule = build(name, graph)
    simulation = simulate(schedule, graph, transfer_cost=transfer_cost)
    ranks = []
    for worker in graph.workers:
        stages = graph.stages_of(worker)
        ranks.append(
            {
                "rank": worker,
                "modality": "+".join(dict.fromkeys(stage.rpartition(".")[0] for stage in stages)),
                "stage": int(stages[0].rpartition(".")[2]),
                "peak_activations": simulation.peak_activations[worker],
                "actions": [label(action, worker, graph) for action in schedule[worker]],
            }
        )
    bubble = sum(simulation.bubble.values()) / max(len(simulation.bubble), 1)
    return {"schedule": name, "makespan": simulation.makespan, "bubble": bubble, "ranks": ranks}


def _check(name: str, given: Mapping[str, Any]) -> None:
    for key in given:
        if key not in _FIELDS:
            raise ConfigError(f"modalities.{name}", key, f"A case has the fields {', '.join(_FIELDS)}", "Use these")
    for key in ("stages", "chunks"):
        if int(given.get(key, 1)) < 1:
            raise ConfigError(f"modalities.{name}.{key}", given[key], "It must be at least 1", "Use 1")


def _costs(name: str, cost: float | Sequence[float], ranks: int) -> list[float]:
    costs = [float(one) for one in cost] if isinstance(cost, Sequence) else [float(cost)] * ranks
    if len(costs) != ranks:
        raise ConfigError(f"modalities.{name}.cost", cost, f"It has one number for each of {ranks} stages", "Add them")
    return costs
