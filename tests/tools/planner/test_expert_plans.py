"""Pages, estimates and proposals of experts that ranks share, and configurations of them that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from features.shared_experts.expert_case import BATCHED, GROUPED
from features.shared_experts.families import FAMILIES
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.refusals.feature import remade
from lightning_mm5d.partition import partition
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tensor_parallel.resolve import Division
from lightning_mm5d.tools.planner.activation_trace import trace
from lightning_mm5d.tools.planner.hollow_tensors import OptimizerStates
from lightning_mm5d.tools.planner.inspect import holdings, report
from lightning_mm5d.tools.planner.rank_memory import RankMemory, Step, memory_of
from parity.harness import strategy

CASE = FAMILIES["glm4_moe"].implemented(BATCHED)  # five experts in two layers
MODULE = CASE.make_module()
MODULE.configure_optimizers = lambda: torch.optim.AdamW(MODULE.parameters())  # type: ignore[method-assign]
SIZES = {name: p.numel() for name, p in MODULE.named_parameters()}
EXPERTS = sum(size for name, size in SIZES.items() if ".experts." in name)
FLOAT_BYTES = torch.get_default_dtype().itemsize


def planned(world: int, module: Any = MODULE, **fields: Any) -> Plan:
    planned = strategy({"language": Modality(**fields)}, num_microbatches=2)
    planned.parallel_devices = [torch.device("cpu")] * world
    planned.cluster_environment = LightningEnvironment()
    planned.cluster_environment.set_world_size(world)
    return planned.plan(module)


def step(plan: Plan) -> Step:
    batch = CASE.make_batch([0])
    found = trace(MODULE, batch, plan.partition, plan.modalities, plan.division, experts=plan.experts)
    return Step(MODULE, "1f1b", 2, OptimizerStates(MODULE, remade), found)


def memory(plan: Plan) -> list[RankMemory]:
    return memory_of(plan, step(plan))


def test_a_rank_is_estimated_to_hold_its_experts_alone_and_the_rows_under_way() -> None:
    alone, shared = memory(planned(2)), memory(planned(2, ep_size=2))
    for rank, held in enumerate((3, 2)):
        elements = sum(SIZES.values()) - EXPERTS + EXPERTS * held // 5
        assert shared[rank].parameters == shared[rank].gradients == elements * FLOAT_BYTES
        assert shared[rank].activations > alone[rank].activations
        assert shared[rank].peak < alone[rank].peak


def test_experts_are_not_gathered_in_a_step_as_other_shared_parameters_are() -> None:
    shared, zero = memory(planned(2, ep_size=2))[1], memory(planned(2, zero_stage=3))[1]
    assert shared.buffers < zero.buffers


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_what_grouped_products_keep_is_counted_though_they_have_no_memory() -> None:
    case = FAMILIES["qwen3_moe"].implemented(GROUPED)
    module, batch, modalities = case.make_module().float(), case.make_batch([0, 0]), {"language": Modality()}
    cut, held = partition(module, modalities), dict[int, int]()
    parameters = {p.data_ptr() for p in module.parameters()}

    def keep(x: torch.Tensor) -> torch.Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        _loss = module.training_step(batch, 0)
    real = sum(size for key, size in held.items() if key not in parameters)
    found = trace(module, batch, cut, modalities, Division())
    kept = dict[int, int]()
    for unit in found.units["language"]:
        kept |= unit.saved
    assert sum(kept.values()) == pytest.approx(real, rel=0.02)


def test_the_page_says_which_ranks_share_which_experts() -> None:
    plan = planned(4, ep_size=2)
    text = "\n\n".join(map(str, report(plan, MODULE, schedule="1f1b", num_microbatches=2)))
    assert "5 of language shared by ranks 0-1; 2-3, 3, 2 on each, in 2 layers" in text
    held = [one.parameters for one in holdings(plan, MODULE)]
    assert held == [sum(SIZES.values()) - EXPERTS + EXPERTS * count // 5 for count in (3, 2, 3, 2)]


@pytest.mark.parametrize(
    ("world", "fields", "words"),
    [
        (2, {"ep_size": "2"}, ("ep_size", "'2'")),
        (2, {"ep_size": True}, ("ep_size", "True")),
        (2, {"ep_size": 0}, ("ep_size", "got 0")),
        (2, {"ep_size": 1.5}, ("ep_size", "1.5")),
        (2, {"tensor": {"expert_tp_size": None}}, ("expert_tp_size", "None")),
        (4, {"ep_size": 3}, ("ep_size", "must divide dp_size * cp_size = 4 * 1", "3 or 6 ranks")),
        (4, {"ep_size": 4, "tp_size": 2}, ("ep_size", "must divide dp_size * cp_size = 2 * 1", "8 ranks")),
        (4, {"ep_size": 3, "dp_size": 4}, ("ep_size", "must divide dp_size * cp_size = 4 * 1", "Use 2 or 4")),
        (6, {"ep_size": 6}, ("ep_size", "has 5 experts", "Use 5")),
        (2, {"expert_tp_size": 2}, ("expert_tp_size", "ep_size=1")),
        (8, {"ep_size": 2, "tp_size": 4, "expert_tp_size": 2}, ("expert_tp_size", "tp_size=4", "Use 1 or 4")),
        (2, {"ep_size": 2, "offload": ["parameters"]}, ("offload", "parameters")),
    ],
)
def test_refuses_what_cannot_work(world: int, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        planned(world, **fields)
    assert all(word in str(raised.value) for word in words), raised.value


def test_refuses_a_modality_without_experts() -> None:
    from zoo import CASES

    with pytest.raises(ConfigError, match=r"modalities.language.ep_size: got 2. 'language' has no experts"):
        planned(2, CASES["llama"].build(), ep_size=2)
