"""Which ranks count as lost, by what the operating system and the notice board say of them."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop

from lightning_mm5d.config.errors import CheckpointCorruptError, RankLostError, repeated
from lightning_mm5d.monitor.board import Board, machine
from lightning_mm5d.monitor.monitor import Monitor
from lightning_mm5d.monitor.stack import PHASES
from lightning_mm5d.monitor.verdict import LAUNCHED_BY, SILENT_S, STOPPED_S, Losses
from lightning_mm5d.trainer.guard import first_cause
from lightning_mm5d.trainer.turns import Turns


def board(**entries: dict[str, Any]) -> Any:
    """A board of run 2 with the entries of ``rank0`` and so on."""
    known = {int(name[-1]): {"pid": os.getpid(), "machine": machine(), **entry} for name, entry in entries.items()}
    now = time.monotonic()
    return SimpleNamespace(
        run=2, entries=known, heard=dict.fromkeys(known, now), synced=now, error=None, is_current=True
    )


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
    assert losses.find(board(rank0=RUNNING, rank1={**RUNNING, "state": "ended"}), patient=True) is None


def test_a_store_of_which_nothing_is_known_may_be_slow_at_the_start() -> None:
    losses = Losses(1, dict)
    slow, gone = board(rank1=RUNNING), board(rank1=RUNNING)
    slow.synced -= STOPPED_S + 1
    gone.synced -= SILENT_S + 1
    assert losses.find(slow, patient=True) is None
    for known, patient in ((slow, False), (gone, True)):
        found = losses.find(known, patient=patient)
        assert found is not None
        assert found["line"] == "rank 0 failed first: the store of the ranks no longer answers"


def test_a_rank_that_came_after_the_last_look_has_met_the_others(ended: Any) -> None:
    """A look at the start sees rank 0 alone; rank 1 comes, trains and ends."""
    store = dist.HashStore()
    own = Board(store, 0, 2, host=True)
    try:
        own.start({**RUNNING, "told": False, "pid": os.getpid(), "machine": machine()})
        own.post({**RUNNING, "told": False, "pid": os.getpid(), "machine": machine()}, fetches=True)
        assert own.wait(lambda: own.is_current, 20)
        losses = Losses(0, lambda: {1: ended})
        found = losses.find(own, patient=True)
        assert found is not None
        assert "before it met the other ranks" in found["line"]
        own.post({**RUNNING, "told": False}, fetches=False)
        store.set("1", json.dumps({**RUNNING, "run": 1, "beat": 1, "machine": "", "pid": 1, "where": "on_fit_end"}))
        own.post({**RUNNING, "told": False}, fetches=True)
        own.wait(lambda: own.is_current, 20)
        assert losses.find(own, patient=True) is None, "it ended as it should"
        assert own.entries[1]["where"] == "on_fit_end"
    finally:
        own.close({**RUNNING, "told": False}, 20)


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


def test_an_error_that_repeats_another_ranks_blames_that_one() -> None:
    error = repeated(RankLostError("rank 0: OSError: full"), 0, "OSError: full\nof files")
    assert first_cause(error) == "RankLostError: rank 0: OSError: full"
    corrupt = repeated(CheckpointCorruptError("rank 2: bad"), 2, "CheckpointCorruptError: bad")
    assert first_cause(corrupt) == "rank 2 failed first: CheckpointCorruptError: bad"


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
    found = set[tuple[str, str]]()
    for owner in (Trainer, Turns, _EvaluationLoop, _FitLoop):
        codes = [inspect.unwrap(one).__code__ for one in vars(owner).values() if inspect.isfunction(one)]
        found |= {(Path(code.co_filename).name, code.co_name) for code in codes}
    assert set(PHASES) <= found


def waits(seconds: float = 60) -> None:
    time.sleep(seconds)


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


def starts_before_the_others(printed: Path) -> None:
    """Body of rank 0 of 2, which waits for rank 1 to come, and then in one operation with it."""
    os.dup2(os.open(printed, os.O_CREAT | os.O_WRONLY), 2)
    monitor = Monitor(
        0,
        2,
        0.5,
        blocking={waits.__code__: "a collective"},
        position=lambda: {"unsent": 0, "due": 0},
        wake=lambda error: None,
        children=dict,
        report=lambda cause: None,
    )
    store = dist.HashStore()
    monitor.connect(store)
    monitor.start()
    waits(4.0)
    os.write(2, b"nothing yet\n" if monitor.cause is None else b"too early\n")
    other = Board(store, 1, 2, host=False)
    other.start({**RUNNING, "told": False, "pid": os.getpid(), "machine": machine(), "wait": None, "run": 1})
    waits()


@pytest.mark.processes
def test_the_watchdog_does_not_count_the_start_of_other_ranks(tmp_path: Path) -> None:
    """Two ranks in one process; rank 1 comes after four seconds."""
    process = get_context("fork").Process(target=starts_before_the_others, args=(tmp_path / "printed",))
    process.start()
    process.join(90)
    process.kill()
    printed = (tmp_path / "printed").read_text()
    assert process.exitcode == 1
    assert printed.startswith("nothing yet\n"), "a warning or an error came before all ranks did"
    assert "WatchdogTimeoutError: no progress within the watchdog" in printed


@pytest.mark.processes
def test_a_rank_that_is_ended_in_a_handler_prints_its_own_error_first(tmp_path: Path, ended: Any) -> None:
    process = get_context("fork").Process(target=fails_and_waits, args=(tmp_path / "printed", ended))
    process.start()
    process.join(40)
    process.kill()
    printed = (tmp_path / "printed").read_text()
    assert process.exitcode == 1
    assert printed.index("Traceback") < printed.index("ValueError: boom") < printed.index("RankLostError: rank 2")


def test_a_host_waits_for_ranks_of_its_own_run_where_it_has_read_what_an_earlier_one_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 of 2 in its second run; rank 1 has failed in the first one, and has not come to the second."""
    store, asked = dist.HashStore(), list[str]()
    entry = {**RUNNING, "state": "raised", "told": True, "pid": os.getpid(), "machine": machine(), "wait": None}
    Board(store, 0, 2, host=True)
    other = Board(store, 1, 2, host=False)
    other.start(entry)
    other.close(entry, 5.0)
    monkeypatch.setattr("lightning_mm5d.monitor.monitor.TOLD_S", 0.5)
    monitor = Monitor(
        0,
        2,
        60,
        blocking={},
        position=dict,
        wake=lambda error: None,
        children=lambda: asked.append("children that do not answer are ended") or {},
        report=lambda cause: None,
    )
    monitor.connect(store)
    assert monitor.board is not None
    monitor.board.post(entry, fetches=True)
    assert monitor.board.wait(lambda: 1 in monitor.board.entries, 5.0)
    monitor.wait_until_told()
    assert asked
    monitor.close()
