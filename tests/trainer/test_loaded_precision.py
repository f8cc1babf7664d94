"""Weights that a run loads are those that were saved, in the precision of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mm5d import MultimodalStrategy


class Net(L.LightningModule):
    """Built in float32, as modules are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reads(L.Callback):
    """Wants weights before the strategy's setup, as an average of weights does, and notes them when training begins."""

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Nothing."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.weight = module.layer.weight.detach().clone()


@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_weights_of_64_bits_are_not_rounded(checkpoint: Literal["full", "sharded"], tmp_path: Path) -> None:
    def fit(steps: int, path: Path | None = None) -> tuple[L.Trainer, Reads]:
        reads = Reads()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=MultimodalStrategy(checkpoint=checkpoint),
            precision="64-true",
            max_steps=steps,
            callbacks=[reads],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.rand(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        trainer.fit(Net(), DataLoader(data, 2), ckpt_path=path)
        return trainer, reads

    trainer, _ = fit(2)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = trainer.lightning_module.state_dict()["layer.weight"]
    assert not torch.equal(saved, saved.float().double())
    assert torch.equal(fit(3, tmp_path / "saved.ckpt")[1].weight, saved)
