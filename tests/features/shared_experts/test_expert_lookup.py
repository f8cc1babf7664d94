"""Which modules hold experts, how tokens come to them, and what is refused by name before ranks exist."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mm5d import ExpertParallelPlan, Modality, register_expert_parallel_plan
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.expert_parallel import ExpertLayer
from lightning_mm5d.features.shared_experts.experts import find_experts, find_plans
from lightning_mm5d.partition import partition
from zoo.case import TinyModule

from .expert_forms import PLANS, Own, Soft
from .expert_parity import CASES
from .families import handwritten
from .handwritten_experts import HandwrittenMixture, Listed, StackedExperts

PATHS = [f"model.layers.{layer}.mlp" for layer in range(2)]


@pytest.fixture(autouse=True)
def registered() -> None:
    for cls, plan in PLANS.items():
        register_expert_parallel_plan(cls, plan)
    register_expert_parallel_plan(StackedExperts, ExpertParallelPlan(number="count"))


def found(module: nn.Module, ep: int = 2, cp: int = 1) -> dict[str, ExpertLayer]:
    modalities = {"language": Modality(ep_size=ep, cp_size=cp)}
    return find_experts(module, partition(module, modalities), modalities)


@pytest.mark.parametrize("name", [name for name in CASES if len(CASES[name].modalities) == 1])
def test_experts_are_where_families_say(name: str) -> None:
    with torch.device("meta"):
        module = CASES[name].make_module()
    layers = found(module)
    if name in ("soft", "skipping", "planned", "listed_by_plan"):
        assert [path.rpartition(".")[0] for path in layers] == PATHS
    else:
        assert sorted(layers) == sorted(CASES[name].experts)
        assert {layer.number for layer in layers.values()} == {CASES[name].count}


def test_each_expert_of_a_list_is_of_one_rank() -> None:
    layer = found(handwritten("list", Listed, 5).make_module(), 3)[f"{PATHS[0]}.experts"]
    weights = [f"{layer.path}.{expert}.0.weight" for expert in range(5)]
    assert [layer.rows(name, 20) for name in weights] == [
        ((0, 20), (20, 20), (20, 20)),
        ((0, 20), (20, 20), (20, 20)),
        ((0, 0), (0, 20), (20, 20)),
        ((0, 0), (0, 20), (20, 20)),
        ((0, 0), (0, 0), (0, 20)),
    ]


def test_rows_of_experts_that_lie_in_one_dim_come_in_blocks() -> None:
    layer = found(CASES["dbrx"].make_module(), 3)["model.transformer.blocks.0.ffn.experts"]
    assert layer.rows(layer.parameters[0], 80) == ((0, 40), (40, 60), (60, 80))


def test_a_layer_that_seems_to_hold_experts_is_refused_by_its_class() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)layers.0.mlp \(Own\) seems to hold.*register_expert_parallel_plan\('Own'"
    ):
        found(handwritten("own", Own, 4).make_module())


def test_a_modality_of_which_some_experts_are_unknown_is_refused() -> None:
    forms = iter([Listed, Own])
    with pytest.raises(ConfigError, match=r"layers.1.mlp \(Own\)"):
        found(TinyModule(HandwrittenMixture(lambda: next(forms)(4))))


def test_experts_may_be_left_whole() -> None:
    class Kept(Own):
        pass

    register_expert_parallel_plan(Kept, None)
    forms = iter([Listed, Kept])
    assert list(found(TinyModule(HandwrittenMixture(lambda: next(forms)(4))))) == [f"{PATHS[0]}.experts"]


def test_a_registered_plan_comes_before_rules_and_names_its_number() -> None:
    class Wrong(Own):
        pass

    register_expert_parallel_plan(Wrong, ExpertParallelPlan(number="many"))
    with pytest.raises(ConfigError, match="no number of experts"):
        found(handwritten("own", Wrong, 4).make_module())
    register_expert_parallel_plan(Wrong, ExpertParallelPlan(experts="elsewhere", number="amount"))
    with pytest.raises(ConfigError, match="elsewhere"):
        found(handwritten("own", Wrong, 4).make_module())


def test_tensors_that_two_experts_use_are_refused() -> None:
    module = handwritten("list", Listed, 4).make_module()
    experts = module.model.layers[0].mlp.experts  # type: ignore[union-attr,index]
    experts[1][0].weight = experts[0][0].weight  # type: ignore[index,union-attr]
    with pytest.raises(ConfigError, match=r"experts.0.0.weight is the tensor of 2 modules"):
        found(module)


def test_lists_that_normalize_over_samples_or_change_the_width_are_unknown() -> None:
    class Normalized(nn.Module):
        def __init__(self, count: int, expert: nn.Module) -> None:
            super().__init__()
            self.experts = nn.ModuleList(expert for _ in range(count))

    for expert in (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 8)):
        plans, unknown = find_plans(Normalized(4, expert), lambda path: True)
        assert not plans
        assert unknown == ["experts"]


def test_a_list_beside_a_router_is_one_of_experts_whatever_its_name_in_layers_alone() -> None:
    module = HandwrittenMixture(lambda: Soft(4))
    assert [one.path for one in find_plans(module, lambda path: True)[0]] == [
        f"layers.{n}.mlp.branches" for n in (0, 1)
    ]
    assert not find_plans(module, lambda path: False)[0]


def test_lists_whose_calls_may_differ_over_ranks_of_one_sequence_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks of one sequence must call the same ones"):
        found(CASES["skipping"].make_module(), cp=2)
    assert found(CASES["listed_by_plan"].make_module(), cp=2)


def test_fewer_experts_than_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 experts"):
        found(handwritten("list", Listed, 4).make_module(), 5)


@pytest.mark.parametrize(("cls", "plan"), [(3, None), ("", None), ("Name", "experts"), (int, ExpertParallelPlan())])
def test_what_is_no_class_or_plan_is_refused(cls: object, plan: object) -> None:
    with pytest.raises(ConfigError, match="register_expert_parallel_plan"):
        register_expert_parallel_plan(cls, plan)  # type: ignore[arg-type]


def test_buffers_in_experts_and_experts_that_are_used_twice_are_refused() -> None:
    module = handwritten("list", Listed, 4).make_module()
    experts = module.get_submodule(f"{PATHS[1]}.experts")
    experts.get_submodule("2").register_buffer("seen", torch.zeros(()))
    with pytest.raises(ConfigError, match=r"layers.1.mlp.experts.2.seen is a buffer in experts"):
        found(module)
    module = handwritten("list", Listed, 4).make_module()
    experts = module.get_submodule(f"{PATHS[1]}.experts")
    experts.register_module("2", experts.get_submodule("0"))
    with pytest.raises(ConfigError, match=r"layers.1.mlp.experts has one module for several of its 4 experts"):
        found(module)


def test_experts_of_two_layers_with_plans_of_their_own_are_refused() -> None:
    module = handwritten("list", Planned, 4).make_module()
    first, second = (module.get_submodule(path) for path in PATHS)
    second.register_module("experts", first.get_submodule("experts"))
    register_expert_parallel_plan(Planned, ExpertParallelPlan(experts="experts", forward=lambda layer, *_: layer))
    with pytest.raises(ConfigError, match=r"The experts of model.layers.1.mlp are those of another layer too"):
        found(module)


class Planned(Listed):
    """Registered as a layer."""
