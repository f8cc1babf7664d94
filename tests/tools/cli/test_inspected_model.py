"""``mm5d inspect --model`` says what is in any model, without its weights, and names what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaConfig, MixtralConfig

from lightning_mm5d.tools.cli.main import main
from tools.cli.test_main import without_torch

TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}


def written(folder: Path, config: Any, **more: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **more}, default=str))
    return str(folder)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["inspect", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def tries(found: dict[str, Any]) -> dict[tuple[str, str], tuple[bool, str]]:
    return {(one["modality"], one["setting"]): (one["works"], one["text"]) for one in found["tries"]}


def llava(folder: Path) -> str:
    config = LlavaConfig(
        text_config={"model_type": "llama", **TEXT}, vision_config={"model_type": "clip_vision_model", **VISION}
    )
    return written(folder, config, architectures=["LlavaForConditionalGeneration"])


def test_a_folder_shows_modalities_boundaries_layers_plans_and_what_would_not_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, "--model", llava(tmp_path), "--pp=4")
    vision, language = found["parts"]
    assert (found["model"], vision["modality"], language["modality"]) == (
        "LlavaForConditionalGeneration",
        "vision",
        "language",
    )
    assert vision["boundaries"] == ["model.model.get_image_features"]
    assert (language["number"], language["layer"]) == (4, "LlamaDecoderLayer")
    assert vision["parameters"] + language["parameters"] == found["parameters"]
    works = tries(found)
    assert works["language", "tp_size=2"] == (True, "28 layers from the model's tp_plan")
    assert works["language", "pp_size=4"] == (True, "layers [0:1], [1:2], [2:3], [3:4]")
    assert works["vision", "pp_size=4"][0] is False
    assert "no experts" in works["vision", "ep_size=2, dp_size=2"][1]


def test_experts_are_counted_and_an_absent_architecture_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(
        capsys, "--model", written(tmp_path, MixtralConfig(num_local_experts=4, num_key_value_heads=2, **TEXT))
    )
    assert found["model"] == "MixtralForCausalLM"
    assert tries(found)["model", "ep_size=2, dp_size=2"] == (True, "4 experts in 4 layers")


def test_a_layout_is_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = tmp_path / "layout.yaml"
    layout.write_text("modalities: {vision: {}, language: {pp_size: 2}}\n")
    found = said(capsys, "--model", llava(tmp_path), "--config", str(layout))
    assert [(one["rank"], one["modality"]) for one in found["places"]] == [
        (0, "vision"),
        (1, "language"),
        (2, "language"),
    ]
    assert main(["inspect", "--model", str(tmp_path), "--config", str(layout)]) == 0
    text = capsys.readouterr().out
    assert "how, or why not" in text
    assert "language.1" in text


def test_a_module_class_is_named_by_its_import_path(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "--model", "features.toys.Toy")
    assert found["model"] == "Toy"
    assert found["parts"][-1]["layers"] == "decoder.layers"


def test_large_models_take_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = MixtralConfig(num_hidden_layers=8)
    found = said(capsys, "--model", written(tmp_path, wide))
    assert found["parameters"] > 10**10


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", "neither a file nor an import path"),
        ("missing/folder", "no such file or folder"),
        ("{folder}", "cannot be read"),
        ("{folder}/list.json", "has no model_type"),
        ("{folder}/torn.json", "is no JSON"),
        ("{folder}/notes.txt", "no folder, and no config.json"),
    ],
)
def test_nonsense_is_refused_by_name_without_torch(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / "notes.txt").write_text("x")
    given = name.format(folder=tmp_path)
    code, text = without_torch("inspect", "--model", given)
    assert code == 2, text
    assert words in text
    assert given in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nix.Model", "nix cannot be imported"),
        ("torch.nn.Linar", "torch.nn has no Linar. The nearest is torch.nn.Linear"),
        ("torch.nn.Linear", "needs in_features, out_features"),
        ("torch.nn.functional.relu", "a function, and no class of modules"),
        ("json.JSONDecoder", "a JSONDecoder, and no class of modules"),
    ],
)
def test_what_is_no_model_class_is_refused(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--model", name]) == 2
    text = capsys.readouterr().err
    assert words in text
    assert name in text


def test_code_beside_a_configuration_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    fields = {"model_type": "lama", "auto_map": {"AutoModel": "modeling_own.Own", "AutoConfig": "modeling_own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert main(["inspect", "--model", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert "'lama'" in text
    assert "not run" in text
    assert "'llama'" in text
    assert not (tmp_path / "ran").exists()


def test_a_missing_configuration_is_told_of_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 2
    assert "--model" in capsys.readouterr().err
