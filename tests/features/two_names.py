"""A script of a project that imports both names of Lightning, in the order that a test says.

``run FIRST TRAINER START FOLDER`` trains a module, data and callbacks of either package. ``refused`` imports both
before lightning_mm5d, and prints one line for each object of `pytorch_lightning` that the strategy meets.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

warnings.simplefilter("ignore")
for name in [sys.argv[2], "lightning_mm5d"] if sys.argv[1] == "run" else ["pytorch_lightning", "lightning.pytorch"]:
    importlib.import_module(name)

import lightning.pytorch as new  # noqa: E402
import pytorch_lightning as old  # noqa: E402
import torch  # noqa: E402
from pytorch_lightning.callbacks import EarlyStopping  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_mm5d import ConfigError, Modality, MultimodalStrategy  # noqa: E402

torch.set_num_threads(1)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(old.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.eye, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    def loss(self, batch: Tensor) -> Tensor:
        return self.head(self.eye(batch)).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(new.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(8, 2), batch_size=2)

    val_dataloader = train_dataloader


class Counts(old.Callback):  # type: ignore[misc, name-defined]
    steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def on_train_end(self, trainer: Any, module: Any) -> None:
        assert self.steps == trainer.global_step > 0


def run(trainer_of: str, start_method: str, folder: str) -> None:
    strategy: Any = "mm5d"
    if start_method != "name":
        modalities = {"vision": Modality(module="eye"), "language": Modality()}
        strategy = MultimodalStrategy(modalities, launch={"start_method": start_method})  # type: ignore[arg-type]
    trainer = sys.modules[trainer_of].Trainer(
        devices=2,
        strategy=strategy,
        max_epochs=2,
        default_root_dir=folder,
        callbacks=[EarlyStopping("val_loss"), new.callbacks.ModelCheckpoint(filename="last"), Counts()],
        **QUIET,
    )
    module = Module()
    trainer.fit(module, datamodule=Data())
    trainer.validate(module, datamodule=Data(), verbose=False)
    Module.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, weights_only=True)
    print("trained and read again", flush=True)


def refused() -> None:
    def fit(module: Any, *data: Any, **options: Any) -> None:
        trainer = new.Trainer(devices=1, strategy=MultimodalStrategy(), max_epochs=1, **QUIET, **options)
        trainer.fit(module, *data)

    class New(new.LightningModule):
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

    calls: list[Callable[[], Any]] = [
        lambda: old.Trainer(devices=1, strategy=MultimodalStrategy(), **QUIET),
        lambda: old.Trainer(devices=1, strategy="mm5d", **QUIET),
        lambda: fit(Module()),
        lambda: fit(New(), callbacks=[Counts()]),
        lambda: fit(New(), old.LightningDataModule()),
    ]
    for call in calls:
        try:
            call()
        except ConfigError as error:
            print(error)
    assert not torch.distributed.is_initialized()
    assert old.Trainer(devices=1, strategy="ddp", **QUIET).world_size == 1  # runs as before


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[3:])
    else:
        refused()
