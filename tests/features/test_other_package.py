"""Projects that import pytorch_lightning are told in one sentence what to change, wherever the two packages meet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer import trainer as trainer_module
from torch.utils.data import DataLoader

from lightning_mm5d import ConfigError, MultimodalStrategy
from lightning_mm5d.cli.main import main
from lightning_mm5d.config.errors import private
from lightning_mm5d.trainer.other_package import _UNWRAP

pl = pytest.importorskip("pytorch_lightning")
CHANGE = "import lightning.pytorch as pl"
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


def made(package: Any) -> Any:
    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

        def train_dataloader(self) -> Any:
            return DataLoader(torch.ones(4, 2))

    return Module()


def fit(module: Any, *data: Any, **options: Any) -> None:
    L.Trainer(strategy=MultimodalStrategy(), **QUIET, **options).fit(module, *data)


CASES: dict[str, Callable[[], Any]] = {
    "a trainer": lambda: pl.Trainer(strategy=MultimodalStrategy(), **QUIET),
    "a trainer that is given the name": lambda: pl.Trainer(strategy="mm5d", **QUIET),
    "a module": lambda: fit(made(pl)),
    "a callback": lambda: fit(made(L.pytorch), callbacks=[pl.callbacks.EarlyStopping("loss")]),
    "a datamodule": lambda: fit(made(L.pytorch), pl.LightningDataModule()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_what_is_of_the_other_package_is_refused_with_what_to_change(case: str) -> None:
    with pytest.raises(ConfigError, match=CHANGE):
        CASES[case]()
    assert not torch.distributed.is_initialized()


def test_the_trainer_has_the_function_that_looks_at_modules_first() -> None:
    assert callable(private(trainer_module, _UNWRAP))


def test_other_trainers_of_that_package_run_as_before() -> None:
    assert pl.Trainer(strategy="ddp", **QUIET).world_size == 1


MODULE = """
import pytorch_lightning as pl


class Old(pl.LightningModule):
    pass
"""
SCRIPT = "from pytorch_lightning.cli import LightningCLI\nLightningCLI()\n"
CONFIG = "trainer: {accelerator: cpu, devices: 1, strategy: {class_path: lightning_mm5d.MultimodalStrategy}}\n"


@pytest.mark.parametrize("kind", ["class path", "script"])
def test_the_command_refuses_it_likewise(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old_module.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(SCRIPT)
    model = "model: {class_path: old_module.Old}\n" if kind == "class path" else ""
    (tmp_path / "config.yaml").write_text(CONFIG + model)
    options = ["--script", str(tmp_path / "train.py")] if kind == "script" else []
    assert main(["inspect", str(tmp_path / "config.yaml"), *options]) == 2
    assert CHANGE in capsys.readouterr().err
    sys.modules.pop("old_module", None)
