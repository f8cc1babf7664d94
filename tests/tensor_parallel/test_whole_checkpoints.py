"""What tensor parallel ranks save is what one process would have, and any layout goes on from it.

The model is a Falcon in float64 with one table for both ends of the vocabulary. Its queries, keys and values are one
projection: on 2 ranks each has one of the two key and value heads, on 3 ranks two share one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from features.toys import Layout, Run, alone, assert_same, figures, outcomes, together, weights
from lightning_mm5d import Modality

VOCABULARY = 17  # does not divide by the ranks, nor do the heads


class Language(L.LightningModule):
    """AdamW in groups with clipping, and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import FalconConfig, FalconForCausalLM

        config = FalconConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_kv_heads=2,
            new_decoder_architecture=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            bias=True,
            use_cache=False,
            tie_word_embeddings=True,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = FalconForCausalLM(config)
            for parameter in self.model.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
        self.double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["tokens"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [p for name, p in named if "dense" in name], "weight_decay": 0.1},
            {"params": [p for name, p in named if "dense" not in name], "lr": 0.003},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def language(world: int, replicas: int = 1, **fields: int) -> Layout:
    return Layout({"language": Modality(**fields)}, world, replicas)


LAYOUTS = {
    "tp 2": language(2, tp_size=2),
    "tp 2 x pp 2": language(4, tp_size=2, pp_size=2),
    "tp 2 x dp 2": language(4, 2, tp_size=2, dp_size=2),
    "tp 3": language(3, tp_size=3),
    "pp 2": language(2, pp_size=2),
}


def fit(run: Run, epochs: int, name: str = "", ckpt_path: Any = None) -> dict[str, Any]:
    """Train for epochs of two steps; the weights are those of the module afterwards."""
    module = Language()
    saver = ModelCheckpoint(run.folder / (name or "unused"), save_last=True)
    trainer = run.trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[saver], gradient_clip_val=0.5)
    trainer.fit(module, run.training(), run.loader(8), ckpt_path=ckpt_path)
    return {"weights": weights(module), "metrics": figures(trainer), "steps": trainer.global_step}


def uninterrupted(run: Run) -> Any:
    return fit(run, 4)


def half(run: Run) -> Any:
    return fit(run, 2, "half")


def after_the_end(run: Run) -> Any:
    """A trainer that has ended saves, and the module of its ranks is trained and evaluated by others."""
    module = Language()
    trainer = run.trainer(max_epochs=1)
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "after.ckpt")
    kept = {name: parameter for name, parameter in module.named_parameters()}
    validated = run.trainer().validate(module, run.loader(8), verbose=False)
    run.trainer(max_epochs=1).fit(module, run.training())
    same = all(parameter is kept[name] for name, parameter in module.named_parameters())
    return {"validated": validated, "weights": weights(module), "same": same, "names": [*kept]}


def evaluated(run: Run) -> Any:
    path = run.folder / "half/last.ckpt"
    plain = Language.load_from_checkpoint(path, weights_only=True)
    return weights(plain), run.trainer().validate(Language(), run.loader(8), ckpt_path=path, verbose=False)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of one process that stopped halfway, and what it has where it does not."""
    folder = tmp_path_factory.mktemp("one")
    alone(half, folder)
    return folder, alone(uninterrupted, folder)


@pytest.mark.parametrize("layout", ["tp 2", "tp 2 x pp 2", "tp 2 x dp 2"])
def test_the_file_is_that_of_one_process_which_goes_on_from_it(layout: str, one: Any, tmp_path: Path) -> None:
    folder, expected = one
    for rank in together(LAYOUTS[layout], half, tmp_path):
        assert rank["steps"] == 4
    found, wanted = (torch.load(path / "half/last.ckpt", weights_only=True) for path in (tmp_path, folder))
    assert list(found["state_dict"]) == list(wanted["state_dict"])
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert_same(found[key], wanted[key], where=key)
    assert sorted(found) == sorted(wanted)

    def resume(run: Run) -> Any:
        return fit(run, 4, ckpt_path=tmp_path / "half/last.ckpt")

    assert_same(alone(resume, tmp_path), expected)


@pytest.mark.parametrize("layout", ["tp 2 x dp 2", "tp 3", "pp 2"])
def test_other_layouts_go_on_from_it(layout: str, one: Any, tmp_path: Path) -> None:
    """From the file of two tensor parallel ranks."""
    together(LAYOUTS["tp 2"], half, tmp_path)

    def resume(run: Run) -> Any:
        return fit(run, 4, ckpt_path=tmp_path / "half/last.ckpt")

    ranks = together(LAYOUTS[layout], resume, tmp_path)
    assert_same(ranks[0]["weights"], one[1]["weights"])
    for rank in ranks:
        assert_same(rank["metrics"], one[1]["metrics"])
        assert rank["steps"] == 8


@pytest.mark.parametrize("layout", ["tp 2 x pp 2", "tp 3"])
def test_the_module_is_whole_after_the_end(layout: str, tmp_path: Path) -> None:
    got = outcomes(LAYOUTS[layout], after_the_end, folder=tmp_path)["after_the_end"]
    files = (torch.load(tmp_path / name / "after.ckpt", weights_only=True) for name in ("one", "ranks"))
    expected, found = files
    assert_same(found["state_dict"], expected["state_dict"])
    assert_same(found["optimizer_states"], expected["optimizer_states"])
    assert_same(got.ranks[0], got.one)
    for rank in got.ranks:
        assert_same(rank["validated"], got.one["validated"])
        assert {name: value.shape for name, value in rank["weights"].items()} == {
            name: value.shape for name, value in got.one["weights"].items()
        }


def test_the_file_loads_into_a_plain_module_and_into_an_evaluation(one: Any, tmp_path: Path) -> None:
    """language: ranks 0-1, tensor parallel."""
    got = outcomes(LAYOUTS["tp 2"], half, evaluated, folder=tmp_path)["evaluated"]
    for rank in got.ranks:
        assert_same(rank, got.one)


def refused(run: Run) -> str:
    try:
        run.trainer().validate(Language(), run.loader(8), ckpt_path=run.folder / "changed.ckpt", verbose=False)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_every_rank_refuses_tensors_of_other_shapes(one: Any, tmp_path: Path) -> None:
    """One that has the shape of a part as well. language: ranks 0-1, tensor parallel."""
    checkpoint = torch.load(one[0] / "half/last.ckpt", weights_only=True)
    name = "model.transformer.h.0.mlp.dense_h_to_4h.weight"
    weight = checkpoint["state_dict"][name]
    checkpoint["state_dict"][name] = weight[: len(weight) // 2]
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    for error in together(LAYOUTS["tp 2"], refused, tmp_path):
        assert "size mismatch" in error
        assert name in error
