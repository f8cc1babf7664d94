"""A process that has trained alone, as in a notebook's cell, then forks ranks, and trains alone again.

This file is also the script that does so: a run of its own keeps groups and forks out of pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_mm5d import MultimodalStrategy

SET_BY_OTHERS = ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT", "MASTER_ADDR")


def trainer(devices: int, strategy: MultimodalStrategy, **options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, **options)


def main() -> None:
    """The script: replicas of 1, 2 and 1 ranks, each of which says how many it has met."""
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    for devices in (1, 2, 1):
        launch: dict[str, Any] = {"start_method": "fork" if devices > 1 else "popen"}
        run = trainer(devices, MultimodalStrategy(launch=launch), fast_dev_run=1, **quiet)
        run.fit(Counting())


class Counting(BoringModel):
    def on_train_end(self) -> None:
        met = int(self.trainer.strategy.reduce(torch.ones(()), reduce_op="sum"))
        sys.stdout.write(f"ranks: {met}\n")  # at once: `print` writes the end of a line by itself


def test_ranks_forked_after_a_run_of_one_process_meet_each_other(tmp_path: Path) -> None:
    """all ranks: replicas"""
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    clean = {key: value for key, value in os.environ.items() if key not in SET_BY_OTHERS} | paths
    ran = subprocess.run(
        [sys.executable, "-u", __file__],
        env=clean,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if line.startswith("ranks")] == [
        *("ranks: 1", "ranks: 2", "ranks: 2", "ranks: 1")
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_notebook_takes_the_strategy_as_it_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    assert trainer(1, MultimodalStrategy()).world_size == 1
    with pytest.raises(MisconfigurationException, match="interactive"):
        trainer(2, MultimodalStrategy())


if __name__ == "__main__":
    main()
