"""A job whose rank is killed starts again under torchrun --max-restarts, and ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from launching.restarted_job import train
from lightning_mm5d.trainer.process_group import free_port
from ranks import run_ranks

JOB = Path(__file__).parent / "restarted_job.py"


def run(folder: Path, killed_before: int, checkpoint: str, limit: float = 150) -> tuple[list[Any], str]:
    """Two replicas on ranks 0-1; returns the number of steps and the weights, and what was printed."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    port = ["--master-port", str(free_port())]
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, *torchrun, *port, str(JOB), str(folder), str(killed_before), checkpoint],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=limit)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed
    return torch.load(folder / "weights.pt", weights_only=True), printed


def whole(rank: int, folder: Path) -> Any:
    """The uninterrupted run."""
    warnings.simplefilter("ignore")
    trainer, module = train(folder, 0, "full")
    return [trainer.global_step, dict(module.state_dict())]


def check(folder: Path, killed_before: int, checkpoint: str) -> None:
    expected = run_ranks(2, whole, folder / "whole")[0]
    found, printed = run(folder / "killed", killed_before, checkpoint)
    assert "Restored all states" in printed
    assert found[0] == expected[0] == 8
    assert all(torch.equal(found[1][name], weight) for name, weight in expected[1].items())


@pytest.mark.exhaustive
def test_a_killed_rank_costs_no_more_than_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    check(tmp_path, 6, "full")


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
@pytest.mark.parametrize("killed_before", range(1, 9))
def test_a_rank_is_killed_at_any_step(killed_before: int, checkpoint: str, tmp_path: Path) -> None:
    check(tmp_path, killed_before, checkpoint)
