"""Three processes of Open MPI's mpirun train as one process does, and a killed one ends them with the first cause."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clusters.started import JOB, Ended, check_losses, one_process, records, start_all

__all__ = ["one_process"]


def has_open_mpi() -> bool:
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        return False
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in said.stdout


pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not has_open_mpi(), reason="needs Open MPI's mpirun, and mpi4py"),
]


def mpirun(folder: Path, *options: str) -> Ended:
    """vision: rank 0; language: ranks 1-2"""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    job = [sys.executable, str(JOB), str(folder), "--devices", "3", *options]
    return start_all(folder, [(["mpirun", *root, "--oversubscribe", "-n", "3", *job], {})])


def test_three_processes_of_mpi_train_as_one_process_does(
    one_process: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    ended = mpirun(tmp_path)
    assert ended.codes == [0], ended.printed
    check_losses(tmp_path, one_process, 3)


def test_a_killed_process_of_mpi_ends_the_job_which_a_second_start_completes(
    one_process: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    ended = mpirun(tmp_path, "--kill", "1", "5")
    assert ended.codes[0] != 0
    assert "RankLostError: rank 1" in ended.printed
    assert time.time() - (tmp_path / "fired-1-5").stat().st_mtime < 30
    again = mpirun(tmp_path, "--kill", "1", "5")
    assert again.codes == [0], again.printed
    assert {line["began"] for line in records(tmp_path)} == {0, 4}
    check_losses(tmp_path, one_process, 3)
