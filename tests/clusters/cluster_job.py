"""A training script as a user writes it for a cluster; the tests start it by the launchers of clusters.

Vision is on rank 0 and language is a stage on each further rank, or every rank is a replica, or replicas are pipelines
of three ranks or more. Ranks write what they train on: a line of JSON for each step, with the samples and the loss. A
rank kills itself, or its whole node (the process that launched it too), before a step of the first attempt that comes
to it; a file says that it did.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_mm5d import ElasticStrategy, Modality, MultimodalStrategy

SAMPLES, BATCH, EPOCHS = 24, 2, 2
Fault = tuple[int, int, bool]


class Pairs(Dataset[Any]):
    """The number of a sample, an image [6], words [4] and a target."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images, self.words = (
            torch.randn(SAMPLES, 6, generator=generator),
            torch.randn(SAMPLES, 4, generator=generator),
        )

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.images[index], self.words[index], self.words[index].sum()


class Module(L.LightningModule):
    """Images [B, 6] and words [B, 4] -> one number per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.words = nn.Linear(4, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(8, 1)

    def loss(self, batch: Any) -> Tensor:
        _, images, words, targets = batch
        hidden = self.encoder(images) + self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return (self.head(hidden).squeeze(-1) - targets).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Record(L.Callback):
    """Writes each step of this rank to a file of this process, once the step is over."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.began = folder, 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.began = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, _: int
    ) -> None:
        # Lightning's strategy of one process has none
        share = getattr(trainer.strategy, "distributed_sampler_kwargs", {"rank": 0})
        line = {
            "began": self.began,
            "time": time.time(),
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "rank": trainer.global_rank,
            "replica": share["rank"],
            "world": trainer.world_size,
            "samples": batch[0].tolist(),
            "loss": float(trainer.callback_metrics["loss"]),
        }
        with (self.folder / f"steps-{trainer.global_rank}-{os.getpid()}").open("a") as file:
            print(json.dumps(line), file=file)


class Kill(L.Callback):
    """Kills a rank before it takes a step, at the first attempt that comes there.

    Args:
        folder: for the files that say so.
        kills: rank, step, and whether the process that launched the rank is killed too.
    """

    def __init__(self, folder: Path, kills: Sequence[Fault]) -> None:
        self.folder, self.kills = folder, kills

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        for rank, step, node in self.kills:
            fired = self.folder / f"fired-{rank}-{step}"
            if trainer.global_rank == rank and trainer.global_step + 1 == step and not fired.exists():
                fired.touch()
                if node:
                    os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path,
    *,
    devices: int,
    nodes: int,
    kind: str = "stages",
    kills: Sequence[Fault] = (),
    plugins: Any = None,
    memory: int | None = None,
) -> L.Trainer:
    """Train in `folder`, from its last checkpoint where there is one.

    Args:
        folder: for records and checkpoints.
        devices: ranks on each node.
        nodes: how many.
        kind: ``one`` process, ``stages``, ``replicas``, ``pipelines``, ``both``: replicas of vision | language,
            ``zero``: such replicas that share optimizer states of vision and all of language, or ``elastic``: vision |
            language in three stages, or what the planner finds for fewer ranks.
        kills: rank, step, and whether the launcher of that rank is killed too.
        plugins: of the trainer.
        memory: steps between checkpoints in the memory of hosts, in place of those in `folder`.
    """
    (folder / f"process-{os.getpid()}").touch()
    L.seed_everything(7, verbose=False)
    stages = {"vision": Modality(module="encoder"), "language": Modality(pp_size=max(devices * nodes - 1, 1))}
    pipelines = {
        "vision": Modality(module="encoder", colocate_with="language.0"),
        "language": Modality(pipeline={"pipelines": {"min": 3}}),
    }
    both = {"vision": Modality(module="encoder"), "language": Modality()}
    shared = {
        "vision": Modality(module="encoder", sharding={"zero_stage": 1}),
        "language": Modality(sharding={"zero_stage": 3}),
    }
    deep = {"vision": Modality(module="encoder"), "language": Modality(pp_size=3, dp_size=1)}
    checkpoint = {"in_memory_every_n_steps": memory}
    strategies: dict[str, Any] = {
        "one": "auto",
        "stages": MultimodalStrategy(modalities=stages, batching={"num_microbatches": 2}, checkpoint=checkpoint),
        "replicas": MultimodalStrategy(checkpoint=checkpoint),
        "both": MultimodalStrategy(modalities=both, batching={"num_microbatches": 2}, checkpoint=checkpoint),
        "zero": MultimodalStrategy(modalities=shared, batching={"num_microbatches": 2}, checkpoint=checkpoint),
        "elastic": ElasticStrategy(modalities=deep, batching={"num_microbatches": 2}, checkpoint=checkpoint),
        "pipelines": MultimodalStrategy(modalities=pipelines, batching={"num_microbatches": 2 * BATCH}),
    }
    has_replicas = kind in ("replicas", "pipelines", "both", "zero")
    size = 2 * BATCH if kind == "pipelines" else BATCH
    saves = ModelCheckpoint(folder / "saved", every_n_train_steps=2, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=strategies[kind],
        plugins=plugins,
        max_epochs=EPOCHS,
        use_distributed_sampler=has_replicas,  # Lightning's own would shuffle, which one process does not
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Record(folder), Kill(folder, kills), *([saves] if memory is None else [])],
        enable_checkpointing=memory is None,
    )
    data = DataLoader(Pairs(), size, shuffle=has_replicas)
    trainer.fit(Module(), data, ckpt_path="last" if memory is None else None)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--kind", choices=("one", "stages", "replicas", "pipelines", "both", "zero", "elastic"), default="stages"
    )
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--elastic", action="store_true", help="devices and nodes are those that torchrun says")
    parser.add_argument("--kill", type=int, nargs=2, action="append", default=[], metavar=("RANK", "STEP"))
    parser.add_argument("--kill-node", type=int, nargs=2, action="append", default=[], metavar=("RANK", "STEP"))
    parser.add_argument("--memory", type=int, help="steps between checkpoints in memory")
    options = parser.parse_args()
    devices, nodes = options.devices, options.nodes
    if options.elastic:
        devices, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    kills = [(*fault, False) for fault in options.kill] + [(*fault, True) for fault in options.kill_node]
    train(options.folder, devices=devices, nodes=nodes, kind=options.kind, kills=kills, memory=options.memory)


if __name__ == "__main__":
    main()
