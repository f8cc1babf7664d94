"""Starts the programs of a test, waits for them, and reads what the ranks of `cluster_job` have written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clusters.cluster_job import EPOCHS, SAMPLES, train
from lightning_mm5d.monitor.board import state_of

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("cluster_job.py")
LIMIT_S = 300
SET_BY_OTHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "NODE_RANK",
    "MASTER_",
    "TORCHELASTIC",
    "SLURM_",
    "PL_",
    "OMPI_",
)


@dataclass(frozen=True)
class Ended:
    """What programs ended with, in the order in which they were started, what they printed, and the seconds it took."""

    codes: list[int]
    printed: str
    seconds: float


def clean(**more: str) -> dict[str, str]:
    """The environment of this process without what launchers set, and without a GPU."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(SET_BY_OTHERS)}
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    own = {"PYTHONPATH": path, "PATH": programs, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **own, **more}


def start_all(folder: Path, commands: Sequence[tuple[list[str], Mapping[str, str]]], limit: float = LIMIT_S) -> Ended:
    """Run commands at once, each with variables of its own; kill what is left of them, and of the job in `folder`."""
    begin = time.monotonic()
    processes: list[subprocess.Popen[str]] = []
    try:
        with (folder / "printed").open("w") as output:
            for command, variables in commands:
                environment = clean(**variables)
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        cwd=ROOT,
                        stdout=output,
                        stderr=output,
                        text=True,
                        start_new_session=True,
                    )
                )
        for process in processes:
            process.wait(timeout=max(0.1, limit - (time.monotonic() - begin)))
    except subprocess.TimeoutExpired:
        pytest.fail(f"{command} did not end within {limit:.0f} s:\n" + (folder / "printed").read_text()[-5000:])
    finally:
        seconds = time.monotonic() - begin
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        left = end_job(folder)
    assert not left, "processes of the job are left"
    return Ended([process.returncode for process in processes], (folder / "printed").read_text(), seconds)


def end_job(folder: Path) -> list[int]:
    """Kill processes of a job that do not end within some seconds, and return their numbers."""
    numbers = [int(path.name.split("-")[1]) for path in folder.glob("process-*")]
    end = time.monotonic() + 5

    def left() -> list[int]:
        return [number for number in numbers if state_of(number) != "gone"]

    while left() and time.monotonic() < end:
        time.sleep(0.05)
    found = left()
    for number in found:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    return found


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the steps of all processes."""
    return [json.loads(line) for path in folder.glob("steps-*") for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The steps of plain Lightning on one process, by number."""
    folder = tmp_path_factory.mktemp("one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(folder, devices=1, nodes=1, kind="one")
    return {line["step"]: line for line in records(folder)}


def check_losses(folder: Path, one: Mapping[int, Mapping[str, Any]], world: int) -> None:
    """Check that each rank has taken each step, with the samples and the loss of one process."""
    lines = records(folder)
    assert {(line["rank"], line["step"]) for line in lines} == {(rank, step) for rank in range(world) for step in one}
    for line in lines:
        assert line["world"] == world
        assert line["samples"] == one[line["step"]]["samples"]
        assert line["loss"] == pytest.approx(one[line["step"]]["loss"], rel=1e-5), line


@dataclass(frozen=True)
class Trained:
    """What attempts of a job trained on.

    Args:
        worlds: number of ranks of each attempt.
        steps: lines of the steps that no restart undid, one for each replica; by step, then by replica.
    """

    worlds: list[int]
    steps: list[list[dict[str, Any]]]


def check_samples(folder: Path) -> Trained:
    """Check that each epoch has trained on each sample once, in steps that no restart undid.

    Steps of an attempt after the one that the next attempt went on from are undone. All ranks of a replica train on the
    same samples.
    """
    attempts: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in sorted(records(folder), key=lambda line: line["time"]):
        attempts.setdefault((line["began"], line["world"]), []).append(line)
    ordered = list(attempts.values())
    kept: list[dict[str, Any]] = []
    for attempt in ordered:
        kept = [line for line in kept if line["step"] <= attempt[0]["began"]] + attempt
    steps: dict[int, dict[int, dict[str, Any]]] = {}
    for line in kept:
        first = steps.setdefault(line["step"], {}).setdefault(line["replica"], line)
        assert (line["samples"], line["loss"]) == (first["samples"], first["loss"]), (line, first)
    found = [[replicas[replica] for replica in sorted(replicas)] for _, replicas in sorted(steps.items())]
    for epoch in range(EPOCHS):
        trained = Counter(
            sample for step in found for line in step if line["epoch"] == epoch for sample in line["samples"]
        )
        assert trained == Counter(range(SAMPLES)), (epoch, found)
    return Trained([attempt[0]["world"] for attempt in ordered], found)
