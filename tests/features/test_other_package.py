"""Projects that import pytorch_lightning train as they are; a process with two Lightnings is told what to change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer import trainer as trainer_module
from torch.utils.data import DataLoader

from lightning_mm5d import MultimodalStrategy
from lightning_mm5d.config.errors import private
from lightning_mm5d.trainer.validation import _UNWRAP

pl = pytest.importorskip("pytorch_lightning")  # after lightning_mm5d, as isort has it
TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def environment_as_found() -> Iterator[None]:
    """Lightning names the port of a run in the environment, which scripts that are started later would take."""
    with mock.patch.dict(os.environ):
        for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        yield


class Old(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, 2))


@pytest.mark.filterwarnings("ignore")
def test_both_names_are_one_package_and_a_module_of_either_trains() -> None:
    assert pl.Trainer is L.Trainer
    import pytorch_lightning.callbacks.finetuning as finetuning  # a module of its own, imported by either name

    assert sys.modules["lightning.pytorch.callbacks.finetuning"] is finetuning
    assert finetuning.__spec__ is not None
    assert finetuning.__spec__.name == finetuning.__name__
    for package in (pl, L):
        trainer = package.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=MultimodalStrategy(),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Old())
        assert trainer.global_step == 4


def script(*arguments: str) -> str:
    command = [sys.executable, str(TESTS / "features/two_names.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "trainer", "start_method"),
    [
        ("pytorch_lightning", "pytorch_lightning", "popen"),
        pytest.param("pytorch_lightning", "lightning.pytorch", "fork", marks=pytest.mark.exhaustive),
        pytest.param("pytorch_lightning", "pytorch_lightning", "spawn", marks=pytest.mark.exhaustive),
        pytest.param("lightning.pytorch", "pytorch_lightning", "name", marks=pytest.mark.exhaustive),
        pytest.param("lightning_mm5d", "pytorch_lightning", "fork", marks=pytest.mark.exhaustive),
    ],
)
def test_trainers_modules_data_and_callbacks_of_either_package_run_together(
    first: str, trainer: str, start_method: str, tmp_path: Path
) -> None:
    """vision: rank 0; language: rank 1; by name two replicas"""
    assert "trained and read again" in script("run", first, trainer, start_method, str(tmp_path))


def test_where_both_were_imported_before_the_other_one_is_refused_with_what_to_change() -> None:
    said = [line for line in script("refused").splitlines() if "two packages" in line]
    assert len(said) == 5
    assert all("import lightning.pytorch as pl" in line and "above both of them" in line for line in said), said


def test_the_trainer_has_the_function_that_looks_at_modules_first() -> None:
    assert callable(private(trainer_module, _UNWRAP))
