"""Trains a module, under the strategy or on one process, and records its losses and gradients."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler

import nccl_order
from lightning_mm5d import MultimodalStrategy


class Recorder(Callback):
    """Keeps the loss of every step, and every gradient before every optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(
            {
                name: p.grad.detach().to("cpu", copy=True)
                for name, p in pl_module.named_parameters(remove_duplicate=False)
                if p.grad is not None
            }
        )


class Batches(torch.utils.data.Dataset):
    """Samples of batches given whole: item i is batch i."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def fit(
    module: L.LightningModule,
    batches: list[Any],
    strategy: Any = "auto",
    devices: int = 1,
    accelerator: Any = "cpu",
    **options: Any,
) -> Recorder:
    """Train `module` on `batches`, one a step and (with `in_order`) replica, and return what was recorded."""
    recorder = Recorder()
    callbacks, ckpt_path = [recorder, *options.pop("callbacks", [])], options.pop("ckpt_path", None)
    data, sampler = Batches(batches), None
    if options.pop("in_order", False):  # placed on the replicas by the strategy
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=devices,
            strategy=strategy,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
            **{"max_epochs": 1, "enable_checkpointing": False, "use_distributed_sampler": False, **options},
        )
        trainer.fit(module, DataLoader(data, batch_size=None, sampler=sampler), ckpt_path=ckpt_path)
    return recorder


def strategy(modalities: Any, **options: Any) -> MultimodalStrategy:
    """The strategy of a test; the environment variable ``TEST_BACKEND`` names one of `nccl_order`."""
    if backend := os.environ.get("TEST_BACKEND"):
        nccl_order.register()
        options.setdefault("process_group_backend", backend)
    return MultimodalStrategy(modalities=modalities, launch={"timeout": timedelta(seconds=180)}, **options)
