"""A training script as a user writes it; the tests start it in every way in which such a script is started.

Its arguments choose what the trainer and the strategy are given. Every rank writes the loss of every step to a file,
and whichever process has rank 0 when `fit` returns writes the weights that it then holds; a checkpoint is saved too.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mm5d import Modality, MultimodalStrategy


class Elsewhere(LightningEnvironment):
    """Processes, their number and their ranks are somebody else's, as under Ray."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return int(os.environ["JOB_WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["JOB_RANK"])

    def local_rank(self) -> int:
        return int(os.environ["JOB_LOCAL_RANK"])

    def node_rank(self) -> int:
        return int(os.environ["JOB_NODE"])

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass


class Module(L.LightningModule):
    """Images [B, 6] and words [B, 4] -> one number per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.words = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def setup(self, stage: str) -> None:
        assert self.trainer.estimated_stepping_batches == 12  # also before the strategy's own setup

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, words, targets = batch
        hidden = self.encoder(images) + self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        loss = (self.head(hidden).squeeze(-1) - targets).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class KeepLosses(L.Callback):
    """Writes the logged loss of every step on every rank to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        with (self.folder / f"losses-{trainer.global_rank}").open("a") as file:
            print(float(trainer.callback_metrics["loss"]), file=file)


def strategy(start: str, one_process: bool) -> Any:
    if one_process:
        return "auto"
    return MultimodalStrategy(
        modalities={"vision": Modality(module="encoder"), "language": Modality()},
        batching={"num_microbatches": 2},
        launch={"start_method": start},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start", default="popen")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--elsewhere", action="store_true")
    options = parser.parse_args()
    (options.folder / f"started-{os.getpid()}").touch()
    L.seed_everything(7, verbose=False)
    module = Module()
    data = TensorDataset(torch.randn(24, 6), torch.randn(24, 4), torch.randn(24))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.nodes,
        strategy=strategy(options.start, options.start == "none"),
        plugins=[Elsewhere()] if options.elsewhere else None,
        max_epochs=2,
        use_distributed_sampler=False,  # Lightning's own would shuffle, which one process does not
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[KeepLosses(options.folder)],
    )
    trainer.fit(module, DataLoader(data, batch_size=4))
    trainer.save_checkpoint(options.folder / "saved.ckpt")
    if trainer.global_rank == 0:
        weights = {name: weight.flatten().tolist() for name, weight in module.state_dict().items()}
        (options.folder / "weights").write_text(json.dumps(weights))


if __name__ == "__main__":
    main()
