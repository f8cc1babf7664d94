"""A checkpoint that a trainer saved comes out as a folder, whole or not at all; what cannot is refused in one line."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from ctranslate2 import Generator
from ctranslate2.converters import TransformersConverter
from torch import nn
from transformers import PreTrainedTokenizerFast

from export.families import build
from export.test_huggingface_folder import assert_equal, outputs
from lightning_mm5d import CheckpointCorruptError, CheckpointUntrustedError, Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.export.exported import export, open_checkpoint
from lightning_mm5d.tools.cli.main import main
from parity.harness import strategy


class Tuned(L.LightningModule):
    """A student that is trained, a teacher of the same family, and a tokenizer."""

    def __init__(self, family: str = "llama_tied", teacher: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.student = build(family)
        if teacher:
            self.teacher = build(family)
        self.scale = nn.Parameter(torch.ones(()))
        self.tokenizer = tokenizer()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=0.01)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")


def saved(module: L.LightningModule, path: Path, own: bool = True) -> Path:
    """Save a module through a trainer, with our strategy or without."""
    options: dict[str, Any] = {"strategy": strategy({"language": Modality()})} if own else {}
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, barebones=False, **options
    )
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.save_checkpoint(path)
    return path


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return {name.removeprefix("student."): value for name, value in state.items() if name.startswith("student.")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(Tuned(), tmp_path_factory.mktemp("saved") / "one.ckpt")


def test_a_checkpoint_comes_out_with_its_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    module = Tuned()
    done = export(checkpoint, tmp_path / "new" / "folder")
    assert done.warnings == []
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= done.files.keys()
    loaded = type(module.student).from_pretrained(done.path)
    assert_equal(loaded.state_dict(), weights_of(checkpoint))
    assert torch.equal(outputs(loaded.eval(), "llama_tied"), outputs(module.student, "llama_tied"))
    assert PreTrainedTokenizerFast.from_pretrained(done.path)("b a")["input_ids"] == [1, 0]
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["folder"]


def test_an_inference_engine_loads_the_folder(tmp_path: Path) -> None:
    module, tokens = Tuned(), [3, 1, 2, 5]
    module.tokenizer.add_special_tokens({"bos_token": "a", "eos_token": "b"})
    done = export(saved(module, tmp_path / "one.ckpt"), tmp_path / "folder")
    TransformersConverter(str(done.path)).convert(str(tmp_path / "engine"))
    served = torch.tensor(np.array(Generator(str(tmp_path / "engine")).forward_batch([tokens])))
    torch.testing.assert_close(served, module.student(torch.tensor([tokens])).logits, rtol=1e-4, atol=1e-5)


def test_the_command_prints_what_it_wrote(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--dtype", "bfloat16", "--max-shard-size=20KB"]) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM is in" in text
    assert "model.safetensors.index.json" in text
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "It exists already, and nothing is overwritten" in capsys.readouterr().err


def test_one_of_several_models_is_chosen(tmp_path: Path) -> None:
    path = saved(Tuned(teacher=True), tmp_path / "two.ckpt")
    with pytest.raises(ConfigError, match=r"several models: student \(LlamaForCausalLM\), teacher"):
        export(path, tmp_path / "out")
    with pytest.raises(ConfigError, match="Did you mean 'teacher'"):
        export(path, tmp_path / "out", module="teachr")
    assert not (tmp_path / "out").exists()
    assert export(path, tmp_path / "out", module="teacher").name == "LlamaForCausalLM"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in torch.compile
def test_compiled_models_come_out_without_the_compiler(tmp_path: Path) -> None:
    module = Tuned()
    module.student = torch.compile(module.student)
    done = export(saved(module, tmp_path / "compiled.ckpt"), tmp_path / "out", module="student")
    loaded = type(build("llama_tied")).from_pretrained(done.path)
    assert_equal(loaded.state_dict(), build("llama_tied").state_dict())


def test_a_model_that_is_held_twice_comes_out_once(tmp_path: Path) -> None:
    module = Tuned()
    module.decoder = module.student.model  # a part under a name of its own
    done = export(saved(module, tmp_path / "twice.ckpt"), tmp_path / "out")
    loaded = type(module.student).from_pretrained(done.path)
    assert_equal(loaded.state_dict(), module.student.state_dict())


def test_checkpoints_of_plain_lightning_take_a_configuration(tmp_path: Path) -> None:
    path = saved(Tuned(teacher=True), tmp_path / "plain.ckpt", own=False)
    with pytest.raises(ConfigError, match=r"Name the model's config.json with --config"):
        export(path, tmp_path / "out")
    model = build("llama_tied")
    model.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"at 'student', 'teacher'. Choose one with --module"):
        export(path, tmp_path / "out", config=tmp_path / "base")
    done = export(path, tmp_path / "out", config=tmp_path / "base", module="student")
    assert "tokenizer.json" in done.files
    assert_equal(type(model).from_pretrained(done.path).state_dict(), model.state_dict())
    config = json.loads((tmp_path / "base" / "config.json").read_text()) | {"vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="from_pretrained could not load it"):
        export(path, tmp_path / "wrong", config=tmp_path / "config.json", module="student")
    assert not (tmp_path / "wrong").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    torch.save({"weights": 1}, tmp_path / "other")
    for name, words in {
        "text": "neither an archive nor a pickle",
        "other": "It has no state_dict",
        "gone": "no such file",
    }.items():
        for command in (
            ["export", str(tmp_path / name), str(tmp_path / "out")],
            ["checkpoint", "show", str(tmp_path / name)],
        ):
            assert main(command) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert words in line
    assert not (tmp_path / "out").exists()


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_code_in_a_checkpoint_does_not_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = torch.load(checkpoint, weights_only=True) | {"payload": Payload()}
    torch.save(content, tmp_path / "bad.ckpt")
    with pytest.raises(CheckpointUntrustedError, match="mkdir"):
        export(tmp_path / "bad.ckpt", tmp_path / "out")
    assert main(["checkpoint", "show", "bad.ckpt"]) == 2
    text = capsys.readouterr().err
    assert "mkdir" in text
    assert "--unsafe" in text
    assert not (tmp_path / "ran").exists()
    assert main(["export", "bad.ckpt", "out", "--unsafe"]) == 0
    assert (tmp_path / "ran").exists()


def test_damaged_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.ckpt"
    whole = bytearray(checkpoint.read_bytes())
    with zipfile.ZipFile(checkpoint) as file:
        place = file.getinfo(next(name for name in file.namelist() if name.endswith("data/3"))).header_offset + 200
    whole[place] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckpointCorruptError, match=r"data/3' differs"):
        export(path, tmp_path / "out")
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises((CheckpointCorruptError, ConfigError), match="it is truncated"):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_record_cannot_write_outside_of_the_folder(checkpoint: Path, tmp_path: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    record = json.loads(content["lightning_mm5d"]["huggingface"])
    for name in ("../escaped", str(tmp_path / "escaped"), "a/../../escaped"):
        record["processors"] = [{"path": "x", "class": "X", "files": {name: "eJwDAAAAAAE="}}]
        content["lightning_mm5d"]["huggingface"] = json.dumps(record)
        torch.save(content, tmp_path / "bad.ckpt")
        with pytest.raises(CheckpointCorruptError, match="leads elsewhere"):
            export(tmp_path / "bad.ckpt", tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["bad.ckpt"]
    content["lightning_mm5d"]["huggingface"] = json.dumps({"version": 1, "models": [{"path": "student"}]})
    torch.save(content, tmp_path / "bad.ckpt")
    with pytest.raises(CheckpointCorruptError, match="record"):
        export(tmp_path / "bad.ckpt", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float"}, "Did you mean 'float"),
        ({"max_shard_size": "5 bananas"}, "Write for instance 5GB"),
        ({"max_shard_size": "0GB"}, "Write for instance 5GB"),
        ({"config": Path("nowhere")}, "There is no such file"),
    ],
)
def test_options_are_checked(checkpoint: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        export(checkpoint, tmp_path / "out", **options)


def test_a_folder_that_cannot_be_written_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ConfigError, match=r"exists already|cannot be written"):
            export(checkpoint, place)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_show_prints_steps_sizes_and_models(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(checkpoint), "--verify"]) == 0
    text = capsys.readouterr().out
    for words in ("full, one file", "all checksums hold", "LlamaForCausalLM", "tokenizer (", "step", "weights"):
        assert words in text


def test_a_model_that_cannot_be_described_is_saved_all_the_same(tmp_path: Path) -> None:
    module = Tuned()
    module.student.config.own = object()  # no JSON
    path = saved(module, tmp_path / "odd.ckpt")
    with pytest.raises(ConfigError, match="could not be described when the checkpoint was saved: TypeError"):
        export(path, tmp_path / "out")
    build("llama_tied").save_pretrained(tmp_path / "base")
    done = export(path, tmp_path / "out", config=tmp_path / "base", module="student")
    config = json.loads((done.path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    "record", ["{", "[]", '{"version": 1}', '{"version": 1, "models": [1], "processors": [], "same": []}']
)
def test_damaged_records_are_refused(checkpoint: Path, tmp_path: Path, record: str) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["lightning_mm5d"]["huggingface"] = record
    torch.save(content, tmp_path / "bad.ckpt")
    for command in (["export", str(tmp_path / "out")], ["export", str(tmp_path / "out"), "--format=lightning"]):
        assert main([command[0], str(tmp_path / "bad.ckpt"), *command[1:]]) == 2
    assert main(["checkpoint", "show", str(tmp_path / "bad.ckpt")]) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["bad.ckpt"]


def test_files_of_plain_torch_are_opened(tmp_path: Path) -> None:
    state = {"layer.weight": torch.arange(6.0).view(2, 3)}
    training = {"model": state, "average": {"layer.weight": torch.zeros(2, 3)}, "epoch": 3}
    for content in (state, {"weights": state, "epoch": 3}, training):
        torch.save(content, tmp_path / "plain.pt")
        source = open_checkpoint(tmp_path / "plain.pt").source
        assert source.names() == ["layer.weight"]
        assert torch.equal(source.read("layer.weight"), state["layer.weight"])
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ConfigError, match="It has no state_dict"):
        open_checkpoint(tmp_path / "list.pt")
