"""Rules by names divide what they understand, and leave whole whatever might go wrong unseen.

Each unsafe module differs from one that is divided by one thing, so that it is this thing that keeps it whole.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_mm5d.source.reads import between, reads
from lightning_mm5d.tensor_parallel.family_plans import TensorParallelPlan
from lightning_mm5d.tensor_parallel.plan_lookup import plans_of

from .rule_modules import (
    Attention,
    BiasedExperts,
    Experts,
    FunctionalNorm,
    FunctionalNormBetween,
    FusedByANumber,
    FusedByHeads,
    FusedByParts,
    FusedByPartsOfHeads,
    FusedUnknown,
    Gate,
    Halved,
    IntegralRates,
    Interleaved,
    InterleavedExperts,
    ListsOfNorms,
    MethodBetween,
    Model,
    NoNumberOfHeads,
    NormBetween,
    NormOfAllHeads,
    NormOfTheOutput,
    NormsOfHeads,
    NormWithoutParameters,
    NumberOfHeadsInATensor,
    NumberOfHeadsInside,
    OddLinear,
    OtherOrder,
    OutsideFactor,
    Parameter,
    ParameterBetween,
    Perceptron,
    PerceptronInALayer,
    PerHeadArgument,
    PerHeadBuffer,
    RateAsInteger,
    ReadsConfig,
    ReadsHeadsOfConfig,
    ReadsInputShape,
    ReadsInputWidth,
    ReadsKeyValueHeads,
    ReadsLastSize,
    ReadsNumber,
    ReadsWidth,
    ReadsWidthOfAnotherName,
    Sizes,
    SoftmaxBetween,
    WeightTakenDirectly,
    WideQueries,
    WrongNumberOfHeads,
)


def plans_for(module: nn.Module) -> tuple[TensorParallelPlan, ...]:
    return plans_of(nn.ModuleDict({"one": module})).get("one", ())


@pytest.mark.parametrize(
    "cls",
    [
        *(ReadsWidth, ReadsWidthOfAnotherName, ReadsInputWidth, ReadsInputShape, ReadsLastSize, ReadsNumber),
        ReadsConfig,
        *(NormOfAllHeads, NormWithoutParameters, FunctionalNorm, Gate, Parameter, PerHeadBuffer, PerHeadArgument),
        *(WrongNumberOfHeads, NoNumberOfHeads, WideQueries, OddLinear, FusedUnknown, FusedByANumber),
        *(ListsOfNorms, NumberOfHeadsInATensor, NumberOfHeadsInside),
    ],
)
def test_an_attention_that_is_not_fully_understood_stays_whole(cls: type[nn.Module]) -> None:
    assert plans_for(Attention())
    assert plans_for(cls()) == ()


@pytest.mark.parametrize(
    "cls",
    [
        *(NormBetween, FunctionalNormBetween, SoftmaxBetween, MethodBetween, ParameterBetween, WeightTakenDirectly),
        *(OtherOrder, Sizes, Interleaved, OutsideFactor),
    ],
)
def test_a_perceptron_that_does_more_than_an_activation_stays_whole(cls: type[nn.Module]) -> None:
    assert plans_for(Perceptron())
    assert plans_for(cls()) == ()


def test_an_attention_with_separate_projections_is_divided_by_heads() -> None:
    (plan,) = plans_for(Attention())
    assert plan.column == {"q_proj": ("heads",), "k_proj": ("heads",), "v_proj": ("heads",)}
    assert plan.row == {"o_proj": ("heads",)}
    assert (plan.heads, plan.key_value_heads) == ("num_heads", None)


@pytest.mark.parametrize(
    ("cls", "parts"),
    [
        (FusedByParts, ("heads", "heads", "heads")),
        (FusedByPartsOfHeads, ("heads", "heads", "heads")),
        (FusedByHeads, ("groups",)),
    ],
)
def test_the_code_says_how_a_fused_projection_is_made(cls: type[nn.Module], parts: tuple[str, ...]) -> None:
    (plan,) = plans_for(cls())
    assert plan.column == {"qkv": parts}


def test_a_number_of_heads_that_is_read_from_the_config_is_set_there() -> None:
    (plan,) = plans_for(ReadsHeadsOfConfig())
    assert plan.local == {"config.num_attention_heads": "heads"}
    assert not plans_for(Attention())[0].local


@pytest.mark.parametrize("cls", [IntegralRates, RateAsInteger])
def test_real_numbers_that_are_written_as_integers_count_no_heads(cls: type[nn.Module]) -> None:
    assert [plan.row for plan in plans_for(cls())] == [plan.row for plan in plans_for(cls.__base__())]  # type: ignore[misc]


def test_key_and_value_heads_are_set_where_they_are_as_many_as_query_heads() -> None:
    (plan,) = plans_for(ReadsKeyValueHeads())
    assert plan.key_value_heads is None
    assert plan.local == {"num_key_value_heads": "key_value_heads"}


def test_a_norm_of_the_whole_output_is_of_no_concern() -> None:
    (plan,) = plans_for(NormOfTheOutput())
    assert plan.shared == ()


def test_norms_of_heads_are_shared() -> None:
    (plan,) = plans_for(NormsOfHeads())
    assert plan.shared == ("q_norm", "k_norm")


@pytest.mark.parametrize("cls", [Perceptron, PerceptronInALayer])
def test_a_perceptron_is_divided_by_width(cls: type[nn.Module]) -> None:
    assert plans_for(cls()) == (TensorParallelPlan(column={"fc1": ("width",)}, row={"fc2": ("width",)}),)


def test_halves_of_a_fused_projection_are_divided_apart() -> None:
    (plan,) = plans_for(Halved())
    assert plan.column == {"gate_up_proj": ("width", "width")}


def expert_styles(**tensors: str) -> dict[str, str]:
    styles = {f"layers.*.mlp.{name}": style for name, style in tensors.items()}
    return styles | {"layers.*.mlp": "moe_tp_experts"}


PACKED = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}


def test_experts_are_divided_as_the_model_says() -> None:
    (plan,) = plans_of(Model(Experts(), expert_styles(**PACKED)))["layers.0"]
    assert plan.experts == ("mlp",)
    assert plan.parameters == {"mlp.gate_up_proj": (1, "width", "width"), "mlp.down_proj": (2, "width")}


@pytest.mark.parametrize(
    ("cls", "styles"),
    [
        (Experts, {**PACKED, "gate_up_proj": "colwise"}),
        (Experts, {**PACKED, "down_proj": "packed_rowwise"}),
        (Experts, {**PACKED, "down_proj": "colwise"}),
        (Experts, {**PACKED, "down_proj": "unheard_of"}),
        (Experts, {"gate_up_proj": "packed_colwise"}),
        (InterleavedExperts, PACKED),
        (InterleavedExperts, {**PACKED, "gate_up_proj": "colwise"}),
        (BiasedExperts, PACKED),
    ],
)
def test_experts_whose_code_does_not_fit_what_the_model_says_stay_whole(
    cls: type[nn.Module], styles: dict[str, str]
) -> None:
    assert plans_of(Model(cls(), expert_styles(**styles))) == {}


def test_perceptrons_with_names_of_their_own_are_divided_as_the_model_says() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.act, self.leave = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(self.act(self.enter(x)))

    plan = TensorParallelPlan(column={"enter": ("width",)}, row={"leave": ("width",)})
    said = {"layers.*.mlp.enter": "colwise", "layers.*.mlp.leave": "rowwise"}
    assert plans_of(Model(Odd(), said)) == {"layers.0.mlp": (plan,)}
    assert plans_of(Model(Odd(), {})) == {}
    assert plans_of(Model(Odd(), {**said, "layers.*.mlp.leave": "unheard_of"})) == {}


def test_projectors_stay_whole_where_layers_with_the_same_names_do_not() -> None:
    class Projector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear_1, self.act, self.linear_2 = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear_2(self.act(self.linear_1(x)))

    root = nn.ModuleDict({"projector": Projector(), "layers": nn.ModuleList([Projector()])})
    assert list(plans_of(root)) == ["layers.0"]


def test_what_an_adapter_wraps_counts_as_a_linear_layer() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 12, bias=False)})

    module = Perceptron()
    module.fc1 = Adapter(module.fc1)  # type: ignore[assignment]
    assert plans_for(module) == plans_for(Perceptron())


def test_code_without_a_source_is_not_known() -> None:
    scope: dict[str, Any] = {"Attention": Attention, "__name__": "nowhere"}
    exec("class Hidden(Attention):\n    def forward(self, x):\n        return x", scope)
    assert reads(scope["Hidden"]) is None
    assert plans_for(scope["Hidden"]()) == ()


def test_between_is_from_the_first_layer_to_the_last() -> None:
    code = between(PerceptronInALayer, ("fc1",), "fc2")
    assert code is not None
    assert code.attributes == {"fc1", "act", "fc2"}
    assert "softmax" not in code.calls
    assert between(Perceptron, ("fc2",), "fc1") is None
    assert between(OtherOrder, ("fc1",), "fc2") is None
    assert between(Attention, ("fc1",), "fc2") is None
