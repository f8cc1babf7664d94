"""A modality's ranks as a `DeviceMesh` of torch, so that torch's own tools work beside the strategy."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.options import AXES
from lightning_mm5d.engine.run_groups import Groups, Wish
from lightning_mm5d.layout import Layout


def device_mesh(layout: Layout, modality: str, groups: Groups, device: torch.device, rank: int) -> DeviceMesh | None:
    """Return the mesh of a modality with process groups of its own; None on other ranks. Collective over the world.

    Args:
        layout: of all modalities.
        modality: its name.
        groups: makes the groups of its dims.
        device: where this rank computes.
        rank: global rank.

    Raises:
        ConfigError: the modality is unknown, is on one rank, or its ranks are no mesh whose groups are in rising order.
    """
    if modality not in layout.modalities:
        rule = f"Modalities are {', '.join(layout.modalities)}"
        raise ConfigError("device_mesh", modality, rule, did_you_mean(modality, layout.modalities))
    size = layout.sizes(modality)
    lengths = {name: getattr(size, name) for name in AXES if getattr(size, name) > 1}
    ranks = layout.ranks_of(modality)
    if len(ranks) != int(np.prod([*lengths.values()])):
        rule = "Its replicas have pipelines of unlike lengths, which are no mesh"
        raise ConfigError("device_mesh", modality, rule, "Use pp_size in place of pipelines")
    if not lengths:
        rule = f"It is on rank {ranks[0]} alone, and a mesh has a dim with two ranks or more"
        raise ConfigError("device_mesh", modality, rule, "Ask for a modality with several ranks")
    mesh = np.array(ranks).reshape([*lengths.values()])
    lines = {name: np.moveaxis(mesh, dim, -1).reshape(-1, lengths[name]) for dim, name in enumerate(lengths)}
    for name, rows in lines.items():
        if (np.diff(rows, axis=1) < 0).any():
            rule = f"Along {name} its ranks do not rise, and those of a process group do"
            raise ConfigError("device_mesh", modality, rule, "Use a placement of axes, or leave it unset")
    wishes = {
        name: [Wish(tuple(map(int, row)), f"{modality} mesh {name}") for row in rows] for name, rows in lines.items()
    }
    groups.make(wish for rows in wishes.values() for wish in rows)
    if rank not in ranks:
        return None
    own = [groups.get(next(one for one in rows if rank in one.ranks).ranks, rows[0].tag) for rows in wishes.values()]
    held: list[ProcessGroup] = [group for group in own if group is not None]
    if len(held) == 1:
        return DeviceMesh.from_group(held[0], device.type, mesh_dim_names=tuple(lengths))
    return DeviceMesh.from_group(held, device.type, mesh=torch.from_numpy(mesh), mesh_dim_names=tuple(lengths))
