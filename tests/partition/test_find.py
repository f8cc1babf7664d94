"""Modalities that are found by path."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from features.toys import LANGUAGE, Toy
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.partition import partition
from lightning_mm5d.partition.find import discover, find, position
from lightning_mm5d.partition.step_uses import Boundary


@pytest.mark.parametrize(
    ("container", "fix"),
    [
        (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), r"all its members, \['encoder.a', 'encoder.b'\]"),
        (nn.ParameterList([torch.ones(2)]), "Move the code that uses them into the forward of a module"),
    ],
)
def test_a_container_without_a_module_around_it_is_told_what_would_work(container: nn.Module, fix: str) -> None:
    module = Toy()
    module.encoder = container
    with pytest.raises(ConfigError, match=rf"modalities.vision.module: got 'encoder'.*{fix}"):
        partition(module, {"vision": Modality(module="encoder"), "language": Modality(**LANGUAGE)})


@pytest.mark.parametrize("field", ["module", "boundary"])
def test_a_list_of_layers_is_no_module_that_is_called(field: str) -> None:
    """Nothing calls the list itself, so the modality would pass its input on without its layers."""
    modalities = {"vision": Modality(**{field: "encoder.layers"}), "language": Modality(**LANGUAGE)}
    with pytest.raises(ConfigError, match=rf"modalities.vision.{field}: got 'encoder.layers'.*Name .* 'encoder'"):
        partition(Toy(), modalities)


class Beside(Toy):
    """An encoder with a parameter and a buffer beside it, which the module around both uses."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(2))


@pytest.mark.parametrize("path", ["token", "table", "encoder.patch.weight"])
def test_a_modality_that_is_a_tensor_is_told_that_it_is_one(path: str) -> None:
    modalities = {"vision": Modality(module=path), "language": Modality(**LANGUAGE)}
    kind = "buffer" if path == "table" else "parameter"
    fix = "'encoder.patch'" if "." in path else "a module whose forward returns it"
    with pytest.raises(ConfigError, match=rf"modalities.vision.module: got '{path}'. It is a {kind}.*{fix}"):
        partition(Beside(), modalities)


def test_a_parameter_beside_a_module_belongs_to_its_modality() -> None:
    modalities = {"vision": Modality(module=["encoder", "token"]), "language": Modality(**LANGUAGE)}
    found = partition(Beside(), modalities)
    assert found.owners["token"] == ("vision.0",)
    assert [cut.name for cut in found.encoders["vision"].boundaries] == ["encoder"]


def test_a_tower_whose_last_norm_the_model_calls_by_itself_ends_with_the_next_module() -> None:
    config = transformers.Kosmos2Config(
        text_config={"vocab_size": 67, "embed_dim": 32, "layers": 2, "ffn_dim": 50, "attention_heads": 4},
        vision_config={"hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4},
    )
    with torch.device("meta"):
        found = discover(transformers.Kosmos2ForConditionalGeneration(config))
    assert found["vision"].owns == ("vision_model", "image_to_text_projection")
    assert found["vision"].boundaries == (Boundary("image_to_text_projection"),)


@pytest.mark.parametrize("name", ["vision", "language"])
def test_a_metric_is_no_modality(name: str) -> None:
    modalities = {"vision": Modality(module="encoder"), "language": Modality(**LANGUAGE)}
    modalities[name] = Modality(module="accuracy")
    with pytest.raises(ConfigError, match=rf"modalities.{name}.module: got 'accuracy'.*[Ii]t is a metric"):
        partition(Toy(), modalities)


@pytest.mark.parametrize(
    ("path", "after"), [("patch", "'encoder.layers', 'encoder.projector'"), ("layers.0", "'encoder.p")]
)
def test_a_boundary_before_the_end_of_its_encoder_is_refused(path: str, after: str) -> None:
    modalities = {"vision": Modality(module="encoder", boundary=f"encoder.{path}"), "language": Modality(**LANGUAGE)}
    with pytest.raises(
        ConfigError, match=rf"modalities.vision.boundary: got 'encoder.{path}'.*in {after}.*Use 'encoder'"
    ):
        partition(Toy(), modalities)


def test_an_attribute_that_has_a_modalitys_name_is_its_module() -> None:
    module = Toy()
    found = find(module, {"encoder": Modality(), "language": Modality()})
    named = find(module, {"encoder": Modality(module="encoder"), "language": Modality()})
    assert found.encoders == named.encoders
    assert found.encoders["encoder"].owns == ("encoder",)
    with pytest.raises(ConfigError, match=r"modalities.accuracy: got 'accuracy'.*No such modality"):
        find(module, {"accuracy": Modality(), "language": Modality()})


class Speaker(L.LightningModule):
    """A language model that is asked for this and that before what runs before it; registered first."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1)
        self.llm, self.projector, self.head = LlamaForCausalLM(config), nn.Linear(8, 8), nn.Linear(8, 2)
        self.queries = nn.Parameter(torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        embeds = self.embedded(batch) * self.llm.config.initializer_range
        sound = self.projector(batch["sound"].to(self.llm.dtype)) + self.queries
        states = self.llm.model(inputs_embeds=torch.cat([sound, embeds], 1)).last_hidden_state
        return self.head(states).mean()


class ByGetter(Speaker):
    def embedded(self, batch: Any) -> Any:
        return self.llm.get_input_embeddings()(batch["ids"])


class ByPath(Speaker):
    def embedded(self, batch: Any) -> Any:
        return self.llm.model.embed_tokens(batch["ids"])


@pytest.mark.parametrize("kind", [ByGetter, ByPath])
def test_what_a_step_uses_after_the_embeddings_and_before_the_layers_runs_before_these(kind: type[Speaker]) -> None:
    module = kind()
    assert position(module, "projector", "llm.model.layers") == (True, False)
    assert position(module, "queries", "llm.model.layers") == (True, False)
    assert position(module, "head", "llm.model.layers") == (False, True)
