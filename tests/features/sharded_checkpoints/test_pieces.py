"""Pieces of saved tensors: each element once, and the bytes evenly over the ranks that hold them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from features.toys import LANGUAGE, PIPE, TWINS, VISION, Layout, Toy
from layouts import build
from lightning_mm5d import Modality
from lightning_mm5d.features.sharded_checkpoints.own_shards import OwnShards, Saved, pieces_of
from lightning_mm5d.plan.plan import Plan

DP = Layout({"vision": Modality(colocate_with="language", **VISION), "language": Modality(**LANGUAGE)}, 4, 4)


def sharing(stage: int, size: int | None, world: int, **language: Any) -> Layout:
    rows = {"zero_stage": stage, "dp_shard_size": size}
    encoder = Modality(colocate_with="language", **rows, **VISION)
    return Layout({"vision": encoder, "language": Modality(**rows, **language, **LANGUAGE)}, world)


LAYOUTS = {
    "pipe": PIPE,
    "twins": TWINS,
    "dp 4": DP,
    "stage 1, 3 ranks": sharing(1, None, 3),
    "stage 2, 2 of 6 ranks": sharing(2, 2, 6),
    "stage 3, 4 of 4 ranks, pp 2": sharing(3, None, 8, pp_size=2),
}


def plan_of(layout: Layout) -> Plan:
    return Plan.of(Toy(), build(layout.world, **layout.modalities), layout.modalities)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_element_is_written_once(name: str) -> None:
    layout = LAYOUTS[name]
    module, plan = Toy(), plan_of(layout)
    names = {name: name for name in module.state_dict()}
    written = dict.fromkeys(names, 0)
    for rank in range(layout.world):
        for item in OwnShards(module, plan, rank).module_items(names):
            written[item.name] += item.tensor.numel()
            assert item.tensor.shape == torch.Size(stop - start for start, stop in item.box)
    assert written == {name: value.numel() for name, value in module.state_dict().items()}


def test_replicas_write_equally_many_bytes() -> None:
    """four replicas of everything: ranks 0-3"""
    plan, size = plan_of(DP), 0
    loads = [0] * 4
    tensors = {name: Saved((count,), 4096) for name, count in plan.sizes.items()}
    for piece in pieces_of(plan, tensors):
        assert piece.is_first == (piece.box[0][0] == 0)
        count = math.prod(stop - start for start, stop in piece.box)
        loads[piece.writer] += count
        size += count
    assert size == sum(plan.sizes.values())
    assert max(loads) <= 1.1 * min(loads)
