"""The process groups that a run needs, made in the order of the plan on all ranks.

It refuses ranks that plan otherwise, or would train or divide other parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch.distributed as dist

from lightning_mm5d.engine.groups import Groups
from lightning_mm5d.engine.plan import Plan
from lightning_mm5d.tensor_parallel.collectives import TensorGroup


@dataclass(frozen=True)
class RunGroups:
    """The groups that one rank is in; None and what is missing stand for those that it is not in.

    Attributes:
        ascending: the world, for payloads to higher ranks; None where nothing is sent.
        descending: the world again, for payloads to lower ranks.
        replicas: the ranks that work for each replica of the terminal modality.
        terminal: one rank of each replica, where steps end: of those that share a last stage, those of this rank's
            tensor parallel index.
        gradients: by their ranks, those whose gradients are summed.
        tensor: by their ranks, those that share layers.
        modalities: the same by modality.
    """

    ascending: dist.ProcessGroup | None = None
    descending: dist.ProcessGroup | None = None
    replicas: dict[int, dist.ProcessGroup | None] = field(default_factory=dict)
    terminal: dist.ProcessGroup | None = None
    gradients: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    tensor: dict[tuple[int, ...], TensorGroup] = field(default_factory=dict)
    modalities: dict[str, TensorGroup] = field(default_factory=dict)


def make_groups(
    groups: Groups,
    plan: Plan,
    rank: int,
    *,
    gradients: Iterable[tuple[int, ...]],
    trained: Iterable[str],
    is_plain: bool,
) -> RunGroups:
    """Make all groups of a run; collective over the world.

    Args:
        groups: makes them.
        plan: all stages.
        rank: global rank.
        gradients: the ranks of each group over which gradients are summed, in one order on all ranks.
        trained: names of the parameters that require a gradient.
        is_plain: whether every rank is a replica of the whole module, which needs no groups for steps.

    Raises:
        RuntimeError: on all ranks, when they plan otherwise.
    """
    layout = plan.layout
    world = range(layout.size)
    ascending = groups.get(world, "ascending") if plan.edges else None
    descending = groups.get(world, "descending") if plan.edges else None
    replicas = {
        replica: groups.get(layout.replica_ranks(replica), f"replica {replica}")
        for replica in range(layout.num_replicas)
        if not is_plain
    }
    ends = [sorted(ranks) for ranks in zip(*plan.instances(plan.last_stage), strict=True)]
    terminals = [groups.get(ranks, "terminal") for ranks in ends if len(ranks) > 1]
    summed = {ranks: groups.get(ranks, "gradients") for ranks in gradients}
    tensor: dict[tuple[int, ...], TensorGroup] = {}
    for ranks in dict.fromkeys(ranks for stage in plan.members for ranks in plan.instances(stage)):
        group = groups.get(ranks, "tensor") if len(ranks) > 1 else None
        if group is not None:
            tensor[ranks] = TensorGroup(group)
    modalities = {
        place.modality: tensor[ranks]
        for place in layout.places_of(rank)
        if (ranks := layout.ranks_of(place.modality, dp=place.dp, pp=place.pp)) in tensor
    }
    divided = sorted(plan.division.shards)
    groups.verify(f"stages {plan.partition.stages}, trained {sorted(trained)}, divided {divided}")
    terminal = next(filter(None, terminals), None)
    return RunGroups(ascending, descending, replicas, terminal, summed, tensor, modalities)
