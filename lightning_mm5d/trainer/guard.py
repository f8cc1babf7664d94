"""The guard of a run on one rank: it tells other ranks of a failure, and repeats their first cause in one line.

The launchers run the trainer's function inside of it, so that it sees an error before Lightning's handlers do. An error
of this rank's own is told to the others, and leaves with its traceback and a last line that says where it happened. An
error that only says that a connection was lost is replaced by the first cause.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from subprocess import Popen, TimeoutExpired
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException

from lightning_mm5d.checkpoint.rank_reports import WAITING
from lightning_mm5d.config.errors import (
    FAILED_FIRST,
    ConfigError,
    RankLostError,
    RankMismatchError,
    WatchdogTimeoutError,
    private,
)
from lightning_mm5d.engine.agreement import Agreement
from lightning_mm5d.engine.ordered_transport import OrderedTransport
from lightning_mm5d.engine.transport import Transport, TransportError
from lightning_mm5d.monitor.monitor import Monitor, one_line
from lightning_mm5d.monitor.stack import failed_in_communication, is_installed, place_of
from lightning_mm5d.monitor.verdict import place_text
from lightning_mm5d.trainer.turns import position

_REPEATED = (RankLostError, RankMismatchError, WatchdogTimeoutError)
_BLOCKING = {
    Transport.recv.__code__: "recv",
    Transport.flush.__code__: "flush",
    OrderedTransport.post.__code__: "recv",
    OrderedTransport.recv.__code__: "recv",
    OrderedTransport.flush.__code__: "flush",
    Agreement.check.__code__: "check",
    **dict.fromkeys(WAITING, "check"),
}
_WORDS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out waiting")
TERMINATED = "terminated"
"""kind of a report that SIGTERM ended the run"""
CAUSE_S = 12.0
"""how long a rank that lost a connection looks for the first cause, which a machine under load tells late"""


class Guard:
    """Watches a run of the trainer on one rank, from `__enter__` to `close`.

    Args:
        trainer: that runs.
        rank: global rank.
        world_size: number of ranks.
        watchdog: seconds that one call may wait for other ranks.
        traffic: what the session does: ``stages``, ``action``, ``thread``, ``unsent`` and ``due``.
        wake: ends waits of the session with an error of this text.
        interrupt: has ranks that begin a batch end there, after an interrupt of this one.
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
        interrupt: Callable[[], None],
        children: Callable[[], Mapping[int, Popen[Any]]],
        reports: Connection | None,
    ) -> None:
        self._trainer, self._rank, self._traffic = trainer, rank, traffic
        self._interrupt, self._children, self._reports = interrupt, children, reports
        self._is_own = False  # whether the run ends by an error of this rank
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
        if isinstance(error, _TunerExitException):  # no failure; the teardown that follows ends the monitor
            return
        cause = self._judged(error)
        self.monitor.leave(error if self._is_own and self._reports is None else None)
        if self._rank == 0 or self._children():
            self.monitor.wait_until_told()
        if not isinstance(sys.excepthook, partial):
            sys.excepthook = partial(_end, sys.excepthook, self._rank, not self._children())
        if isinstance(cause or error, KeyboardInterrupt):  # Lightning exits, and no `excepthook` is called
            atexit.register(_end_interrupted, self._children)
        if cause is not None:
            raise cause from None

    def close(self) -> None:
        """End the monitor; after a failure once Lightning's own handlers are done."""
        self.monitor.close()

    def _judged(self, error: BaseException) -> BaseException | None:
        """Return the first cause in place of an error that came of it; None for one that is to leave as it is."""
        monitor, told = self.monitor, _repeated(error)
        if (told is not None or _came_of_another(error)) and monitor.first_cause(CAUSE_S) is not None:
            return monitor.error() if told is None or isinstance(error, RankLostError) else None
        if isinstance(error, RankMismatchError):  # all ranks have found it
            monitor.blame("mismatch", str(error))
            return None
        if isinstance(error, KeyboardInterrupt):  # all ranks raise it, and Lightning ends them
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if not error.args and monitor.cause is None:
                self._interrupt()
            monitor.blame("interrupt", str(error) or f"rank {self._rank} was interrupted by SIGINT")
            return None
        if isinstance(error, SIGTERMException):
            self._end_by_sigterm(error)
        place = place_of(error.__traceback__)
        where = place_text({**position(self._trainer), **self._traffic(), "where": place.where, "phase": place.phase})
        is_cut_off = _came_of_another(error)  # and nobody knows by which rank
        met = "called a rank that had ended or" if monitor.is_closed else "lost its connection to a rank that"
        what = f"{met} {FAILED_FIRST}" if is_cut_off else FAILED_FIRST
        line = told or f"rank {self._rank} ({where}) {what} {one_line(error)}"
        is_first = monitor.blame("refused" if isinstance(error, ConfigError) else "lost", line)
        if isinstance(error, SIGTERMException) or told is not None:
            return None
        self._is_own = is_first
        if is_first:
            error.add_note(line)
            if self._reports is not None:
                traceback.print_exception(error)
        elif monitor.cause is not None:  # several ranks fail at the same time: one of them says how
            first = monitor.cause["line"]
            error.add_note(first if FAILED_FIRST in first else f"what {FAILED_FIRST} {first}")
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


