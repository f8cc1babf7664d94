"""The graph of a placement: the stages of one replica with their costs, built by the code that plans a run.

Costs of a search are those of `Unit`s, in which one parameter stands for all trained ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from lightning_mm5d.config.modality import Modality, Owner, PipelineTemplate
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import Encoder, Partition, Parts, StageCut
from lightning_mm5d.partition.costs import Unit, costed, kept_of
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Graph
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.tools.planner.placements import Placement


def plain(name: str, row: Sequence[Unit], trainable: frozenset[str]) -> list[Unit]:
    """Return the units, each with one parameter that stands for all its trained ones, or with none."""
    trained = [[cost for full, cost in unit.costs.items() if full in trainable] for unit in row]
    return [
        replace(unit, costs={f"{name}.{index}": sum(costs)} if costs else {})
        for index, (unit, costs) in enumerate(zip(row, trained, strict=True))
    ]


def recomputing(
    rows: Mapping[str, Sequence[Unit]], modalities: Mapping[str, Modality], placement: Placement
) -> dict[str, Sequence[Unit]]:
    """Return the units with what recomputation adds to the backwards of `modalities`."""
    again = {
        name: costed(rows[name], kept_of(name, modality, placement.sizes[name]))
        for name, modality in modalities.items()
        if len(rows[name]) > 2
    }
    return {**rows, **again}


def layer_costs(row: Sequence[float]) -> list[float]:
    """Return the costs of the layers; the units before and after them count with the first and the last layer."""
    first, *layers, last = row
    if not layers:
        return [first + last]
    layers[0] += first
    layers[-1] += last
    return layers


def configured(modalities: Mapping[str, Modality], placement: Placement, loss_modality: str) -> dict[str, Modality]:
    """Return the placement as configuration."""
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


def replica_graph(
    rows: Mapping[str, Sequence[Unit]],
    modalities: Mapping[str, Modality],
    placement: Placement,
    loss_modality: str,
    num_microbatches: int,
    late: Collection[str],
) -> Graph:
    """Return the graph of stages of one replica, built by the code that plans the training.

    Tensor and context parallel ranks of a stage run the same actions, so one rank stands for all of them.
    """
    placed = {
        name: replace(modality, dp_size=None, dp_shard_size=None, tp_size=1, cp_size=1, ep_size=1, expert_tp_size=1)
        for name, modality in configured(modalities, placement, loss_modality).items()
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
