"""What a rank is told that calls the others once they have ended their run."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lightning_mm5d import Modality, MultimodalStrategy
from ranks import run_ranks


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CallsAlone(Callback):
    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            trainer.strategy.barrier()


def _fit(rank: int) -> Any:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=1,
        strategy=MultimodalStrategy(modalities={"language": Modality()}),
        callbacks=[CallsAlone()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2))
    except RuntimeError as error:
        return error.__notes__
    finally:
        torch.distributed.destroy_process_group()
    return None


def test_a_rank_that_calls_others_after_their_run_is_not_said_to_be_lost() -> None:
    """language: two replicas, ranks 0 and 1"""
    notes, other = run_ranks(2, _fit)
    assert other is None
    assert "barrier in on_fit_end" in notes[-1]
    assert "called a rank that had ended or failed first" in notes[-1]
