"""The strategy reads and writes verified files, unless the trainer was given another plugin."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_mm5d import MultimodalStrategy
from lightning_mm5d.checkpoint.full_file import FullFileIO


def _chosen(*plugins: Any) -> Any:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    return pl.Trainer(strategy=MultimodalStrategy(), plugins=list(plugins), **options).strategy.checkpoint_io


@pytest.mark.filterwarnings("ignore")
def test_a_plugin_of_the_user_takes_the_place_of_verified_files() -> None:
    assert type(_chosen()) is FullFileIO
    own, delayed = TorchCheckpointIO(), AsyncCheckpointIO()
    assert _chosen(own) is own
    assert _chosen(delayed) is delayed
    assert type(delayed.checkpoint_io) is FullFileIO
    inner = AsyncCheckpointIO(own)
    assert _chosen(inner).checkpoint_io is own
    outer = AsyncCheckpointIO(AsyncCheckpointIO())
    assert _chosen(outer) is outer
    assert type(outer.checkpoint_io.checkpoint_io) is FullFileIO
