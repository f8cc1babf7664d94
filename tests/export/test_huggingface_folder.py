"""Exported folders are those of `save_pretrained`, tensor by tensor, and load with the logits of the trained model."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from export.families import FAMILIES, Wrapped, build
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.export.huggingface_folder import ModelTensors, write_model
from lightning_mm5d.features.huggingface_record import describe
from lightning_mm5d.storage.files import StateDictSource
from zoo import CASES

FAST = ("llama_tied", "gpt2", "bert", "t5", "whisper", "llava", "gemma3", "internvl", "qwen2_5_vl", "mixtral")
EVERYTHING = 10**12


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def written(module: nn.Module, folder: Path, size: int = EVERYTHING, dtype: torch.dtype | None = None) -> list[str]:
    """Export the only model of a module from its own state dict."""
    folder.mkdir(parents=True)
    record = json.loads(json.dumps(describe(module)))
    (model,) = record["models"]
    tensors = ModelTensors.of(StateDictSource(module.state_dict()), record, model)
    return write_model(folder, model, tensors, max_shard_size=size, dtype=dtype)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def outputs(model: Any, name: str) -> Tensor:
    """The logits of a zoo model for its own batch."""
    batch = CASES[name].batch(2)
    with torch.no_grad():
        result = model(**batch)
    return result.logits if "logits" in result else result.logits_per_image


def check(name: str, folder: Path) -> None:
    model = build(name)
    for kind in ("made", "loaded"):
        own, theirs = folder / kind / "own", folder / kind / "theirs"
        assert written(Wrapped(model), own) == []
        model.save_pretrained(theirs)
        assert_equal(weights(own), weights(theirs))
        for file in theirs.glob("*.json"):
            assert json.loads((own / file.name).read_text()) == json.loads(file.read_text()), file.name
        loaded = type(model).from_pretrained(own)
        assert_equal(loaded.state_dict(), model.state_dict())
        if name in CASES:
            assert torch.equal(outputs(loaded.eval(), name), outputs(model, name))
        model = loaded  # a loaded model is saved with the conversions of its files


@pytest.mark.parametrize("name", FAST)
def test_folders_are_those_of_save_pretrained(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted({*FAMILIES} - {*FAST}))
def test_more_folders_are_those_of_save_pretrained(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def test_files_are_divided_by_size(tmp_path: Path) -> None:
    model = build("llama")
    written(Wrapped(model), tmp_path / "own", size=30_000)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=30_000)
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == names
    assert len(names) > 4
    for name in names:
        own, theirs = tmp_path / "own" / name, tmp_path / "theirs" / name
        if name.endswith(".json"):
            assert json.loads(own.read_text()) == json.loads(theirs.read_text())
        else:
            assert_equal(load_file(own), load_file(theirs))


def test_no_more_than_one_group_of_tensors_is_alive(tmp_path: Path) -> None:
    module = Wrapped(build("mixtral"))
    record = describe(module)
    (model,) = record["models"]
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Counted(StateDictSource):
        def read(self, name: str, region: Any = None) -> Tensor:
            nonlocal most
            value = super().read(name, region).clone()
            alive.append(weakref.ref(value))
            most = max(most, sum(each() is not None for each in alive))
            return value

    tensors = ModelTensors.of(Counted(module.state_dict()), record, model)
    write_model(tmp_path, model, tensors, max_shard_size=20_000, dtype=None)
    assert len(alive) == len(model["names"])
    assert most == 1  # each conversion of Mixtral takes one tensor


def test_another_dtype_is_written_and_configured(tmp_path: Path) -> None:
    model = build("llava")
    written(Wrapped(model), tmp_path / "own", dtype=torch.bfloat16)
    loaded = type(model).from_pretrained(tmp_path / "own")
    assert {value.dtype for value in loaded.state_dict().values() if value.is_floating_point()} == {torch.bfloat16}
    assert_equal(loaded.state_dict(), model.to(torch.bfloat16).state_dict())


def test_mixed_dtypes_are_warned_of(tmp_path: Path) -> None:
    model = build("llama")
    model.lm_head.to(torch.float64)
    (warning,) = written(Wrapped(model), tmp_path / "own")
    assert "float64 besides float32" in warning


def test_a_model_with_code_of_its_own_keeps_its_names(tmp_path: Path) -> None:
    from transformers import PretrainedConfig, PreTrainedModel

    class Own(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.head = nn.Linear(3, 2)
            self.post_init()

    model = Own(PretrainedConfig())
    (warning,) = written(Wrapped(model), tmp_path / "own")
    assert "own code" in warning
    assert_equal(Own.from_pretrained(tmp_path / "own").state_dict(), model.state_dict())


def test_a_subclass_of_a_family_loads_as_the_family(tmp_path: Path) -> None:
    from transformers import MixtralForCausalLM

    class Own(MixtralForCausalLM):
        pass

    model = Own(build("mixtral").config)
    written(Wrapped(model), tmp_path / "own")
    assert_equal(MixtralForCausalLM.from_pretrained(tmp_path / "own").state_dict(), model.state_dict())


def test_weights_tied_by_the_user_alone_are_written_under_both_names(tmp_path: Path) -> None:
    model = build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight  # the configuration does not tie them
    written(Wrapped(model), tmp_path / "own")
    assert_equal(type(model).from_pretrained(tmp_path / "own").state_dict(), model.state_dict())


def test_a_vocabulary_resized_in_training_is_written_in_its_size(tmp_path: Path) -> None:
    model = build("llama_tied")
    model.resize_token_embeddings(model.config.vocab_size + 5, pad_to_multiple_of=8, mean_resizing=False)
    written(Wrapped(model), tmp_path / "own")
    assert_equal(type(model).from_pretrained(tmp_path / "own").state_dict(), model.state_dict())


def test_shapes_that_the_configuration_does_not_know_are_refused(tmp_path: Path) -> None:
    model = build("llama")
    model.lm_head = nn.Linear(model.config.hidden_size, 7, bias=False)
    with pytest.raises(ConfigError, match=r"lm_head\.weight.*from_pretrained could not load"):
        written(Wrapped(model), tmp_path / "own")


def test_a_head_of_other_names_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ConfigError, match=r"has 'lm_head\.weight', which from_pretrained would draw anew"):
        written(Wrapped(model), tmp_path / "own")


def test_missing_and_left_over_tensors_are_refused(tmp_path: Path) -> None:
    module = Wrapped(build("llama"))
    record = describe(module)
    (model,) = record["models"]
    state = module.state_dict()
    value = state.pop("model.lm_head.weight")
    with pytest.raises(ConfigError, match=r"lacks 'lm_head\.weight'"):
        write_model(
            tmp_path, model, ModelTensors.of(StateDictSource(state), record, model), max_shard_size=1, dtype=None
        )
    state |= {"model.lm_head.weight": value, "model.lm_head.bias": value[0]}
    with pytest.raises(ConfigError, match=r"has no 'lm_head\.bias'"):
        write_model(
            tmp_path, model, ModelTensors.of(StateDictSource(state), record, model), max_shard_size=1, dtype=None
        )


def test_tied_weights_are_found_under_any_of_their_names(tmp_path: Path) -> None:
    module = Wrapped(build("llama_tied"))
    record = describe(module)
    (model,) = record["models"]
    state = module.state_dict()
    del state["model.model.embed_tokens.weight"]
    tensors = ModelTensors.of(StateDictSource(state), record, model)
    write_model(tmp_path, model, tensors, max_shard_size=EVERYTHING, dtype=None)
    assert_equal(type(module.model).from_pretrained(tmp_path).state_dict(), module.model.state_dict())


def test_classes_come_from_transformers_alone(tmp_path: Path) -> None:
    module = Wrapped(build("llama"))
    record = describe(module)
    (model,) = record["models"]
    tensors = ModelTensors.of(StateDictSource(module.state_dict()), record, model)
    for name in ("os.system", "transformers.models.llama.modeling_llama.os", "transformers.models.no.modeling_no.No"):
        with pytest.raises(ConfigError, match="Classes come from transformers by name"):
            write_model(tmp_path, model | {"class": name}, tensors, max_shard_size=EVERYTHING, dtype=None)


def test_transformers_notes_the_conversions_of_a_loaded_model(tmp_path: Path) -> None:
    model = build("mixtral")
    assert "_weight_conversions" not in vars(model)
    model.save_pretrained(tmp_path)
    assert len(vars(type(model).from_pretrained(tmp_path))["_weight_conversions"]) > 1
