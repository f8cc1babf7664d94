"""The same script, started in every way in which a Lightning script is started, trains to the same losses and weights.

Every start is a real one: `job.py` runs in processes of its own, two ranks of one replica (vision: rank 0; language:
rank 1), each under a limit of wall-clock time. SLURM and clusters of one's own are stood in for by what they are to
Lightning: processes started from outside, told their places by environment variables.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightning_mm5d.trainer.process_group import free_port

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
LIMIT_S = 240
SET_BY_OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_RANK", "MASTER_", "TORCHELASTIC", "SLURM_", "PL_")
STEPS = 12

Start = tuple[list[str], dict[str, str]]  # a command and the environment variables that it adds


@dataclass(frozen=True)
class Ran:
    """What one run left: losses by rank, the weights, exit codes of what the test started, and what was printed."""

    losses: dict[int, list[float]]
    weights: dict[str, list[float]]
    codes: list[int]
    printed: str
    processes: int


def run(folder: Path, starts: Sequence[Start]) -> Ran:
    """Run all `starts` at once and wait for them; whatever is left of them after the limit is killed, and fails."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(SET_BY_OTHERS)}
    clean |= {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    processes = []
    with (folder / "printed").open("w") as output:
        for command, extra in starts:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command], env=clean | extra, stdout=output, stderr=output, start_new_session=True
                )
            )
        end = time.monotonic() + LIMIT_S
        try:
            codes = [process.wait(timeout=max(0.1, end - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return found(folder, codes, (folder / "printed").read_text())


def found(folder: Path, codes: list[int], printed: str = "") -> Ran:
    """What a run has left in its folder."""
    losses = {int(path.name.split("-")[1]): path.read_text().split() for path in folder.glob("losses-*")}
    weights = folder / "weights"
    return Ran(
        losses={rank: [float(loss) for loss in lines] for rank, lines in losses.items()},
        weights=json.loads(weights.read_text()) if weights.exists() else {},
        codes=codes,
        printed=printed,
        processes=len(list(folder.glob("started-*"))),
    )


def job(folder: Path, *options: str) -> list[str]:
    return [str(HERE / "job.py"), str(folder), *options]


def by_lightning(folder: Path) -> list[Start]:
    return [(job(folder), {})]


def by_fork(folder: Path) -> list[Start]:
    return [(job(folder, "--start", "fork"), {})]


def by_spawn(folder: Path) -> list[Start]:
    return [(job(folder, "--start", "spawn"), {})]


def by_torchrun(folder: Path) -> list[Start]:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    return [([*torchrun, *job(folder)], {})]


def by_slurm(folder: Path) -> list[Start]:
    port = str(free_port())
    return [
        (
            job(folder),
            {
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NAME": "train",
                "SLURM_NTASKS": "2",
                "SLURM_NTASKS_PER_NODE": "2",
                "SLURM_NNODES": "1",
                "SLURM_NODELIST": "127.0.0.1",
                "SLURM_NODEID": "0",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]


def by_a_cluster_of_two_nodes(folder: Path) -> list[Start]:
    """One rank on each node; as under Ray, the trainer is not told how many nodes there are."""
    port = str(free_port())
    return [
        (
            job(folder, "--elsewhere", "--devices", "1"),
            {
                "JOB_WORLD_SIZE": "2",
                "JOB_RANK": str(rank),
                "JOB_LOCAL_RANK": "0",
                "JOB_NODE": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", job(folder, "--start", "none", "--devices", "1"))
        runpy.run_path(sys.argv[0], run_name="__main__")
    ran = found(folder, [0])
    assert len(ran.losses[0]) == STEPS
    return ran


# how it is started -> how many times the script runs from its top
STARTS: list[tuple[Callable[[Path], list[Start]], int]] = [
    (by_lightning, 2),
    (by_fork, 1),
    (by_spawn, 1),
    (by_torchrun, 2),
    (by_slurm, 2),
    (by_a_cluster_of_two_nodes, 2),
]


@pytest.mark.parametrize(
    ("start", "processes"),
    [pytest.param(*case, id=case[0].__name__) for case in STARTS],
)
def test_however_it_is_started_it_trains_as_one_process_does(
    start: Callable[[Path], list[Start]], processes: int, one_process: Ran, tmp_path: Path
) -> None:
    """vision: rank 0; language: rank 1"""
    ran = run(tmp_path, start(tmp_path))
    assert set(ran.codes) == {0}, ran.printed
    assert ran.processes == processes
    assert set(ran.losses) == {0, 1}
    for losses in ran.losses.values():
        assert losses == pytest.approx(one_process.losses[0], rel=1e-5)
    assert ran.weights.keys() == one_process.weights.keys()
    for name, weights in ran.weights.items():
        assert weights == pytest.approx(one_process.weights[name], rel=1e-4, abs=1e-6), name
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert {name: weight.flatten().tolist() for name, weight in saved["state_dict"].items()} == ran.weights
    # a process that only waited for others has no optimizer
    states = [len(state["state"]) for state in saved["optimizer_states"]]
    assert states == ([len(ran.weights)] if processes == 2 else [])


def test_a_wrong_configuration_is_printed_once_and_starts_no_children(tmp_path: Path) -> None:
    ran = run(tmp_path, [(job(tmp_path, "--devices", "1"), {})])
    assert ran.codes == [1]
    assert ran.processes == 1
    assert ran.printed.count("lightning_mm5d.config.errors.ConfigError: ") == 1
    assert "Trainer(devices=..., num_nodes=...): got 1." in ran.printed
    assert ran.losses == {}
