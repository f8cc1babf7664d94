"""How layers are dealt out to stages: by what they cost, or as a template says."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from cuts import HEAD, LAYER, by_offsets, cut, llama, llava, train_only
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import PipelineTemplate
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.partition import partition
from zoo import CASES


def sizes(module: nn.Module, **modalities: Modality) -> dict[str, list[int]]:
    stages = cut(module, **modalities).stages
    return {name: [part.last - part.first for part in parts] for name, parts in stages.items()}


def test_layers_that_cost_the_same_are_dealt_out_evenly() -> None:
    module = llama(num_hidden_layers=10, vocab_size=1)
    assert sizes(module, language=Modality(pp_size=4)) == {"language": [3, 3, 2, 2]}


def test_a_big_vocabulary_moves_layers_away_from_the_last_stage() -> None:
    module = llama(num_hidden_layers=8, vocab_size=1024)  # the head is as much as four layers
    assert sizes(module, language=Modality(pp_size=2)) == {"language": [6, 2]}
    assert sizes(module, language=Modality(pp_size=2, pipeline={"pp_chunks": 2})) == {"language": [3, 2, 2, 1]}


def test_frozen_layers_cost_a_third_so_that_more_of_them_share_a_stage() -> None:
    module = llama(num_hidden_layers=8, vocab_size=1)
    train_only(module, *(f"layers.{index}." for index in range(4, 8)))
    # a step costs 1, 1, 1, 1, 3, 3, 3, 3 forwards
    assert sizes(module, language=Modality(pp_size=2)) == {"language": [5, 3]}


def test_frozen_layers_behind_a_trained_encoder_pay_for_its_gradients() -> None:
    module = llava()
    stages = {"vision": Modality(), "language": Modality(pp_size=2)}
    train_only(module, "language_model.layers.3.", "lm_head")
    assert sizes(module, **stages)["language"] == [3, 1]  # a step costs 1, 1, 1 and 3 forwards, and the head's
    train_only(module, "language_model.layers.3.", "lm_head", "multi_modal_projector")
    assert sizes(module, **stages)["language"] == [2, 2]  # 2, 2, 2 and 3


def test_layers_without_parameters_are_dealt_out_too() -> None:
    class Deep(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Sequential(nn.Identity()) for _ in range(6)]
            self.layers = nn.ModuleList([*layers, nn.Sequential(nn.Linear(1, 1))])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                batch = layer(batch)
            return batch.sum()

    assert sizes(Deep(), language=Modality(pp_size=3)) == {"language": [3, 3, 1]}


class Gated(L.LightningModule):
    """Norms and gates between the layers, and a norm of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(2) for _ in range(4))
        self.gates = nn.Parameter(torch.ones(4))
        self.norm = nn.LayerNorm(2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for index, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            batch = batch + self.gates[index] * layer(norm(batch))
        return self.norm(batch).sum()


def test_what_runs_between_layers_is_on_every_stage() -> None:
    owners = cut(Gated(), language=Modality(pp_size=2)).owners
    both = ("language.0", "language.1")
    assert {name: owners[name] for name in ("gates", "norms.0.weight", "norms.3.bias", "norm.weight")} == {
        "gates": both,
        "norms.0.weight": both,
        "norms.3.bias": both,
        "norm.weight": both[1:],
    }


def test_more_stages_than_layers_are_refused_as_before() -> None:
    with pytest.raises(ConfigError) as caught:
        cut(llama(), language=Modality(pp_size=5))
    assert (caught.value.field, caught.value.fix) == ("modalities.language.pp_size", "Use at most 4")


def test_offsets_change_the_even_split() -> None:
    module = llama(num_hidden_layers=10)
    assert sizes(module, language=by_offsets(0, 0, 0, 0)) == {"language": [3, 3, 2, 2]}
    assert sizes(module, language=by_offsets(0, 0, 1, -1)) == {"language": [3, 3, 3, 1]}
    assert sizes(module, language=by_offsets(0)) == {"language": [10]}


def test_offsets_that_leave_a_stage_empty_are_refused_with_the_sizes() -> None:
    with pytest.raises(ConfigError) as caught:
        cut(llama(num_hidden_layers=10), language=by_offsets(2, 0, 1, -3))
    assert caught.value.field == "modalities.language.pipeline.pipeline_template.offsets"
    assert "[5, 3, 3, -1]" in caught.value.rule
    assert caught.value.fix == "Use [0, 0, 1, -1], which gives [3, 3, 3, 1]"


def test_offsets_for_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        cut(llama(), language=by_offsets(0, 0, 0, 0, 0))
    assert caught.value.field == "modalities.language.pipeline.pipeline_template.offsets"
    assert caught.value.fix == "Use at most 4 stages"


def test_what_a_template_names_counts_in_the_stage_that_it_says() -> None:
    stages = [["model.layers.0", "model.layers.1", "lm_head"], ["model.layers.2", "model.layers.3"]]
    module = llama()
    named = cut(module, language=Modality(pipeline={"pipeline_template": PipelineTemplate(stages=stages)}))
    assert [unit.forward for unit in named.units["language.0"]] == [0, LAYER, LAYER, HEAD]
    assert [unit.forward for unit in named.units["language.1"]] == [LAYER, LAYER, 32]
    assert named.owners["model.lm_head.weight"] == ("language.0",)
    stages = [["model.layers.0", "embed_tokens"], ["model.layers.1", "model.layers.2", "model.layers.3"]]
    named = cut(module, language=Modality(pipeline={"pipeline_template": PipelineTemplate(stages=stages)}))
    assert "model.model.embed_tokens.weight" in named.units["language.0"][0].costs


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("qwen2_5_omni_thinker", ["model.model.audio_tower", "model.model.visual", "model.model.language_model"]),
        ("handwritten_two", ["model.image_encoder", "model.audio_encoder", "model.decoder"]),
    ],
)
def test_a_modality_that_is_not_found_is_told_the_modules_to_paste(family: str, modules: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        partition(CASES[family].build(), {"radar": Modality(), "language": Modality()})
    assert caught.value.field == "modalities.radar"
    assert caught.value.fix == (
        f"Set modalities.radar.module to the path of its module, for instance {', '.join(map(repr, modules))}"
    )
