"""What ranks trained comes out as Hugging Face loads it, whatever the layout and the form of the checkpoint.

llava: vision: rank 0; language: ranks 1-2, two stages. mixtral: two stages on ranks 0-1.
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

import lightning_mm5d
from export.families import build
from export.test_huggingface_folder import assert_equal, outputs
from lightning_mm5d import Modality
from lightning_mm5d.cli.main import main
from lightning_mm5d.export.exported import export
from parity.harness import fit, strategy
from ranks import run_ranks
from zoo import CASES

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


def train(rank: int, folder: Path, forms: tuple[str, ...]) -> None:
    for form in forms:
        for lora in (False, True):
            module = Tuned(folder / "base", lora)
            chosen = strategy(LLAVA, num_microbatches=2, checkpoint=form)
            path = folder / f"{form}-{'lora' if lora else 'all'}.ckpt"
            fit(module, [CASES["llava"].batch(4)], chosen, 3, callbacks=[Saves(path)])


FORMS = ("full",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("trained")
    build("llava").save_pretrained(made / "base")
    run_ranks(3, train, made, FORMS)
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_trained_models_come_out(folder: Path, tmp_path: Path, form: str) -> None:
    family, base = type(build("llava")), build("llava")
    full = torch.load(folder / "full-all.ckpt", weights_only=True)["state_dict"]
    trained = {name.removeprefix("model."): value for name, value in full.items()}
    assert export(folder / f"{form}-all.ckpt", tmp_path / "all").warnings == []
    loaded = family.from_pretrained(tmp_path / "all").eval()
    assert_equal(loaded.state_dict(), trained)
    base.load_state_dict(trained)
    assert torch.equal(outputs(loaded, "llava"), outputs(base, "llava"))

    assert export(folder / f"{form}-lora.ckpt", tmp_path / "lora").warnings == []
    adapted = Tuned(folder / "base", lora=True).model
    state = torch.load(folder / "full-lora.ckpt", weights_only=True)["state_dict"]
    adapted.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    loaded = PeftModel.from_pretrained(build("llava"), tmp_path / "lora").eval()
    assert torch.equal(outputs(loaded, "llava"), outputs(adapted.eval(), "llava"))


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_of_ranks_are_shown(folder: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(folder / f"{form}-lora.ckpt"), "--verify"]) == 0
    text = capsys.readouterr().out
    for words in (form, "PeftModel", "default", "all checksums hold"):
        assert words in text
