"""Simulated schedules as text: one row for each, and one row a rank for the one that is looked at."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mm5d.planner.inspect import table
from lightning_mm5d.schedule import Graph, Outcome

_NOTE = "Where there are more stages they are smaller: two activations of half a stage are as much as one of a whole."


def comparison(outcomes: Sequence[Outcome], *, configured: str, loss_modality: str) -> str:
    """Return a table with a row per schedule.

    Args:
        outcomes: what came of the schedules, each of its own name.
        configured: name of the schedule to mark with an asterisk.
        loss_modality: the modality whose number of stages is shown, for some schedules want several on each rank.
    """
    rows = []
    for one in outcomes:
        name = f"{one.schedule} *" if one.schedule == configured else one.schedule
        makespan = f"{one.simulation.makespan:.5g}"
        rows.append((name, makespan, f"{one.bubble:.1%}", one.peak_activations, num_stages(one.graph, loss_modality)))
    text = table(("schedule", "makespan", "bubble", "peak activations", f"stages of {loss_modality}"), rows)
    return f"{text}\n{_NOTE}" if len({row[-1] for row in rows}) > 1 else text


def ranks(outcome: Outcome) -> str:
    """Return a table with a row per rank: its stages, how long it works, how much it idles and what it holds."""
    result, graph = outcome.simulation, outcome.graph
    rows = [
        (rank, ", ".join(graph.stages_of(rank)), f"{result.busy[rank]:.5g}", f"{result.bubble[rank]:.1%}", peak)
        for rank, peak in sorted(result.peak_activations.items())
    ]
    return table(("rank", "stages", "busy", "idle", "peak activations"), rows)


def num_stages(graph: Graph, modality: str) -> int:
    """Return how many stages of a modality a graph has."""
    return sum(stage.modality == modality for stage in graph.stages)
