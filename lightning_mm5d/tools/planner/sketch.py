"""Builds a graph of stages without a model: each stage is one layer with one parameter and its modality's ``cost``.

So the code that plans real runs can simulate the cases of papers, and models and clusters that do not exist yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import parts
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import Encoder, Partition, Parts, StageCut, Unit
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Graph


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
        if modality.pipelines is not None:
            rule = "Which stages unlike pipelines have is known of a model's layers, and there is no model"
            raise ConfigError(f"modalities.{name}.pipelines", modality.pipelines, rule, "Name a model beside it")
    stages = {
        name: tuple(StageCut(name, index, index, index + 1) for index in range(modality.num_cuts))
        for name, modality in modalities.items()
    }
    cuts = [cut for several in stages.values() for cut in several]
    partition = Partition(
        loss_modality=layout.loss_modality,
        encoders={name: Encoder(owns=(), boundaries=()) for name in modalities if name != layout.loss_modality},
        layers=dict.fromkeys(modalities),
        parts=dict.fromkeys(modalities, Parts()),
        stages=stages,
        owners={cut.name: (cut.name,) for cut in cuts},
        units={cut.name: (Unit.of({cut.name: 1.0}, _recomputed(modalities[cut.modality], cut.index)),) for cut in cuts},
    )
    costed = {
        name: modality if modality.cost is not None else replace(modality, cost=1.0)
        for name, modality in modalities.items()
    }
    return Plan(layout, partition, costed, dict.fromkeys(partition.owners, 1), v_shaped=v_shaped)


def _recomputed(modality: Modality, stage: int) -> float:
    return max((one.share_of(modality, stage) for one in parts("costs")), default=0.0)
