"""What ranks on a grid are estimated to hold, keep and send is what they do, and the mode follows from it.

A process is each of the ranks in turn, with a backend that sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_mm5d import Modality
from lightning_mm5d.features.grids.block import AXES, GridShape
from lightning_mm5d.features.grids.grid_operations import Line
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.tensor_parallel.apply import TensorParallel
from lightning_mm5d.tools.planner.activation_trace import trace
from lightning_mm5d.tools.planner.rank_memory import Step, memory_of
from zoo import CASES

SAMPLES = 8
MODES: dict[str, dict[str, Any]] = {
    "2d": {"tp_size": 4, "tp_mode": "2d"},
    "2.5d": {"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2},
    "3d": {"tp_size": 8, "tp_mode": "3d"},
}


class Text(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        config = hf.LlamaConfig(
            vocab_size=64,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
        self.model = hf.LlamaForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Found(NamedTuple):
    """Bytes of a rank: of parameters, of what layers save, and of what it sends for them."""

    parameters: int
    saved: int
    sent: float


def planned(module: L.LightningModule, modality: Modality, world: int) -> Plan:
    modalities = {"language": modality}
    return Plan.of(module, Layout.build(modalities, world_size=world, loss_modality="language"), modalities)


def case(name: str) -> tuple[L.LightningModule, Any]:
    if name == "llama":
        tokens = torch.arange(SAMPLES * 6).view(SAMPLES, 6) % 64
        return Text(32), {"input_ids": tokens, "labels": tokens}
    if name == "adapters":
        (module, batch), peft = case("llama"), pytest.importorskip("peft")
        module.model = peft.get_peft_model(module.model, peft.LoraConfig(target_modules="all-linear"))  # type: ignore
        return module, batch
    return CASES[name].build(), CASES[name].batch(SAMPLES)


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


def real(name: str, modality: Modality, rank: int) -> Found:
    module, batch = case(name)
    plan, shape, lines = planned(module, modality, modality.tp_size), GridShape.of(modality), dict[Any, Line]()
    assert shape is not None
    group = TensorGroup(dist.group.WORLD)  # type: ignore[arg-type]
    for axis in AXES:
        for ranks in shape.lines(axis):
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
    loss.backward()
    moved = sum(line.moved for line in lines.values())
    return Found(sum(p.nbytes for p in module.parameters()), sum(saved.values()), moved)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llama", "3d"),
        ("gpt2", "2d"),
        ("bert", "2.5d"),
        ("adapters", "2d"),
        pytest.param("adapters", "2.5d", marks=pytest.mark.exhaustive),
        pytest.param("adapters", "3d", marks=pytest.mark.exhaustive),
    ],
)
def test_estimates_of_a_rank_are_what_it_holds_keeps_and_sends(name: str, mode: str) -> None:
    modality = Modality(**MODES[mode])
    module, batch = case(name)
    plan = planned(module, modality, modality.tp_size)
    found = trace(module, batch, plan.partition, plan.modalities, plan.division)
    layers = found.units["language"][1:-1]
    estimated = {number: size for unit in layers for number, size in unit.saved.items()}
    costs = plan.division.in_blocks["language"].costs
    traffic = sum(costs.sent(unit.products) for unit in layers)
    memory = memory_of(plan, Step(module, "1f1b", 1, trace=found))
    rank = modality.tp_size - 1
    with as_rank(rank, modality.tp_size):
        measured = real(name, modality, rank)
    assert memory[rank].parameters == measured.parameters
    assert sum(estimated.values()) == measured.saved
    assert traffic == pytest.approx(measured.sent, rel=0.02)  # two numbers of each token come on top
