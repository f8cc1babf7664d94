"""Compares schedules of the same stages by simulation, with results for a table or JSON.

Which schedule is best depends on depth, costs and microbatches, so all are simulated; that takes seconds.

`sketch` makes the stages without a model: each is one layer with one parameter and its modality's ``cost``. So the code
that plans real runs can simulate the cases of papers, and models and clusters that do not exist yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import parts
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.config.tables import Table
from lightning_mm5d.features.timeline.drawing import TimeUnit
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import Encoder, Partition, Parts, StageCut, Unit
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import SCHEDULES, AnySchedule, Graph, Schedule, Simulation, build, name_of, simulate
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.schedule.validate import label


def sketch(
    layout: Layout,
    modalities: Mapping[str, Modality],
    num_microbatches: int,
    *,
    frozen: Collection[str] = (),
    v_shaped: bool = False,
) -> Graph:
    """Return the graph of stages of one training step of all replicas.

    Args:
        layout: which rank is where.
        modalities: the configuration; a forward takes 1 on each rank of those without ``cost``, and a backward twice
            a forward.
        num_microbatches: microbatches per replica, M.
        frozen: names of modalities in which nothing is trained; all others are trained completely.
        v_shaped: as in `Plan`.
    """
    plan = sketched_plan(layout, modalities, v_shaped=v_shaped)
    trained = frozenset(name for name in plan.sizes if name.rpartition(".")[0] not in frozen)
    return plan.graphs.graph(range(layout.num_replicas), num_microbatches, trained)


def sketched_plan(layout: Layout, modalities: Mapping[str, Modality], *, v_shaped: bool = False) -> Plan:
    """Return the plan of a run without a model; arguments as of `sketch`. A stage's parameter has its name."""
    for name, modality in modalities.items():
        if modality.pipeline.pipelines is not None:
            rule = "Which stages unlike pipelines have is known of a model's layers, and there is no model"
            fix = "Name a model beside it"
            raise ConfigError(f"modalities.{name}.pipeline.pipelines", modality.pipeline.pipelines, rule, fix)
    stages = {
        name: tuple(StageCut(name, index, index, index + 1) for index in range(modality.num_cuts))
        for name, modality in modalities.items()
    }
    cuts = [cut for several in stages.values() for cut in several]
    units: dict[StageKey, tuple[Unit, ...]] = {
        cut.name: (Unit.of({cut.name: 1.0}, _recomputed(modalities[cut.modality], cut.index)),) for cut in cuts
    }
    costed = {
        name: modality if modality.cost is not None else replace(modality, cost=1.0)
        for name, modality in modalities.items()
    }
    return replace(plan_of_stages(layout, costed, stages, units), v_shaped=v_shaped)


def plan_of_stages(
    layout: Layout,
    modalities: Mapping[str, Modality],
    stages: dict[str, tuple[StageCut, ...]],
    units: dict[StageKey, tuple[Unit, ...]],
    late: Collection[str] = (),
) -> Plan:
    """Return the plan of a run without a model, whose parameters are those of its units, of one element each.

    Args:
        layout: which rank is where.
        modalities: the configuration.
        stages: of each modality.
        units: of each stage.
        late: encoders whose result the loss modality uses after its last layer.
    """
    partition = Partition(
        loss_modality=layout.loss_modality,
        encoders={name: Encoder((), (), used_late=name in late) for name in modalities if name != layout.loss_modality},
        layers=dict.fromkeys(modalities),
        parts=dict.fromkeys(modalities, Parts()),
        stages=stages,
        owners={name: (stage,) for stage, row in units.items() for unit in row for name in unit.costs},
        units=units,
    )
    return Plan(layout, partition, modalities, dict.fromkeys(partition.owners, 1))


def _recomputed(modality: Modality, stage: int) -> float:
    return max((module.share_of(modality, stage) for module in parts("costs")), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The simulated result of one schedule.

    Args:
        schedule: as `name_of` calls it.
        graph: the stages, placed for this schedule.
        actions: for each rank its actions, in order.
        simulation: its timeline.
    """

    schedule: str
    graph: Graph
    actions: Schedule
    simulation: Simulation

    @property
    def bubble(self) -> float:
        """The idle share of the ranks' time, between 0 and 1."""
        return sum(self.simulation.bubble.values()) / max(len(self.simulation.bubble), 1)

    @property
    def peak_activations(self) -> int:
        """The most microbatches that any rank holds, summed over its stages, whatever their sizes are."""
        return max(self.simulation.peak_activations.values(), default=0)

    def as_json(self) -> dict[str, Any]:
        """Return ``{"schedule", "makespan", "bubble", "ranks"}``.

        ``ranks`` is a list of ``{"rank", "modality", "stage", "peak_activations", "actions"}``. ``modality`` joins
        those of the rank with ``+``, ``stage`` is the index of its first stage, and actions are written as in `custom`:
        ``F0``, ``B0``, ``I0``, ``W0``, with ``.chunk`` where a rank has several stages.
        """
        ranks = []
        for rank in self.graph.ranks:
            stages = self.graph.stages_of(rank)
            ranks.append(
                {
                    "rank": rank,
                    "modality": "+".join(dict.fromkeys(stage.modality for stage in stages)),
                    "stage": stages[0].number,
                    "peak_activations": self.simulation.peak_activations[rank],
                    "actions": [label(action, rank, self.graph) for action in self.actions[rank]],
                }
            )
        makespan = self.simulation.makespan
        return {"schedule": self.schedule, "makespan": makespan, "bubble": self.bubble, "ranks": ranks}


Sends = Callable[[StageKey, StageKey], float]
"""How long a message takes between two stages."""


def compare(
    graph: Graph | Callable[[AnySchedule], Graph],
    schedules: Iterable[AnySchedule] = SCHEDULES,
    sends: Callable[[Graph], Sends | float] = lambda _: 0.0,
) -> list[Outcome]:
    """Builds and simulates several schedules of the same stages.

    Args:
        graph: the stages, or a function from a schedule to them where placements differ. ``auto`` then takes the best
            of the placements of all schedules.
        schedules: as `build` takes them.
        sends: returns how long messages take in a graph; no time by default.

    Raises:
        ConfigError: a name is not known.
        ScheduleError: a user's schedule does not fit the graph.
    """
    schedules = list(schedules)
    outcomes = []
    for schedule in schedules:
        played = [_play(schedule, placed, sends(placed)) for placed in _graphs(graph, schedule, schedules)]
        outcomes.append(min(played, key=lambda outcome: outcome.simulation.makespan))
    return outcomes


def _graphs(
    graph: Graph | Callable[[AnySchedule], Graph], schedule: AnySchedule, schedules: Sequence[AnySchedule]
) -> list[Graph]:
    if isinstance(graph, Graph):
        return [graph]
    return list(dict.fromkeys(graph(other) for other in (schedules if schedule == "auto" else [schedule])))


def _play(schedule: AnySchedule, graph: Graph, sends: Sends | float) -> Outcome:
    actions = build(schedule, graph)
    simulation = simulate(actions, graph, transfer_cost=sends)
    return Outcome(schedule=name_of(schedule), graph=graph, actions=actions, simulation=simulation)


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
    for outcome in outcomes:
        name = f"{outcome.schedule} *" if outcome.schedule == configured else outcome.schedule
        makespan, stages = unit.text(outcome.simulation.makespan), num_stages(outcome.graph, loss_modality)
        rows.append((name, makespan, f"{outcome.bubble:.1%}", outcome.peak_activations, stages))
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
