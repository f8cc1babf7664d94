"""Layouts that the adapted tests run in, and Lightning's `BoringModel` in two parts, so that it can be laid out.

Lightning's tests say ``strategy="ddp_spawn", devices=2``. Here they run as two replicas, which is what DDP is, and as
two stages of one replica (vision: rank 0; language: rank 1), with processes forked instead of spawned for speed.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos import boring_classes
from torch import Tensor

from lightning_mm5d import Modality, MultimodalStrategy

REPLICAS = {"replicas": 2, "stages": 1}
in_both_layouts = pytest.mark.parametrize("layout", list(REPLICAS))


class BoringModel(boring_classes.BoringModel):
    """Samples [B, 32] -> [B, 2], through an encoder that can be a modality of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.encoder(x))

    @property
    def replica(self) -> int:
        """Number of the replica that this rank works for; Lightning's tests have the global rank here."""
        kwargs = self.trainer.distributed_sampler_kwargs
        assert kwargs is not None
        return kwargs["rank"]


def strategy(layout: str) -> MultimodalStrategy:
    modalities = {"vision": Modality(module="encoder"), "language": Modality()} if layout == "stages" else None
    return MultimodalStrategy(modalities=modalities, launch={"start_method": "fork", "timeout": timedelta(seconds=60)})


def trainer(layout: str, folder: Path, **options: Any) -> Trainer:
    """Two processes on CPU, nothing shown; `options` as each test of Lightning's gives them."""
    shown: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    if not options.get("fast_dev_run"):
        shown["logger"] = False
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=2,
        strategy=strategy(layout),
        **(shown | options),
    )
