"""Data and a callback that a YAML file names, for ranks that torchrun starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from features.toys import Samples


class Parts(L.LightningDataModule):
    """48 samples in a shuffled order."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(48), batch_size=self.batch_size, shuffle=True)


class Losses(L.Callback):
    """Writes a line for each step: its number, the mean loss of the replicas, and the number of ranks."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            line = trainer.global_step, float(trainer.callback_metrics["train_loss"]), trainer.world_size
            with self._file.open("a") as file:
                print(json.dumps(line), file=file)
