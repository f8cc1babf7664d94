"""The guard of a run on one rank: it tells other ranks of a failure, and repeats their first cause in one line.

The launchers run the trainer's function inside of it, so that it sees an error before Lightning's handlers do. An error
of this rank's own is told to the others, and leaves with its traceback and a last line that says where it happened. An
error that only says that a connection was lost is replaced by the first cause.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from subprocess import Popen
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_mm5d.checkpoint import rank_reports
from lightning_mm5d.config.errors import RankLostError, RankMismatchError, WatchdogTimeoutError, private
from lightning_mm5d.engine.agreement import Agreement
from lightning_mm5d.engine.ordered_transport import OrderedTransport
from lightning_mm5d.engine.transport import Transport, TransportError
from lightning_mm5d.monitor.monitor import Monitor, one_line
from lightning_mm5d.monitor.stack import failed_in_communication, place_of
from lightning_mm5d.monitor.verdict import said
from lightning_mm5d.trainer import saves

_REPEATED = (RankLostError, RankMismatchError, WatchdogTimeoutError)
_BLOCKING = {
    Transport.recv.__code__: "recv",
    Transport.flush.__code__: "flush",
    OrderedTransport.post.__code__: "recv",
    OrderedTransport.recv.__code__: "recv",
    OrderedTransport.flush.__code__: "flush",
    Agreement.check.__code__: "check",
    rank_reports.WAITING: "check",
    saves.WAITING: "check",
}
_FIRST = "failed first:"
_WORDS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out waiting")
TERMINATED = "terminated"
"""kind of a report that SIGTERM ended the run"""
CAUSE_S = 4.0
"""how long a rank that lost a connection looks for the first cause"""


class Guard:
    """Watches a run of the trainer on one rank, from `__enter__` to `close`.

    Args:
        trainer: that runs.
        rank: global rank.
        world_size: number of ranks.
        watchdog: seconds that one call may wait for other ranks.
        traffic: what the session does: ``action``, ``thread``, ``unsent`` and ``due``.
        wake: ends waits of the session with an error of this text.
        children: processes that this one started, by rank.
        reports: where the first cause goes, for a process that only waits for the ranks; None where there is none.

    Attributes:
        monitor: of this rank.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        rank: int,
        world_size: int,
        watchdog: float,
        *,
        traffic: Callable[[], dict[str, Any]],
        wake: Callable[[str], None],
        children: Callable[[], Mapping[int, Popen[Any]]],
        reports: Connection | None,
    ) -> None:
        self._trainer, self._rank, self._traffic = trainer, rank, traffic
        self._children, self._reports = children, reports
        self.monitor = Monitor(
            rank,
            world_size,
            watchdog,
            blocking=_BLOCKING,
            position=lambda: {**position(trainer), **traffic()},
            wake=lambda error: wake(str(error)),
            children=children,
            report=self._report,
        )

    def __enter__(self) -> Guard:
        self.monitor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.monitor.close()
            return
        cause = self._judged(error)
        is_own = cause is None and not isinstance(error, SIGTERMException)
        self.monitor.leave(error if is_own and self._reports is None else None)
        if self._rank == 0 or self._children():
            self.monitor.wait_until_told()
        if not isinstance(sys.excepthook, partial):
            sys.excepthook = partial(_end, sys.excepthook, not self._children())
        if cause is not None:
            raise cause from None

    def close(self) -> None:
        """End the monitor; after a failure once Lightning's own handlers are done."""
        self.monitor.close()

    def _judged(self, error: BaseException) -> Exception | None:
        """Return the first cause in place of an error that came of it; None for an error of this rank's own."""
        monitor = self.monitor
        if _came_of_another(error) and monitor.first_cause(CAUSE_S) is not None:
            return monitor.error()
        if isinstance(error, RankMismatchError):  # all ranks have found it
            monitor.blame("mismatch", str(error))
            return None
        if isinstance(error, SIGTERMException):
            self._end_by_sigterm(error)
        place = place_of(error.__traceback__)
        where = said({**position(self._trainer), **self._traffic(), "where": place.where, "phase": place.phase})
        line = f"rank {self._rank} ({where}) {_FIRST} {one_line(error)}"
        if monitor.blame("lost", line) and not isinstance(error, SIGTERMException):
            error.add_note(line)
            if self._reports is not None:
                traceback.print_exception(error)
        return None

    def _end_by_sigterm(self, error: SIGTERMException) -> None:
        """Say why the run ends, once: the error itself exits without a word, as Lightning has it."""
        line = "; ".join(getattr(error, "__notes__", [f"rank {self._rank} was told to terminate by SIGTERM"]))
        self.monitor.blame("lost", line)
        if self._reports is not None:
            self._report({"kind": TERMINATED, "line": line})
            self.monitor.leave()
            if self._rank == 0:
                self.monitor.wait_until_told()
            raise SystemExit(1) from None  # the waiting process raises it: with 0 it would wait for results
        if self._rank == 0:
            print(f"{type(error).__name__}: {line}", file=sys.stderr)

    def _report(self, cause: Mapping[str, Any]) -> None:
        if self._reports is not None:
            self._reports.send_bytes(json.dumps([cause["kind"], cause["line"]]).encode())


def position(trainer: pl.Trainer) -> dict[str, Any]:
    """Return loop, epoch and last batch of a trainer; empty outside of loops."""
    stage = trainer.state.stage
    if stage is None:
        return {}
    fit = trainer.fit_loop.epoch_loop
    loops: dict[RunningStage, Any] = {
        RunningStage.TRAINING: fit,
        RunningStage.SANITY_CHECKING: fit.val_loop,
        RunningStage.VALIDATING: fit.val_loop if trainer.state.fn == "fit" else trainer.validate_loop,
        RunningStage.TESTING: trainer.test_loop,
        RunningStage.PREDICTING: trainer.predict_loop,
    }
    name = {"train": "training", "sanity_check": "sanity check"}.get(stage.value, stage.value)
    batch = loops[stage].batch_progress.current.ready - 1
    return {"loop": name, "epoch": trainer.current_epoch, "batch": batch}


def _came_of_another(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, says that the connection to a rank was lost."""
    for one in _chain(error):
        if isinstance(one, TransportError | dist.DistError) or (isinstance(one, _REPEATED) and not one.args):
            return True
        at_peers = failed_in_communication(one.__traceback__) or any(word in str(one) for word in _WORDS)
        if isinstance(one, RuntimeError) and at_peers:
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from."""
    chain: BaseException | None = error
    while chain is not None:
        yield chain
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)


def first_cause(error: BaseException) -> str | None:
    """Return the line of the first cause that an error, or one that it was raised from, bears."""
    for one in _chain(error):
        if isinstance(one, _REPEATED):
            return one_line(one)
        for note in getattr(one, "__notes__", ()):
            if _FIRST in note:
                return str(note)
    return None


def _end(
    usual: Callable[..., Any],
    is_short: bool,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """End the process after an error that nobody caught; for `sys.excepthook`.

    The interpreter is not finalized: threads that wait in torch.distributed would abort the process meanwhile.

    Args:
        usual: prints other errors.
        is_short: whether one line is enough for an error that repeats another rank's.
        kind: of the error.
        error: that nobody caught.
        trace: of the error.
    """
    if isinstance(error, _REPEATED) and is_short:
        print(one_line(error), file=sys.stderr)
    else:
        usual(kind, error, trace)
        line = first_cause(error)
        if line is not None and line not in (one_line(error), *getattr(error, "__notes__", ())):
            print(line, file=sys.stderr)  # a handler of the error has failed in turn
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    private(atexit, "_run_exitfuncs")()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
