"""Pieces of saved tensors: each element once, and the bytes evenly over the ranks that hold them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from features.toys import LANGUAGE, PIPE, TWINS, VISION, Layout, Toy
from layouts import build
from lightning_mm5d import Modality
from lightning_mm5d.features.sharded_checkpoints.own_shards import Item, OwnShards, PieceCopies, Saved, pieces_of
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


def test_copies_of_the_same_pieces_stay_in_the_same_memory_and_others_get_their_own() -> None:
    weight, state, copies = torch.arange(12.0).reshape(3, 4), torch.ones(3), PieceCopies(beside=True)

    def taken(*items: Item) -> list[torch.Tensor]:
        return [one.tensor for one in copies.take(items, [Item.whole("state", state)])]

    rows = Item("weight", weight[:, 1:3], ((0, 3), (1, 3)), (3, 4))
    first = taken(rows)
    assert first[0].tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]
    assert first[0].data_ptr() != weight.data_ptr()
    weight += 1
    state *= 5
    assert first[1].tolist() == [1.0] * 3
    second = taken(rows)
    assert [one.data_ptr() for one in second] == [one.data_ptr() for one in first]
    assert [one.tolist() for one in second] == [[[2.0, 3.0], [6.0, 7.0], [10.0, 11.0]], [5.0] * 3]
    twice = taken(Item.whole("weight", weight), rows, rows)
    assert [one.shape for one in twice] == [(3, 4), (3, 2), (3, 2), (3,)]
    assert len({one.data_ptr() for one in twice}) == 4
