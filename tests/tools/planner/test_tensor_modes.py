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
from lightning_mm5d.config.tables import as_text
from lightning_mm5d.features.grids.block import AXES, GridShape
from lightning_mm5d.features.grids.grid_operations import Line
from lightning_mm5d.features.refusals.optimizer_probe import remade
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.tensor_parallel.apply import TensorParallel
from lightning_mm5d.tools.planner.activation_trace import Trace, trace
from lightning_mm5d.tools.planner.optimizer_states import OptimizerStates
from lightning_mm5d.tools.planner.proposal import Proposal, propose
from lightning_mm5d.tools.planner.rank_memory import Step, memory_of
from lightning_mm5d.tools.planner.tensor_modes import possible
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


# --- the choice ---


def proposed(
    modality: Modality,
    *,
    width: int = 32,
    shape: tuple[int, int] = (8, 128),
    module: L.LightningModule | None = None,
    limit: int | None = None,
    keeps: bool = False,
) -> Proposal:
    """For samples and tokens of each in `shape`; `keeps` keeps the mode."""
    if module is None:
        with torch.device("meta"):
            module = Text(width)
    plan = planned(module, modality, modality.tp_size * modality.cp_size)
    tokens = torch.ones(shape, dtype=torch.long)

    def traced(one: Plan) -> Trace:
        batch = {"input_ids": tokens, "labels": tokens}
        return trace(module, batch, one.partition, one.modalities, one.division, experts=one.experts)

    step = Step(module, "1f1b", 4, OptimizerStates(module, remade), traced(plan))
    rest = {"step": step, "memory_limit": limit, "traced": None if keeps else traced}
    return propose(plan, module, schedule="1f1b", num_microbatches=4, **rest)


def mode_of(found: Proposal) -> str:
    return found.found.modalities["language"].tp_mode


@pytest.mark.parametrize(
    ("ranks", "modes"),
    [
        (2, [("1d", 1)]),
        (4, [("1d", 1), ("2d", 1)]),
        (8, [("1d", 1), ("2.5d", 2), ("3d", 1)]),
        (16, [("1d", 1), ("2d", 1), ("2.5d", 4)]),
        (27, [("1d", 1), ("2.5d", 3), ("3d", 1)]),
    ],
)
def test_modes_are_those_that_have_a_grid_of_the_ranks(ranks: int, modes: list[tuple[str, int]]) -> None:
    assert possible(ranks) == modes


def test_the_mode_that_sends_least_is_proposed() -> None:
    """Weights travel on a grid, so that it pays with many tokens."""
    many, few = proposed(Modality(tp_size=8)), proposed(Modality(tp_size=8), width=256, shape=(8, 4))
    assert (mode_of(many), mode_of(few)) == ("2.5d", "1d")
    assert "tp_mode: 2.5d, tp_depth: 2" in many.as_yaml()
    assert "possible" in as_text(many.page())
    kept = proposed(Modality(tp_size=8), keeps=True)
    assert (mode_of(kept), kept.modes) == ("1d", None)


def test_one_dim_is_proposed_in_place_of_a_grid_that_sends_more() -> None:
    found = proposed(Modality(tp_size=8, tp_mode="2.5d", tp_depth=2), width=256, shape=(8, 4))
    assert (mode_of(found), found.found.modalities["language"].tp_depth) == ("1d", 1)


def test_a_grid_that_sends_more_is_proposed_where_one_dim_does_not_fit() -> None:
    given = Modality(tp_size=4, activation_checkpointing="full")
    free = proposed(given)
    assert mode_of(free) == "1d"
    need = max(one.peak for one in free.memory)
    assert mode_of(proposed(given, limit=need)) == "1d"
    limited = proposed(given, limit=need - 1)
    assert mode_of(limited) == "2d"
    assert max(one.peak for one in limited.memory) < need


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fields", "options", "why"),
    [
        ({"sequence_parallel": True}, {}, "blocks on all ranks already"),
        ({}, {"shape": (7, 128)}, "unlike numbers"),
        ({}, {"module": "mixtral"}, "experts"),
        pytest.param({"cp_size": 2}, {}, "shards samples, not sequences", marks=pytest.mark.exhaustive),
        pytest.param({}, {"shape": (128, 128)}, "either way round", marks=pytest.mark.exhaustive),
        pytest.param({}, {"module": "adapters"}, "adapter", marks=pytest.mark.exhaustive),
    ],
    ids=["sequence_parallel", "samples", "experts", "cp_size", "square", "adapters"],
)
def test_what_grids_refuse_stays_along_one_dim(fields: dict[str, Any], options: dict[str, Any], why: str) -> None:
    if (kind := options.get("module")) == "mixtral":
        sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
        module = Text(32)
        module.model = hf.MixtralForCausalLM(hf.MixtralConfig(num_hidden_layers=2, num_local_experts=4, **sizes))
        options = {"module": module}
    elif kind == "adapters":
        peft = pytest.importorskip("peft")
        module = Text(32)
        module.model = peft.get_peft_model(module.model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
        options = {"module": module}
    found = proposed(Modality(tp_size=4, **fields), **options)
    assert mode_of(found) == "1d"
    assert found.modes is not None
    assert why in str(found.modes)
