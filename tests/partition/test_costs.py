"""What parts of a module cost, told from parameters, and what stages made of them cost."""

from __future__ import annotations

from types import SimpleNamespace

import lightning as L
import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from cuts import HEAD, LAYER, cut, llama, llava
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.partition import Unit, stage_costs, step_costs
from zoo.case import TinyModule
from zoo.text import LLAMA


def forwards(module: nn.Module, stage: str = "language.0", **modalities: Modality) -> list[float]:
    return [unit.forward for unit in cut(module, **modalities).units[stage]]


# ------------------------------------------------------------------ units


def test_a_unit_costs_its_matrices_and_looking_up_tokens_is_free() -> None:
    assert forwards(llama()) == [0, LAYER, LAYER, LAYER, LAYER, 32 + HEAD]


def test_a_tied_weight_counts_where_it_is_the_head() -> None:
    held = cut(llama(tied=True), language=Modality(pp_size=2))
    assert held.units["language.0"][0].forward == 0
    assert held.units["language.1"][-1].forward == 32 + HEAD
    assert held.owners["model.model.embed_tokens.weight"] == ("language.0", "language.1")


class SharesItsTable(L.LightningModule):
    """A language model that multiplies by its table of embeddings at the end, without a module for it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), nn.GELU()) for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.table(batch)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.linear(hidden, self.table.weight).logsumexp(-1).sum()


def test_a_table_that_is_used_again_behind_the_layers_is_a_head_there() -> None:
    assert forwards(SharesItsTable()) == [0, 64, 64, 64, 400]


def test_a_modality_without_a_list_of_layers_is_one_unit() -> None:
    class Flat(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 6)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.body(batch).sum()

    assert forwards(Flat()) == [30, 0]


def test_encoders_have_their_own_units_and_patches_run_before_their_layers() -> None:
    units = cut(llava(), vision=Modality(), language=Modality()).units
    (patches, *layers, behind) = units["vision.0"]
    assert len(layers) == 3
    assert len({layer.forward for layer in layers}) == 1
    assert any("patch_embedding" in name for name in patches.costs)
    assert any("multi_modal_projector" in name for name in behind.costs)
    assert patches.forward < layers[0].forward


def test_buffers_are_free_and_belong_to_a_unit() -> None:
    held = cut(llama())
    assert held.units["language.0"][0].costs["model.model.rotary_emb.inv_freq"] == 0
    assert set(held.owners) == {name for unit in held.units["language.0"] for name in unit.costs}


def test_of_routed_experts_the_share_counts_that_a_token_passes() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    module = TinyModule(MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=8, num_experts_per_tok=2)))
    layer = module.model.model.layers[0]
    experts = sum(p.numel() for p in layer.mlp.experts.parameters())
    rest = sum(p.numel() for p in layer.parameters()) - experts
    assert experts == 8 * 3 * 32 * 48
    assert forwards(module)[1] == rest + experts / 4


class Routed(nn.Module):
    """A layer with experts in a list, and with things that merely look like experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.short = nn.Conv1d(3, 1, 5, bias=False)  # weight [1, 3, 5]
        self.mixing = nn.Conv1d(1, 3, 5, bias=False)  # weight [3, 1, 5]
        self.pair = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])


class Routing(L.LightningModule):
    """Three layers, as many as a layer has experts."""

    def __init__(self, **fields: int) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.config = SimpleNamespace(**fields)
        self.inner.layers = nn.ModuleList(Routed() for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.inner(batch)


@pytest.mark.parametrize("number", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_in_a_list_count_by_their_share_and_nothing_else_does(number: str) -> None:
    rest = 15 + 15 + 2 * 16
    assert forwards(Routing(**{number: 3, "num_experts_per_tok": 1}))[1:4] == [rest + 16] * 3
    assert forwards(Routing())[1:4] == [rest + 48] * 3


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_layers_that_transformers_recomputes_are_known_in_training_mode_only() -> None:
    module = llama()
    module.model.gradient_checkpointing_enable()
    assert [unit.recomputed for unit in cut(module).units["language.0"]] == [False, *[True] * 4, False]
    module.model.model.layers[1].gradient_checkpointing = False
    assert [unit.recomputed for unit in cut(module).units["language.0"]] == [False, True, False, True, True, False]
    module.eval()
    assert not any(unit.recomputed for unit in cut(module).units["language.0"])


def test_layers_without_a_flag_of_their_own_obey_the_module_that_has_the_list() -> None:
    module = Routing()
    module.inner.gradient_checkpointing = True
    assert [unit.recomputed for unit in cut(module).units["language.0"]] == [False, True, True, True, False]


# ------------------------------------------------------------------ what a stage costs

ROW = (Unit(2.0, {"a": 2.0}), Unit(4.0, {"b": 3.0, "c": 1.0}), Unit(8.0, {"d": 8.0}))


@pytest.mark.parametrize(
    ("trained", "passes_on", "backward", "weight"),
    [("abcd", True, 28.0, 14.0), ("abcd", False, 28.0, 28.0), ("", True, 14.0, 0.0), ("", False, 0.0, 0.0)],
)
def test_a_backward_costs_none_one_or_two_forwards(
    trained: str, passes_on: bool, backward: float, weight: float
) -> None:
    assert stage_costs(ROW, frozenset(trained), passes_on) == (14.0, backward, weight)


def test_gradients_stop_at_the_first_trained_unit() -> None:
    assert stage_costs(ROW, frozenset("d"), False) == (14.0, 16.0, 16.0)
    assert stage_costs(ROW, frozenset("d"), True) == (14.0, 22.0, 8.0)
    assert step_costs(ROW, frozenset("d"), False) == [2.0, 4.0, 24.0]
    assert step_costs(ROW, frozenset("b"), False) == [2.0, 11.0, 16.0]


def test_small_trained_parts_cost_input_gradients_and_little_more() -> None:
    low_rank = (Unit(1000.0, {"base": 990.0, "lora": 10.0}), Unit(1000.0, {"base2": 990.0, "lora2": 10.0}))
    assert stage_costs(low_rank, frozenset({"lora", "lora2"}), True) == (2000.0, 2020.0, 20.0)


def test_recomputed_units_run_their_forward_again_where_they_have_a_backward() -> None:
    row = (Unit(2.0, {"a": 2.0}, True), Unit(4.0, {"b": 4.0}, True))
    assert stage_costs(row, frozenset("b"), False) == (6.0, 12.0, 12.0)
    assert stage_costs(row, frozenset(), False) == (6.0, 0.0, 0.0)
    # both parts of a split backward would recompute
    assert stage_costs(row, frozenset("ab"), True) == (6.0, 18.0, 0.0)


def test_what_is_free_may_be_trained_and_then_gradients_flow_behind_it() -> None:
    row = (Unit(0.0, {"embedding": 0.0}), Unit(4.0, {"b": 4.0}))
    assert stage_costs(row, frozenset({"embedding"}), False) == (4.0, 4.0, 4.0)
