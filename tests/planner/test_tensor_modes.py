"""What ranks on a grid are estimated to hold, keep and send is what they do, and the mode follows from it.

A process is each of the ranks in turn, with a backend that sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_mm5d import Modality
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.planner.activation_trace import Trace, trace
from lightning_mm5d.planner.optimizer_states import OptimizerStates
from lightning_mm5d.planner.proposal import Proposal, propose
from lightning_mm5d.planner.rank_memory import Step, memory_of
from lightning_mm5d.planner.tables import as_text
from lightning_mm5d.planner.tensor_modes import possible
from lightning_mm5d.planner.tensor_traffic import sent
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.tensor_parallel.apply import TensorParallel
from lightning_mm5d.tensor_parallel.grid.grid_products import Line
from lightning_mm5d.tensor_parallel.grid.grid_shape import AXES, GridShape
from lightning_mm5d.trainer.optimizer_probe import remade
from zoo import CASES

SAMPLES = 8
MODES: dict[str, dict[str, Any]] = {
    "1d": {"tp_size": 2},
    "2d": {"tp_size": 4, "tp_mode": "2d"},
    "2.5d": {"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2},
    "3d": {"tp_size": 8, "tp_mode": "3d"},
}


class Found(NamedTuple):
    """Bytes of a rank: of parameters, of what layers save, and of what it sends for them."""

    parameters: int
    saved: int
    sent: float


def planned(module: L.LightningModule, modality: Modality, world: int) -> Plan:
    modalities = {"language": modality}
    return Plan.of(module, Layout.build(modalities, world_size=world, loss_modality="language"), modalities)


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


def real(name: str, modality: Modality, rank: int) -> Found:
    module, batch = CASES[name].build(), CASES[name].batch(SAMPLES)
    plan, shape, lines = planned(module, modality, modality.tp_size), GridShape.of(modality), dict[Any, Line]()
    group = TensorGroup(dist.group.WORLD)  # type: ignore[arg-type]
    for axis in AXES if shape is not None else ():
        for ranks in shape.lines(axis) if shape is not None else ():
            made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if made is not None and rank in ranks:
                lines[axis] = Line(made)
    TensorParallel(module, plan.division, {"language": group}, lines={"language": lines})
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, int] = {}
    kept, inside = [], []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in parameters:
            kept.append(storage)  # so that no other one gets its address
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    [(_, path)] = plan.partition.layers.items()
    for layer in module.get_submodule(str(path)).children():
        layer.register_forward_pre_hook(lambda *_: inside.append(1))
        layer.register_forward_hook(lambda *_: inside.clear())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module.training_step(batch, 0)
    forward = group.moved
    loss.backward()
    moved = sum(line.moved for line in lines.values()) if lines else group.moved - forward
    return Found(sum(p.nbytes for p in module.parameters()), sum(saved.values()), moved)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("mode", MODES)
def test_estimates_of_a_rank_are_what_it_holds_keeps_and_sends(name: str, mode: str) -> None:
    modality = Modality(**MODES[mode])
    module, batch = CASES[name].build(), CASES[name].batch(SAMPLES)
    plan = planned(module, modality, modality.tp_size)
    found = trace(module, batch, plan.partition, plan.modalities, plan.division)
    layers = found.units["language"][1:-1]
    estimated = {number: size for unit in layers for number, size in unit.saved.items()}
    traffic = sum(sent(GridShape.of(modality), modality.tp_size, unit.products) for unit in layers)
    memory = memory_of(plan, Step(module, "1f1b", 1, trace=found))
    for rank in (0, modality.tp_size - 1):
        with as_rank(rank, modality.tp_size):
            measured = real(name, modality, rank)
        print(name, mode, rank, memory[rank].parameters, sum(estimated.values()), traffic, measured)
        assert memory[rank].parameters == measured.parameters
        assert sum(estimated.values()) == pytest.approx(measured.saved, rel=0.02)
        if mode != "1d":
            assert traffic == pytest.approx(measured.sent, rel=0.05)
