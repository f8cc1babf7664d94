"""Which plans are found for which modules, and what is said where none is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_mm5d.tensor_parallel.family_plans import TensorParallelPlan
from lightning_mm5d.tensor_parallel.plan_lookup import plans_of, register_tensor_parallel_plan, unplanned
from lightning_mm5d.tensor_parallel.plan_rules import linear_of
from zoo import CASES

from .families import FAMILIES

UP_AND_DOWN = TensorParallelPlan(column={"up": ("width",)}, row={"down": ("width",)})
# what stays whole in the layers of a family, by the end of its path
WHOLE = {
    "deberta": {"in_proj", "pos_proj", "pos_q_proj", "attention.output.dense"},
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "internvl_qk_norm": {"attention.q_proj", "attention.k_proj", "attention.v_proj", "projection_layer"},
    "sam": {"layers.0", "proj_in", "proj_out"},  # heads of the mask decoder
    "swin": {"reduction"},
    "swinv2": {"reduction", "continuous_position_bias_mlp.0"},
}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_mm5d.tensor_parallel.plan_lookup._REGISTERED", {})


def divided_layers(root: nn.Module) -> set[str]:
    """Paths of the linear layers that some plan divides."""
    found = set()
    for path, plans in plans_of(root).items():
        for plan in plans:
            found |= {f"{path}.{key}" for key in (*plan.column, *plan.row)}
    return found


def in_lists(root: nn.Module) -> set[str]:
    """Paths of the linear layers in lists of modules, such as layers."""
    lists = [path for path, module in root.named_modules() if isinstance(module, nn.ModuleList)]
    linears = [path for path, module in root.named_modules() if linear_of(module) is not None]
    return {path for path in linears if any(path.startswith(f"{start}.") for start in lists)}


@pytest.mark.parametrize("name", FAMILIES)
def test_all_linear_layers_of_all_layers_are_divided(name: str) -> None:
    root = FAMILIES[name].build()
    divided = divided_layers(root)
    assert divided
    whole = in_lists(root) - divided
    known = WHOLE.get(name, set())
    assert {path for path in whole if not any(path.endswith(f".{end}") for end in known)} == set()
    assert {end for end in known if not any(path.endswith(f".{end}") for path in whole)} == set(), "divided by now"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layers_of_a_plan_are_as_wide_as_its_parts(name: str) -> None:
    root = FAMILIES[name].build()
    for path, plans in plans_of(root).items():
        for plan in plans:
            module = root.get_submodule(path)
            counts = {"width": 1, "heads": number(module, plan.heads)}
            counts["key_value_heads"] = number(module, plan.key_value_heads) or counts["heads"]
            each = counts["heads"] // max(counts["key_value_heads"], 1)
            counts["groups"] = counts["key_value_heads"] * (each + 2)
            for keys, side in ((plan.column, 0), (plan.row, 1)):
                for key, parts in keys.items():
                    linear = linear_of(module.get_submodule(key))
                    assert linear is not None
                    width = (linear.weight.t() if not isinstance(linear, nn.Linear) else linear.weight).shape[side]
                    assert width % sum(counts[part] for part in parts) == 0, (path, key)


def number(module: nn.Module, where: str | int | None) -> int:
    if not isinstance(where, str):
        return where or 0
    found: Any = module
    for name in where.split("."):
        found = getattr(found, name)
    return found


def plans_named(name: str, end: str) -> TensorParallelPlan:
    """The one plan of a family for the first module whose path ends so."""
    plans = plans_of(FAMILIES[name].build())
    return next(found for path, (found, *_) in plans.items() if path.endswith(end))


def test_layouts_of_fused_projections_are_told_apart() -> None:
    assert plans_named("bloom", "self_attention").column == {"query_key_value": ("groups",)}
    assert plans_named("gpt2", "attn").column == {"c_attn": ("heads", "heads", "heads")}
    assert plans_named("falcon_groups", "self_attention").column == {"query_key_value": ("groups",)}
    multi_query = plans_named("falcon_multi_query", "self_attention")
    assert multi_query.column == {"query_key_value": ("heads", "key_value_heads", "key_value_heads")}
    assert plans_named("phi3", "self_attn").column == {"qkv_proj": ("heads", "key_value_heads", "key_value_heads")}
    assert plans_named("qwen2_vl", "attn").column == {"qkv": ("heads", "heads", "heads")}
    assert plans_named("phi3", "mlp").column == {"gate_up_proj": ("width", "width")}


def test_grouped_heads_have_their_group_size_set() -> None:
    plan = plans_named("llama", "self_attn")
    assert (plan.heads, plan.key_value_heads) == (4, 2)
    assert plan.local == {"num_key_value_groups": "group_size"}
    assert plan.column == {"q_proj": ("heads",), "k_proj": ("key_value_heads",), "v_proj": ("key_value_heads",)}


def test_norms_of_single_heads_are_shared() -> None:
    assert plans_named("qwen3", "self_attn").shared == ("q_norm", "k_norm")
    assert plans_named("sam", "attn").shared == ("rel_pos_h", "rel_pos_w")


def test_only_the_first_layer_of_t5_has_a_table_of_positions() -> None:
    plans = plans_of(FAMILIES["t5"].build())
    tables = [path for path, (plan, *_) in plans.items() if plan.parameters]
    assert tables == [f"model.{side}.block.0.layer.0.SelfAttention" for side in ("encoder", "decoder")]
    assert all(plan.arguments == {"position_bias": 1} for path, (plan, *_) in plans.items() if "Attention" in path)


def test_experts_come_from_what_the_model_says_of_itself() -> None:
    plan = plans_named("mixtral", "mlp")
    assert plan.experts == ("experts",)
    assert plan.parameters == {"experts.gate_up_proj": (1, "width", "width"), "experts.down_proj": (2, "width")}


def test_norms_of_all_heads_leave_the_attention_whole() -> None:
    for name, divided in (("internvl", True), ("internvl_qk_norm", False)):
        plans = plans_of(FAMILIES[name].build())
        assert any("vision_tower" in path and "attention" in path for path in plans) == divided


def test_only_wanted_modules_get_plans() -> None:
    root = CASES["llava"].build()
    plans = plans_of(root, lambda path: "vision_tower" in path)
    assert plans
    assert all("vision_tower" in path for path in plans)
    assert len(plans_of(root)) > len(plans)


def test_a_layer_without_a_plan_is_full_and_an_example_shows_how_to_shard_it() -> None:
    root = CASES["handwritten"].build()
    path = next(path for path, module in root.named_modules() if isinstance(module, nn.ModuleList))
    found = unplanned(root, plans_of(root), [path])
    for part in (
        "no tensor parallel plan is known for Layer (qkv (32 to 96), out (32 to 32), up (32 to 64), down (64 to 32))",
        "register_tensor_parallel_plan('Layer', TensorParallelPlan(column={'up': ('width',)}, ",
    ):
        assert part in found[f"{path}.0"]


def test_the_example_works() -> None:
    root = CASES["handwritten"].build()
    path = next(path for path, module in root.named_modules() if isinstance(module, nn.ModuleList))
    example = unplanned(root, plans_of(root), [path])[f"{path}.0"].partition("sharded: ")[2]
    eval(example, {one.__name__: one for one in (register_tensor_parallel_plan, TensorParallelPlan)})
    plans = plans_of(root)
    assert plans[f"{path}.0"] == (UP_AND_DOWN,)
    assert unplanned(root, plans, [path]) == {}


@pytest.mark.parametrize("is_normed", [False, True])
def test_weights_of_convolutions_are_not_taken_for_those_of_experts(is_normed: bool) -> None:
    convolutions = [nn.Conv1d(2, 2, 3), nn.ConvTranspose1d(2, 2, 3)]
    layers: list[nn.Module] = [
        nn.utils.parametrizations.weight_norm(each) if is_normed else each for each in convolutions
    ]
    root = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(each, nn.ELU()) for each in layers])})
    assert unplanned(root, {}, ["layers"]) == {}
    root["layers"][0].experts = nn.Parameter(torch.zeros(2, 2, 2))
    assert list(unplanned(root, {}, ["layers"])) == ["layers.0"]
