"""Train the captioner of the quickstart on a cluster: what the job scripts of this folder start on every rank.

A replica of the model takes one rank for vision and `--language-stages` ranks for language; further ranks are further
replicas. Devices and nodes are options, or what torchrun says. The run goes on from the last checkpoint in `--folder`,
so the same command starts a job and starts it again.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_mm5d import Modality, MultimodalStrategy

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from module import Captioner, bars


def loader(prepared: Path | None) -> DataLoader[tuple[Tensor, ...]]:
    """The samples that files of a folder hold, or those that are drawn here."""
    if prepared is None:
        return bars(samples=128, batch_size=16)
    parts = [torch.load(path, weights_only=True) for path in sorted(prepared.glob("*.pt"))]
    return DataLoader(TensorDataset(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))), batch_size=16)


def train(
    folder: Path,
    *,
    devices: int,
    nodes: int,
    language_stages: int,
    epochs: int,
    prepared: Path | None = None,
    plugins: Any = None,
) -> L.Trainer:
    """Train for `epochs` epochs and keep checkpoints in `folder`, which all nodes share."""
    L.seed_everything(1, verbose=False)
    modalities = {"vision": Modality(module="encoder"), "language": Modality(pp_size=language_stages)}
    trainer = L.Trainer(
        devices=devices,
        num_nodes=nodes,
        strategy=MultimodalStrategy(modalities=modalities, batching={"num_microbatches": 4}),
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=4, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        plugins=plugins,
    )
    trainer.fit(Captioner(), loader(prepared), ckpt_path="last")
    if trainer.is_global_zero:
        loss = float(trainer.callback_metrics["loss"])
        print(f"ranks {trainer.world_size}: loss {loss:.6f} after {trainer.global_step} steps")
    return trainer


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description="Train a captioner on a cluster.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; seen by all nodes")
    parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), help="of a node")
    parser.add_argument("--nodes", type=int, default=int(os.environ.get("GROUP_WORLD_SIZE", 1)))
    parser.add_argument("--language-stages", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    train(**vars(options))


if __name__ == "__main__":
    main()
