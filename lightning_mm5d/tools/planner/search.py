"""Searches for the number of ranks of each modality and for stages that share a rank, jointly for all modalities.

A step takes as long as its busiest rank works, plus the ramps before and after. So the placements with the smallest
largest loads (see `placements`) are simulated, in the order of a lower bound on their makespans, until no other can be
shorter.

The search keeps tp_size, cp_size and the replicas of the loss modality, and gives each rank one chunk of a modality.
Memory counts where `fitted` says what fits. Numbers of ranks that no placement fills are refused, and encoders that
feed stages by number, because the search chooses these numbers.

Simulated schedules as tables: one row per schedule, and one row per rank for a single schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from lightning_mm5d.config.errors import ConfigError, nearest, one_of
from lightning_mm5d.config.modality import Modality, Owner, PipelineTemplate
from lightning_mm5d.config.tables import Table
from lightning_mm5d.features.auto_schedule.schedules import lower_bound
from lightning_mm5d.features.timeline.drawing import TimeUnit
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import Encoder, Partition, Parts, StageCut
from lightning_mm5d.partition.costs import Unit, costed, depends_on_cut, kept_of, step_costs
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import AnySchedule, Graph, build, simulate
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.tools.planner.outcomes import Outcome
from lightning_mm5d.tools.planner.placements import Placement, Space

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


_JUDGED = 48  # placements whose schedules may be simulated
_SAME = 1e-9  # makespans that differ by less than this share count as equal


Fitted = Callable[[dict[str, Modality]], dict[str, Modality] | None]


class NothingFitsError(Exception):
    """No placement fits into the memory of its ranks."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search.

    Attributes:
        modalities: the configuration, with `pp_size`, `pipeline_template` and `colocate_with` chosen.
        busiest: the largest work of a rank in a step, in the unit of the costs.
        makespan: duration of the simulated step of one replica, in the unit of the costs.
        placed: number of placements that were split.
        simulated: number of placements whose step was simulated.
    """

    modalities: dict[str, Modality]
    busiest: float
    makespan: float
    placed: int
    simulated: int


def search(
    rows: Mapping[str, Sequence[Unit]],
    modalities: Mapping[str, Modality],
    num_ranks: int,
    *,
    loss_modality: str,
    trainable: Collection[str],
    num_microbatches: int,
    schedule: AnySchedule = "1f1b",
    late: Collection[str] = (),
    fitted: Fitted | None = None,
) -> Found:
    """Return the placement of the modalities on `num_ranks` ranks whose simulated step is shortest.

    Args:
        rows: for each modality the units of a forward: one before its layers, one for each layer, one after them.
        modalities: the configuration; its pipelines, costs and shared ranks are replaced.
        num_ranks: ranks of one replica; all of them are used.
        loss_modality: name of the modality that computes the loss.
        trainable: names of the parameters that require a gradient.
        num_microbatches: M.
        schedule: as `build` takes it.
        late: encoders whose result the loss modality uses after its last layer.
        fitted: returns the modalities of a placement with the options with which it fits into memory, None where
            nothing helps; a placement that costs more with them counts as that long.

    Returns:
        The placement with the shortest step; of equally short ones, the one with the fewest shared stages.

    Raises:
        ConfigError: no placement fills the ranks with as many stages as ``per_stage`` lists, or `feeds` lists stages.
        NothingFitsError: none fits into memory.
    """
    for name, modality in modalities.items():
        if isinstance(modality.feeds, list):
            rule = f"It lists stages of {loss_modality!r}, and the search chooses their number"
            raise ConfigError(f"modalities.{name}.feeds", modality.feeds, rule, "Use 'first' or 'all'")
    plain = {name: _plain(name, row, frozenset(trainable)) for name, row in rows.items()}
    trained = frozenset(key for row in plain.values() for unit in row for key in unit.costs)
    encoders_train = any(
        trained.intersection(unit.costs)
        for name in plain
        if name != loss_modality and not (name in late and modalities[name].feeds == "first")
        for unit in plain[name]
    )
    costs = {
        name: _layers(step_costs(row, trained, encoders_train and name == loss_modality)) for name, row in plain.items()
    }
    space = Space(costs, modalities, num_ranks, loss_modality=loss_modality, num_microbatches=num_microbatches)
    listed = {name: modality.num_cuts for name, modality in modalities.items() if depends_on_cut(modality)}
    placements = space.best(_JUDGED, listed)
    if not placements:
        if listed and space.fills(num_ranks):
            name, count = next(iter(listed.items()))
            field, said = f"modalities.{name}.activation_checkpointing", modalities[name].activation_checkpointing
            rule = f"It lists {count} stages, and no layout of {num_ranks} ranks has as many with one on each rank"
            raise ConfigError(field, said, rule, "Use a fraction, such as {fraction: 0.5}")
        rule = f"With a layer at least for each stage the modalities fill up to {space.most_ranks} ranks"
        fits = one_of(nearest(num_ranks, space.fills))
        fix = f"Nearest that fit: {fits} for each replica (modalities.{loss_modality}.dp_size says how many there are)"
        raise ConfigError("num_ranks", num_ranks, rule, fix)
    graphs = [
        _graph(
            _recomputing(plain, {name: modalities[name] for name in listed}, placement),
            modalities,
            placement,
            loss_modality,
            num_microbatches,
            late,
        )
        for placement in placements
    ]
    bounds = list(map(lower_bound, graphs))
    best, makespan, simulated, chosen = 0, math.inf, 0, dict[str, Modality]()
    for index in sorted(range(len(graphs)), key=bounds.__getitem__):
        if bounds[index] > makespan * (1 + _SAME):
            break
        graph, written = graphs[index], _written(modalities, placements[index], loss_modality)
        if fitted is not None:
            options = fitted(written)
            if options is None:
                continue
            if options != written:
                written, again = options, _recomputing(plain, options, placements[index])
                graph = _graph(again, modalities, placements[index], loss_modality, num_microbatches, late)
        simulated += 1
        shortest = simulate(build(schedule, graph), graph).makespan
        fewer = (placements[index].shared, index) < (placements[best].shared, best)
        if shortest < makespan * (1 - _SAME) or (fewer and shortest <= makespan * (1 + _SAME)):
            best, makespan, chosen = index, shortest, written
    if not chosen:
        raise NothingFitsError
    return Found(
        modalities=chosen,
        busiest=max(placements[best].loads) / space.scale,
        makespan=makespan,
        placed=space.seen,
        simulated=simulated,
    )


def _plain(name: str, row: Sequence[Unit], trainable: frozenset[str]) -> list[Unit]:
    """The units, each with one parameter that stands for all its trained ones, or with none."""
    trained = [[cost for full, cost in unit.costs.items() if full in trainable] for unit in row]
    return [
        Unit(unit.forward, {f"{name}.{index}": sum(costs)} if costs else {}, unit.recomputed)
        for index, (unit, costs) in enumerate(zip(row, trained, strict=True))
    ]


def _recomputing(
    rows: Mapping[str, Sequence[Unit]], modalities: Mapping[str, Modality], placement: Placement
) -> dict[str, Sequence[Unit]]:
    """The units with what recomputation adds to the backwards of `modalities`."""
    again = {
        name: costed(rows[name], kept_of(name, modality, placement.sizes[name]))
        for name, modality in modalities.items()
        if len(rows[name]) > 2
    }
    return {**rows, **again}


def _layers(row: Sequence[float]) -> list[float]:
    """Costs of the layers; the units before and after them count with the first and the last layer."""
    first, *layers, last = row
    if not layers:
        return [first + last]
    layers[0] += first
    layers[-1] += last
    return layers


def _written(modalities: Mapping[str, Modality], placement: Placement, loss_modality: str) -> dict[str, Modality]:
    """The placement as configuration."""
    found = {}
    for name, modality in modalities.items():
        sizes, owner = placement.sizes[name], placement.owners.get(name)
        if owner is not None and len(sizes) == len(placement.sizes[owner.modality]) == 1:
            owner = Owner(owner.modality, None)  # equal, and shorter to write
        found[name] = replace(
            modality,
            dp_size=modality.dp_size if name == loss_modality else None,
            pp_size=len(sizes) if len(sizes) > 1 else None,
            pipeline_template=PipelineTemplate(stages=list(sizes)) if len(sizes) > 1 else None,
            pp_chunks=1,
            colocate_with=None if owner is None else str(owner),
            cost=None,
        )
    return found


def _graph(
    rows: Mapping[str, Sequence[Unit]],
    modalities: Mapping[str, Modality],
    placement: Placement,
    loss_modality: str,
    num_microbatches: int,
    late: Collection[str],
) -> Graph:
    """The graph of stages of one replica, built by the code that plans the training.

    Tensor and context parallel ranks of a stage run the same actions, so one rank stands for all of them.
    """
    placed = {
        name: replace(modality, dp_size=None, dp_shard_size=None, tp_size=1, cp_size=1, ep_size=1, expert_tp_size=1)
        for name, modality in _written(modalities, placement, loss_modality).items()
    }
    stages: dict[str, tuple[StageCut, ...]] = {}
    units: dict[StageKey, tuple[Unit, ...]] = {}
    for name, sizes in placement.sizes.items():
        ends = [0, *accumulate(sizes)]
        stages[name] = tuple(StageCut(name, index, *span) for index, span in enumerate(pairwise(ends)))
        for cut in stages[name]:
            start = cut.first + (cut.index > 0)  # unit 0 runs before the first layer
            units[cut.name] = tuple(rows[name][start : cut.last + 1 if cut is not stages[name][-1] else None])
    partition = Partition(
        loss_modality=loss_modality,
        encoders={name: Encoder((), (), used_late=name in late) for name in modalities if name != loss_modality},
        layers=dict.fromkeys(modalities),
        parts=dict.fromkeys(modalities, Parts()),
        stages=stages,
        owners={key: (stage,) for stage, row in units.items() for unit in row for key in unit.costs},
        units=units,
    )
    num_ranks = sum(modality.own_ranks_per_replica for modality in placed.values())
    layout = Layout.build(placed, world_size=num_ranks, loss_modality=loss_modality)
    plan = Plan(layout, partition, placed, dict.fromkeys(partition.owners, 1))
    return plan.graphs.graph(range(layout.num_replicas), num_microbatches, frozenset(partition.owners))
