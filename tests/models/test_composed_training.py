"""Composed models in a trainer on ranks: built from a saved whole, generating, saved, gone on with, and exported.

vision: rank 0; audio: rank 1; language: ranks 2-3, two stages.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

import lightning_mm5d
from lightning_mm5d import Modality, MultimodalModel
from lightning_mm5d.checkpoint.full_file import load_full
from lightning_mm5d.tools.cli.main import main
from parity.harness import Batches, strategy
from ranks import run_ranks

from .composed import Composed, batch, build

PARTS = {"vision": Modality(), "audio": Modality(), "language": Modality(pp_size=2)}
COUNTS = {"vision": [1, 0, 2, 0], "audio": [0, 1, 1, 0]}


class FromFolder(Composed):
    """Reads a saved composed model, each rank its own weights."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None)
        self.folder = folder

    def configure_model(self) -> None:
        if self.model is None:
            self.model = lightning_mm5d.from_pretrained(MultimodalModel, self.folder).train()


def _fit(folder: Path, chosen: Any, devices: int, epochs: int, resume: Path | None, save: Path) -> Any:
    module = FromFolder(folder / "whole")
    model = MultimodalModel.from_pretrained(folder / "whole")
    data = Batches([batch(model, COUNTS, seed=step) for step in range(2)])
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=chosen, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, max_epochs=epochs, num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )  # fmt: skip
    loader = DataLoader(data, batch_size=None)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module, loader, loader, ckpt_path=resume)
    trainer.save_checkpoint(save)
    return [tokens.clone() for tokens in module.generated]


def train(rank: int, folder: Path) -> list[list[torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    first = _fit(folder, strategy(PARTS, num_microbatches=2), 4, 1, None, folder / "one.ckpt")
    return [first, _fit(folder, strategy(PARTS, num_microbatches=2), 4, 2, folder / "one.ckpt", folder / "two.ckpt")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Any], list[Any]]]:
    folder = tmp_path_factory.mktemp("composed")
    torch.set_default_dtype(torch.float64)
    build("two").model.save_pretrained(folder / "whole")
    ranks = run_ranks(4, train, folder)
    alone = [_fit(folder, "auto", 1, 2, None, folder / "alone.ckpt")]
    torch.set_default_dtype(torch.float32)
    yield folder, ranks, alone
    shutil.rmtree(folder)


def test_ranks_generate_what_one_process_does(runs: Any) -> None:
    _, ranks, (alone,) = runs
    for first, second in ranks:
        for found, wanted in zip([*first, *second], alone, strict=True):
            assert torch.equal(found, wanted)


def test_a_run_that_goes_on_ends_as_one_process_does(runs: Any) -> None:
    folder, _, _ = runs
    found, wanted = load_full(folder / "two.ckpt")["state_dict"], load_full(folder / "alone.ckpt")["state_dict"]
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.usefixtures("float64")
def test_a_checkpoint_is_exported_as_a_composed_model(runs: Any, tmp_path: Path) -> None:
    folder, _, _ = runs
    assert main(["export", str(folder / "two.ckpt"), str(tmp_path / "out")]) == 0
    loaded = MultimodalModel.from_pretrained(tmp_path / "out", dtype=torch.float64)
    state = load_full(folder / "two.ckpt")["state_dict"]
    assert {f"model.{name}" for name in loaded.state_dict()} == set(state)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[f"model.{name}"]), name
