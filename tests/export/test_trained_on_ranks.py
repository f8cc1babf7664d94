"""What ranks trained comes out as Hugging Face loads it, whatever the layout and the form of the checkpoint.

vision: rank 0; language: ranks 1-2, two stages.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_mm5d
from export.families import build
from export.test_huggingface_folder import assert_equal, outputs
from lightning_mm5d import Modality
from lightning_mm5d.checkpoint.full_file import load_full
from lightning_mm5d.export.exported import export
from lightning_mm5d.tools.cli.main import main
from parity.harness import fit, strategy
from ranks import run_ranks
from zoo import CASES

# peft asks for a name that transformers is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
LLAVA = {"vision": Modality(), "language": Modality(pp_size=2)}


class Tuned(L.LightningModule):
    """A model that ranks build in parts, or one with an adapter."""

    def __init__(self, folder: Path, lora: bool = False) -> None:
        super().__init__()
        self.folder = folder
        self.model: Any = None
        if lora:
            model = build("llava").train()
            self.model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    def configure_model(self) -> None:
        if self.model is None:
            family = type(build("llava"))
            self.model = lightning_mm5d.from_pretrained(family, self.folder)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.01)


class Saves(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def train(rank: int, folder: Path) -> None:
    for form, name in (("full", "all"), ("sharded", "all"), ("sharded", "lora")):
        module = Tuned(folder / "base", name == "lora")
        chosen = strategy(LLAVA, num_microbatches=2, checkpoint=form)
        fit(module, [CASES["llava"].batch(4)], chosen, 3, callbacks=[Saves(folder / f"{form}-{name}.ckpt")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("trained")
    build("llava").save_pretrained(made / "base")
    run_ranks(3, train, made)
    yield made
    shutil.rmtree(made)


def trained(path: Path) -> dict[str, Any]:
    """The model's weights in a full checkpoint."""
    state = load_full(path)["state_dict"]
    return {name.removeprefix("model."): value for name, value in state.items()}


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_trained_models_come_out(folder: Path, tmp_path: Path, form: str) -> None:
    weights, base = trained(folder / "full-all.ckpt"), build("llava")
    assert export(folder / f"{form}-all.ckpt", tmp_path / "all").warnings == []
    loaded = type(base).from_pretrained(tmp_path / "all").eval()
    assert_equal(loaded.state_dict(), weights)
    assert not torch.equal(outputs(loaded, "llava"), outputs(base, "llava"))
    base.load_state_dict(weights)
    assert torch.equal(outputs(loaded, "llava"), outputs(base, "llava"))


def test_trained_adapters_come_out(folder: Path, tmp_path: Path) -> None:
    path = folder / "sharded-lora.ckpt"
    assert export(path, tmp_path / "lora").warnings == []
    export(path, tmp_path / "plain.ckpt", format="lightning")
    expected = Tuned(folder / "base", lora=True).model.eval()
    expected.load_state_dict(trained(tmp_path / "plain.ckpt"))
    loaded = PeftModel.from_pretrained(build("llava"), tmp_path / "lora").eval()
    assert torch.equal(outputs(loaded, "llava"), outputs(expected, "llava"))
    assert not torch.equal(outputs(loaded, "llava"), outputs(build("llava"), "llava"))


@pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and modes
def test_a_sharded_checkpoint_comes_out_as_the_full_one(folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(folder / "sharded-all.ckpt"), str(tmp_path / "one.ckpt"), "--format=lightning"]) == 0
    full, found = load_full(folder / "full-all.ckpt"), load_full(tmp_path / "one.ckpt")
    assert_same(found["state_dict"], dict(full["state_dict"]))
    assert_same(found["optimizer_states"], full["optimizer_states"])
    assert {name: found[name] for name in ("epoch", "global_step", "loops")} == {
        name: full[name] for name in ("epoch", "global_step", "loops")
    }
    module = Tuned(folder / "base")
    L.Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False).fit(
        module, DataLoader([CASES["llava"].batch(4)], batch_size=None), ckpt_path=tmp_path / "one.ckpt"
    )
    assert module.trainer.global_step == 2


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple):
        for value, another in zip(one, other, strict=True):
            assert_same(value, another)
    else:
        assert torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, Tensor) else one == other


def test_checkpoints_of_ranks_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(folder / "sharded-lora.ckpt"), "--verify"]) == 0
    text = capsys.readouterr().out
    for word in ("sharded, version", "PeftModel", "default", "all checksums hold", "AdamW", "rank-00002.safetensors"):
        assert word in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith("language"))
    assert row == ["language", "1", "1", "1", "2"]
    assert main(["checkpoint", "show", str(folder / "full-all.ckpt")]) == 0
    assert "LlavaForConditionalGeneration" in capsys.readouterr().out


def test_damaged_shards_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = shutil.copytree(folder / "sharded-all.ckpt", tmp_path / "damaged.ckpt")
    file = damaged / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    assert main(["export", str(damaged), str(tmp_path / "out"), "--format=lightning"]) == 2
    assert main(["checkpoint", "show", str(damaged), "--verify"]) == 2
    assert capsys.readouterr().err.count("rank-00001.safetensors") == 2
    (damaged / "rank-00002.safetensors").unlink()
    for command in (["export", str(damaged), str(tmp_path / "out")], ["checkpoint", "show", str(damaged)]):
        assert main(command) == 2
        assert "rank-00002.safetensors" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["damaged.ckpt"]
