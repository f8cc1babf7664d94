"""Which ranks count as lost, by what the operating system and the notice board say of them."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop

from lightning_mm5d.config.errors import RankLostError
from lightning_mm5d.monitor.losses import LAUNCHED_BY, Losses
from lightning_mm5d.monitor.monitor import Monitor
from lightning_mm5d.monitor.processes import machine
from lightning_mm5d.monitor.stack import PHASES
from lightning_mm5d.trainer.guard import first_cause
from lightning_mm5d.trainer.turns import Turns


def board(**entries: dict[str, Any]) -> Any:
    """A board of run 2 with the entries of ``rank0`` and so on."""
    known = {int(name[-1]): {"pid": os.getpid(), "machine": machine(), **entry} for name, entry in entries.items()}
    now = time.monotonic()
    return SimpleNamespace(run=2, entries=known, heard=dict.fromkeys(known, now), synced=now, error=None)


@pytest.fixture(scope="module")
def ended() -> Any:
    """A process that has ended with exit code 0."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process


RUNNING = {"state": "running", "run": 2, "where": "setup", "phase": ""}


def test_a_child_that_ends_well_before_it_met_the_others_is_lost(ended: Any) -> None:
    losses = Losses(0, lambda: {1: ended})
    for known in (None, board(rank0=RUNNING)):
        found = losses.find(known, patient=True)
        assert found is not None
        assert found["line"].endswith("its process ended with exit code 0 before it met the other ranks")
    assert losses.find(board(), patient=True) is None, "entries were never fetched"
    assert losses.find(board(rank0=RUNNING, rank1={**RUNNING, "state": "ended"}), patient=True) is None


def test_a_rank_whose_script_ended_after_an_earlier_run_is_lost(ended: Any) -> None:
    earlier = {**RUNNING, "state": "ended", "run": 1}
    losses = Losses(0, dict)
    found = losses.find(board(rank0=RUNNING, rank1={**earlier, "pid": ended.pid}), patient=True)
    assert found is not None
    assert found["line"].startswith("rank 1 (setup) failed first: its process ended after an earlier run")
    assert losses.find(board(rank0=RUNNING, rank1=earlier), patient=True) is None, "it may begin this run later"


def test_a_rank_without_a_store_sees_that_its_launching_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(variable: str, rank: int) -> str | None:
        monkeypatch.setenv(LAUNCHED_BY, variable)
        cause = Losses(rank, dict).find(None, patient=True)
        return cause and cause["line"]

    assert found(f"{os.getppid()} 0", 1) is None
    assert found(f"{os.getpid()} 0", 1) == "rank 0 failed first: its process is gone"
    assert found(f"{os.getpid()} 0", 0) is None, "the variable was inherited by a job inside of a rank"
    assert found("", 1) is None


def test_an_error_in_a_handler_does_not_hide_the_first_cause() -> None:
    def failing_handler(error: Exception) -> BaseException:
        later = RuntimeError("connection closed")
        later.__context__ = error
        return later

    noted = ValueError("boom")
    noted.add_note("rank 1 (setup) failed first: ValueError: boom")
    assert first_cause(failing_handler(noted)) == "rank 1 (setup) failed first: ValueError: boom"
    assert first_cause(failing_handler(RankLostError("rank 2"))) == "RankLostError: rank 2"
    assert first_cause(failing_handler(KeyError())) is None


def test_the_parts_of_lightnings_loops_have_the_names_by_which_stacks_are_read() -> None:
    owners = {owner.__name__: owner for owner in (Trainer, Turns, _EvaluationLoop, _FitLoop)}
    for name in PHASES:
        owner, _, method = name.partition(".")
        assert inspect.unwrap(vars(owners[owner])[method]).__code__.co_qualname == name


def waits() -> None:
    time.sleep(60)


def fails_and_waits(printed: Path, ended: Any) -> None:
    """Body of a rank whose handler of its own error waits for a rank that is lost."""
    os.dup2(os.open(printed, os.O_CREAT | os.O_WRONLY), 2)
    monitor = Monitor(
        1,
        3,
        60,
        blocking={waits.__code__: "a collective"},
        position=dict,
        wake=lambda error: None,
        children=lambda: {2: ended},
        report=lambda cause: None,
    )
    monitor.start()
    try:
        raise ValueError("boom")
    except ValueError as error:
        monitor.leave(error)
        waits()


@pytest.mark.processes
def test_a_rank_that_is_ended_in_a_handler_prints_its_own_error_first(tmp_path: Path, ended: Any) -> None:
    process = get_context("fork").Process(target=fails_and_waits, args=(tmp_path / "printed", ended))
    process.start()
    process.join(40)
    process.kill()
    printed = (tmp_path / "printed").read_text()
    assert process.exitcode == 1
    assert printed.index("Traceback") < printed.index("ValueError: boom") < printed.index("RankLostError: rank 2")