def _came_of_another(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, says that the connection to a rank was lost."""
    for cause in _chain(error):
        if isinstance(cause, TransportError | dist.DistError) or (isinstance(cause, _REPEATED) and not cause.args):
            return True
        at_peers = failed_in_communication(cause.__traceback__) or any(word in str(cause) for word in _WORDS)
        if isinstance(cause, RuntimeError) and at_peers:
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
    for cause in _chain(error):
        if isinstance(cause, _REPEATED):
            return one_line(cause)
        if (note := _note(cause)) is not None:
            return note
    return None


def _note(error: BaseException) -> str | None:
    return next((note for note in getattr(error, "__notes__", ()) if FAILED_FIRST in note), None)


def _repeated(error: BaseException) -> str | None:
    """Return the line that blames another rank, where an error repeats that of one; else None."""
    for cause in _chain(error):
        if (note := _note(cause)) is not None:
            return note
        if isinstance(cause, RankLostError) and cause.args:
            return str(cause)
    return None


def _end_interrupted(children: Callable[[], Mapping[int, Popen[Any]]]) -> None:
    """End an interrupted process, for `atexit`; threads that wait in torch.distributed would abort it later."""
    atexit.unregister(_end_interrupted)
    for child in children().values():  # Lightning has killed them
        with suppress(TimeoutExpired):
            child.wait(5.0)
    _leave()


def _end(
    usual: Callable[..., Any],
    rank: int,
    is_short: bool,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """End the process after an error that nobody caught; for `sys.excepthook`.

    The interpreter is not finalized: threads that wait in torch.distributed would abort the process meanwhile.

    Args:
        usual: prints other errors.
        rank: of this process.
        is_short: whether an error that came of another rank's needs no place in the script that ran the trainer.
        kind: of the error.
        error: that nobody caught.
        trace: of the error.
    """
    line = first_cause(error)
    if line is None or line.startswith(f"rank {rank} "):
        usual(kind, error, trace)
        if line is not None and line not in getattr(error, "__notes__", ()):
            print(line, file=sys.stderr)  # a handler of the error has failed in turn
    else:
        if not is_short:
            frames = [frame for frame in traceback.extract_tb(trace) if not is_installed(frame.filename)]
            print("Traceback (most recent call last):", file=sys.stderr)
            print(*traceback.format_list(frames), sep="", end="", file=sys.stderr)
        if line != one_line(error):
            print(f"rank {rank}: {one_line(error)}", file=sys.stderr)
        print(line, file=sys.stderr)
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    _leave()


def _leave() -> None:
    private(atexit, "_run_exitfuncs")()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
