"""A training script under torchrun --max-restarts: one rank is killed in the midst of an epoch at the first attempt.

Arguments: a folder, the step before which rank 1 is killed (0: never), and how checkpoints are saved.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_mm5d import MultimodalStrategy


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index)) + torch.rand(4) + random.random()


class Module(L.LightningModule):
    def __init__(self, killed_before: int) -> None:
        super().__init__()
        self.killed_before = killed_before
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch / 24).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and self.global_rank == 1 and self.global_step + 1 == self.killed_before:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(folder: Path, killed_before: int, checkpoint: Literal["full", "sharded"]) -> tuple[L.Trainer, Module]:
    L.seed_everything(3)
    module = Module(killed_before)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MultimodalStrategy(checkpoint=checkpoint),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder / "saved", every_n_train_steps=2, save_last=True)],
    )
    trainer.fit(module, DataLoader(Noisy(), 3, shuffle=True), ckpt_path="last")
    return trainer, module


if __name__ == "__main__":
    place = Path(sys.argv[1])
    trained, found = train(place, int(sys.argv[2]), "sharded" if sys.argv[3] == "sharded" else "full")
    if trained.is_global_zero:
        torch.save([trained.global_step, dict(found.state_dict())], place / "weights.pt")
