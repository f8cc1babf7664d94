"""Simulated schedules as tables: one row per schedule, and one row per rank for a single schedule."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mm5d.config.tables import Table
from lightning_mm5d.schedule import Graph, Outcome
from lightning_mm5d.schedule.drawing import TimeUnit

STAGES_NOTE = "More stages are smaller stages: two activations of half a stage take as much as one of a whole stage."


def comparison(outcomes: Sequence[Outcome], *, configured: str, loss_modality: str, unit: TimeUnit) -> Table:
    """Return a table with a row per schedule.

    Args:
        outcomes: what came of the schedules, each of its own name.
        configured: name of the schedule to mark with an asterisk.
        loss_modality: the modality whose number of stages is shown, since some schedules want several on each rank.
        unit: of the makespans.
    """
    rows = []
    for one in outcomes:
        name = f"{one.schedule} *" if one.schedule == configured else one.schedule
        makespan, stages = unit.text(one.simulation.makespan), num_stages(one.graph, loss_modality)
        rows.append((name, makespan, f"{one.bubble:.1%}", one.peak_activations, stages))
    makespan = f"makespan ({unit.symbol})"
    return Table.of(("schedule", makespan, "bubble", "peak activations", f"stages of {loss_modality}"), rows)


def ranks(outcome: Outcome, unit: TimeUnit) -> Table:
    """Return a table with a row per rank: its stages, how long it works and idles, and what it holds."""
    result, graph = outcome.simulation, outcome.graph
    rows = [
        (rank, ", ".join(graph.stages_of(rank)), unit.text(result.busy[rank]), f"{result.bubble[rank]:.1%}", peak)
        for rank, peak in sorted(result.peak_activations.items())
    ]
    return Table.of(("rank", "stages", f"busy ({unit.symbol})", "idle", "peak activations"), rows)


def num_stages(graph: Graph, modality: str) -> int:
    """Return how many stages of a modality a graph has."""
    return sum(stage.modality == modality for stage in graph.stages)
