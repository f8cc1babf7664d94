"""Adapters of PEFT come out as `PeftModel.save_pretrained` writes them, and load onto their base model."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file
from torch import nn

from export.families import Wrapped, build
from export.test_huggingface_folder import assert_equal, outputs
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.export.huggingface_folder import ModelTensors, write_adapter
from lightning_mm5d.features.huggingface_record import describe
from lightning_mm5d.storage.files import StateDictSource

# peft asks for a name that transformers is about to drop
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]
TARGETS = ["q_proj", "v_proj"]
CONFIGS = {
    "plain": LoraConfig(r=4, target_modules=TARGETS),
    "for a task": LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "with trained heads": LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "by magnitude": LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "of embeddings": LoraConfig(r=4, target_modules=["embed_tokens"]),
}


def randomised(model: nn.Module) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def written(module: nn.Module, folder: Path, name: str = "default") -> list[str]:
    folder.mkdir(parents=True)
    record = json.loads(json.dumps(describe(module)))
    (model,) = record["models"]
    return write_adapter(
        folder, model, name, ModelTensors.of(StateDictSource(module.state_dict()), record, model), dtype=None
    )


@pytest.mark.parametrize(("kind", "family"), [*((kind, "llama") for kind in CONFIGS), ("plain", "llava")])
def test_adapters_are_those_of_peft(kind: str, family: str, tmp_path: Path) -> None:
    base = build(family)
    model = randomised(get_peft_model(copy.deepcopy(base), copy.deepcopy(CONFIGS[kind])))
    assert written(Wrapped(model), tmp_path / "own") == []
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path / "theirs")
    own, theirs = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("own", "theirs"))
    assert_equal(own, theirs)
    configs = [json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("own", "theirs")]
    for config in configs:
        config["target_modules"].sort()  # a set
    assert configs[0] == configs[1]
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "own").eval()
    assert torch.equal(outputs(loaded, family), outputs(model, family))
    assert not torch.equal(outputs(loaded, family), outputs(base, family))


def test_adapters_inside_of_a_transformers_model_come_out_too(tmp_path: Path) -> None:
    base = build("llama")
    model = inject_adapter_in_model(LoraConfig(r=4, target_modules=TARGETS), copy.deepcopy(base), "mine")
    randomised(model)
    written(Wrapped(model), tmp_path / "own", "mine")
    loaded = PeftModel.from_pretrained(base, tmp_path / "own").eval()
    assert torch.equal(outputs(loaded, "llama"), outputs(model, "llama"))


def test_what_was_trained_outside_of_the_adapter_is_named(tmp_path: Path) -> None:
    model = get_peft_model(build("llama"), LoraConfig(r=4, target_modules=TARGETS))
    model.base_model.model.lm_head.weight.requires_grad_(True)
    (warning,) = written(Wrapped(model), tmp_path / "own")
    assert "base_model.model.lm_head.weight" in warning
    biased = get_peft_model(build("llava"), LoraConfig(r=4, target_modules=TARGETS, bias="lora_only"))
    (warning,) = written(Wrapped(biased), tmp_path / "biased")  # peft leaves those of its base layers out itself
    assert "base_layer.bias" in warning


def test_adapters_that_need_the_model_are_refused(tmp_path: Path) -> None:
    model = get_peft_model(build("llama"), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ConfigError, match="PROMPT_TUNING"):
        written(Wrapped(model), tmp_path / "own")
