"""Watches one rank's main thread, tells the other ranks where it is, and ends a rank whose wait cannot end.

One daemon thread looks at the main thread's stack twice a second. Nothing runs on the hot path. A rank that has waited
for some seconds reads the entries of the others, and judges:

- A rank's process is gone or stopped: `RankLostError`.
- All ranks wait, and none of their operations can ever finish: `RankMismatchError`.
- One call has waited for longer than the watchdog: `WatchdogTimeoutError`, after a warning that names the slow ranks.

Where microbatches run side by side, a thread that computes one may have the turn while the main thread waits for its
own. Then the monitor looks at that thread, as if the main thread had called it.

The first cause is written to the board, where the first writer wins, and every rank then repeats it in one line. A
thread that waits for payloads, or runs Python code, is woken by an error; a main thread that waits for another thread's
turn is, when that one ends. One that waits inside of torch.distributed or of other compiled code cannot be woken: it is
freed by the end of its peers, and where that does not come its process prints the line and ends. Ranks end in an order
in which rank 0, which may be the process that launched the others, is freed by them and can raise.

It never judges a rank that computes, however long, before the watchdog.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from subprocess import Popen
from types import CodeType
from typing import Any

from torch.distributed import Store

from lightning_mm5d.config.errors import RankLostError, RankMismatchError, RefusedElsewhereError, WatchdogTimeoutError
from lightning_mm5d.monitor import stack, verdict
from lightning_mm5d.monitor.board import INTERVAL_S, Board, Entry, machine, state_of
from lightning_mm5d.monitor.verdict import STOPPED_S, Losses

READS_AFTER_S = 1.5
"""a wait that long has this rank read the entries of the others"""
STUCK_S = 3.0
"""a wait that long, on all ranks, can be a mismatch"""
TOLD_S = 6.0
"""how long the host of the store keeps it for ranks that do not know the cause yet; a machine under load is slow"""

ERRORS: dict[str, type[BaseException]] = {
    "lost": RankLostError,
    "refused": RefusedElsewhereError,
    "mismatch": RankMismatchError,
    "watchdog": WatchdogTimeoutError,
    "interrupt": KeyboardInterrupt,
}


class Monitor:
    """Watches the thread that makes it, from `start` to `close`.

    Args:
        rank: global rank.
        world_size: number of ranks.
        watchdog: seconds that one call may wait for other ranks.
        blocking: functions that wait for other ranks beside those of torch.distributed, by what to call them.
        position: gives ``loop``, ``epoch``, ``batch``, ``stages``, ``action``, ``thread``, ``unsent`` and ``due`` of an
            entry; must not block.
        wake: raises in a main thread that waits in Python.
        children: processes of the ranks that this process started, by rank.
        report: takes the first cause when this rank ends of it.

    Attributes:
        board: None until `connect`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        watchdog: float,
        *,
        blocking: Mapping[CodeType, str],
        position: Callable[[], Entry],
        wake: Callable[[BaseException], None],
        children: Callable[[], Mapping[int, Popen[Any]]],
        report: Callable[[Entry], None],
    ) -> None:
        self.board: Board | None = None
        self._rank, self._world_size, self._watchdog = rank, world_size, watchdog
        self._position, self._wake, self._children = position, wake, children
        self._looker, self._readable = stack.Looker(blocking), ExitStack()
        self._report = report
        self._losses = Losses(rank, children)
        self._main = threading.get_ident()
        self._started = time.monotonic()
        self._state = "running"
        self._own_cause: Entry | None = None
        self._told_at: float | None = None
        self._warned_at = 0.0
        self._seeks = False  # whether a connection was lost, of which the cause is sought
        self._met_at: float | None = None  # when all ranks were known to have come
        self._suspect: tuple[str, float] = ("", 0.0)
        self._interrupted = 0  # identifier of the thread
        self._left = False
        self._unprinted: BaseException | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._seen = stack.Look(stack.Place("", ""), None)
        self._moved: tuple[Entry, float] = ({}, 0.0)  # the position, and when it changed
        self._thread = threading.Thread(target=self._run, name="mm5d-monitor", daemon=True)

    # --- the main thread ---

    def start(self) -> None:
        """Begin to watch."""
        self._readable.enter_context(stack.readable())
        self._thread.start()

    def connect(self, store: Store) -> None:
        """Begin to exchange entries with the other ranks.

        Args:
            store: of all ranks, a connection of its own.
        """
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts the store itself
        self.board = Board(store, self._rank, self._world_size, host=not agents)
        self.board.start(self._entry(stack.Look(stack.Place("", ""), None), 0.0))

    def leave(self, unprinted: BaseException | None = None) -> None:
        """Note that an error leaves the trainer: from now on this thread is not interrupted.

        Args:
            unprinted: this rank's own error, to be printed where its handlers do not come to an end.
        """
        with self._lock:
            self._left = True
            self._unprinted = unprinted
            if self._interrupted:  # one that is still to come
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._interrupted), None)
            self._state = "raised"
        if self.board is not None and self.board.error is None:  # others may wait to know
            self.board.post(self._entry(stack.Look(stack.Place("", ""), None), 0.0), fetches=True)
            self.board.wait(lambda: True, 0.0)
        if self.cause is not None:
            self._report(self.cause)

    def first_cause(self, seconds: float) -> Entry | None:
        """Return the first cause of a failure after a connection was lost; wait up to `seconds` for one.

        Nothing is sought after `close`: ranks tell nothing any more, and silence says nothing of them.
        """
        end = time.monotonic() + seconds
        self._seeks = True
        while self.cause is None and time.monotonic() < end and not self.is_closed:
            if self.board is not None and self.board.error is None:
                self.board.post(self._entry(stack.Look(stack.Place("", ""), None), 0.0), fetches=True)
                self.board.wait(lambda: self.cause, INTERVAL_S)
            else:
                time.sleep(INTERVAL_S / 5)
            cause = self._losses.find(self.board, patient=False)
            if cause is not None:
                self._blame(cause)
        return self.cause

    def blame(self, kind: str, line: str) -> bool:
        """Tell that this rank failed; return whether it was the first.

        Args:
            kind: of `ERRORS`.
            line: place and error, as one line.
        """
        self._blame({"kind": kind, "rank": self._rank, "line": line, "patience": 3.0})
        if self.board is not None and self.board.error is None:
            self.board.wait(lambda: self.cause, 2.0)
        return self.cause is None or self.cause["rank"] == self._rank

    def wait_until_told(self) -> None:
        """Wait until the other ranks know the cause, and end children that do not answer.

        For the host of the store, which takes the cause with it, and for the process that started the others.
        """
        if self.board is None or self.board.error is not None:
            return
        board, others = self.board, [rank for rank in range(self._world_size) if rank != self._rank]

        def told() -> bool:
            board.post(self._entry(stack.Look(stack.Place("", ""), None), 0.0), fetches=True)
            return all(map(self._is_told, others))

        if not board.wait(told, TOLD_S):
            self._end_children()

    @property
    def cause(self) -> Entry | None:
        """The first cause; on a rank without a connection, its own finding."""
        known = self.board.cause if self.board is not None else None
        return known or self._own_cause

    def error(self) -> BaseException | None:
        """Return the first cause as an error; None where there is none."""
        return None if self.cause is None else ERRORS[self.cause["kind"]](self.cause["line"])

    @property
    def is_closed(self) -> bool:
        """Whether the run has ended."""
        return self._closing.is_set()

    def close(self) -> None:
        """End the threads."""
        self._closing.set()
        if self._thread.is_alive() and threading.get_ident() != self._thread.ident:
            self._thread.join(2 * INTERVAL_S)
        self._readable.close()
        if self.board is not None:
            state = "ended" if self._state == "running" else self._state
            self.board.close({**self._entry(stack.Look(stack.Place("", ""), None), 0.0), "state": state}, INTERVAL_S)

    # --- the thread ---

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(INTERVAL_S):
            now = time.monotonic()
            if now - last > 4 * INTERVAL_S and self.board is not None:  # this process was stopped or starved itself
                self.board.heard.clear()
                self.board.synced = now
            last = now
            with suppress(Exception):  # a look may meet groups and loops that are half made; the next one sees them
                self._tick(now)

    def _tick(self, now: float) -> None:
        look = self._seen = self._look(now)
        waited = now - look.wait.since if look.wait is not None else 0.0
        if self.board is not None:
            fetches = waited > READS_AFTER_S or self._told_at is not None or self._seeks
            self.board.post(self._entry(look, waited), fetches=fetches)
        if self.cause is None:
            self._judge(look, waited, now)
        if self.cause is not None:
            self._enforce(look, now)

    def _look(self, now: float) -> stack.Look:
        """Return where the main thread is; what was seen last while it comes forward."""
        position = self._position()
        if position != self._moved[0]:
            self._moved = position, now
        if now - self._moved[1] < INTERVAL_S:
            return stack.Look(self._seen.place, None)
        return self._looker.look(self._main, position.get("thread"), self._moved[1])

    def _entry(self, look: stack.Look, waited: float) -> Entry:
        wait = look.wait and {
            "operation": look.wait.operation,
            "group": look.wait.group,
            "ranks": look.wait.ranks,
            "seconds": waited,
        }
        return {
            "pid": os.getpid(),
            "machine": machine(),
            "state": self._state,
            "told": self._told_at is not None or self._left,
            "where": look.place.where,
            "phase": look.place.phase,
            "call": look.place.call,
            "wait": wait,
            **self._position(),
        }

    def _judge(self, look: stack.Look, waited: float, now: float) -> None:
        cause = self._losses.find(self.board, patient=True) if waited > READS_AFTER_S or self.board is None else None
        if cause is None and waited > STUCK_S and self.board is not None and self._all_heard(now):
            line = verdict.deadlock(self.board.entries, STUCK_S)
            key, since = self._suspect
            if line is None:
                self._suspect = ("", now)
            elif key != line:
                self._suspect = (line, now)
            elif now - since >= 2 * INTERVAL_S:
                cause = {"kind": "mismatch", "rank": None, "line": line, "patience": 0.5}
        if cause is None and look.wait is not None and waited > READS_AFTER_S:
            cause = self._overdue(look.wait, waited, now)
        if cause is not None:
            self._blame(cause)

    def _blame(self, cause: Entry) -> None:
        if self.board is None or self.board.error is not None or time.monotonic() - self.board.synced > STOPPED_S:
            self._own_cause = self._own_cause or cause
        else:
            self.board.blame(cause)

    def _all_heard(self, now: float) -> bool:
        assert self.board is not None
        return len(self.board.heard) == self._world_size and not any(
            entry["state"] == "running" and self._is_silent(rank, now) for rank, entry in self.board.entries.items()
        )

    def _overdue(self, wait: stack.Wait, waited: float, now: float) -> Entry | None:
        """Warn of a long wait, once for each call; return a cause when the watchdog is over."""
        entries = self.board.entries if self.board is not None else {}
        if self._met_at is None and self.board is not None and self.board.have_come:
            self._met_at = now
        if self._met_at is None:
            return None  # ranks start, for which a machine under load may need minutes; `timeout` counts
        waited = min(waited, now - self._met_at)
        if waited <= min(30.0, self._watchdog / 2):
            return None
        busy = [
            rank
            for rank, entry in sorted(entries.items())
            if entry["state"] == "running"
            and (entry["wait"] is None or entry["wait"]["seconds"] < READS_AFTER_S or self._is_silent(rank, now))
            and rank != self._rank
        ]
        slow = "; ".join(f"rank {rank} is in {verdict.place_text(entries[rank])}" for rank in busy[:4])
        mine = f"{wait.operation} for {waited:.0f} s"
        slow = slow or "all ranks wait, and none makes progress"
        if waited > self._watchdog:
            line = (
                f"no progress within the watchdog of {self._watchdog:.0f} s: {slow}; rank {self._rank} waits in {mine}"
            )
            return {"kind": "watchdog", "rank": busy[0] if busy else None, "line": line, "patience": 0.5}
        first = min((rank for rank in entries if rank not in busy), default=self._rank)
        if self._warned_at < wait.since and first == self._rank:
            self._warned_at = now
            _print(
                f"WatchdogWarning: {slow}; rank {self._rank} waits for it in {mine}, and the run ends after "
                f"{self._watchdog:.0f} s (watchdog)"
            )
        return None

    def _is_silent(self, rank: int, now: float) -> bool:
        assert self.board is not None
        return now - self.board.heard.get(rank, now) > 6 * INTERVAL_S + self._world_size / 64

    # --- the end of a rank whose wait cannot end ---

    def _is_told(self, rank: int) -> bool:
        assert self.board is not None
        entry = self.board.entries.get(rank)
        if entry is None:
            return False
        gone = entry["machine"] == machine() and state_of(entry["pid"]) == "gone"
        knows = bool(entry["told"]) or entry["state"] != "running"
        return gone or (knows and entry["run"] >= self.board.run)  # what was fetched early may be of the run before

    def _enforce(self, look: stack.Look, now: float) -> None:
        cause, error = self.cause, self.error()
        assert cause is not None
        assert error is not None
        if self._told_at is None:
            self._told_at = now
            if not self._left:
                self._wake(error)
        passed = now - self._told_at
        patience = cause["patience"] + (3.0 if self._rank == 0 else 0.0)
        if self._rank == 0 and passed > cause["patience"] + 1.0 and not self._left:
            self._end_children()
        if self._left and look.wait is not None and passed > cause["patience"] and self._is_alone():
            self._exit(error)
        if look.wait is not None and look.wait.operation == "check" and not self._interrupted:
            self._interrupt(type(error))  # it polls
        elif look.wait is not None and now - look.wait.since > INTERVAL_S:
            if passed > patience + (3.0 if self._left else 0.0):
                self._exit(error)
        elif not self._left:
            if passed > 5.0 and not self._interrupted:
                self._interrupt(type(error))
            if passed > 15.0:
                self._exit(error)

    def _interrupt(self, kind: type[BaseException]) -> None:
        """Raise an error in a thread that runs Python code: the main one, or the one that computes for it."""
        with self._lock:
            if not self._left:
                self._interrupted = self._position().get("thread") or self._main
                kind = RankLostError if issubclass(kind, RankLostError) else kind  # which code of users may not expect
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._interrupted), ctypes.py_object(kind))

    def _end_children(self) -> None:
        for rank, child in self._children().items():
            if child.poll() is None and not (self.board is not None and self._has_left(rank)):
                child.kill()

    def _is_alone(self) -> bool:
        """Whether all other ranks are processes of this machine that are gone."""
        entries = {} if self.board is None else self.board.entries
        return len(entries) == self._world_size and all(
            rank == self._rank or (entry["machine"] == machine() and state_of(entry["pid"]) == "gone")
            for rank, entry in entries.items()
        )

    def _has_left(self, rank: int) -> bool:
        assert self.board is not None
        entry = self.board.entries.get(rank)
        return entry is not None and entry["state"] != "running" and entry["run"] >= self.board.run

    def _exit(self, error: BaseException) -> None:
        if self._unprinted is not None:
            _print("".join(traceback.format_exception(self._unprinted)).rstrip())
        if self._left and self._seen.place.call:
            _print(
                f"{self._seen.place.where} waits for ranks that have ended or wait elsewhere, and is left unfinished"
            )
        _print(f"{type(error).__name__}: {error}")
        if self.cause is not None:
            self._report(self.cause)
        self._end_children()
        os._exit(1)


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its text; of a dataloader's worker those of its own error."""
    _, _, original = str(error).partition("Original Traceback (most recent call last):\n")
    if first_line := next((line for line in original.splitlines() if line and not line[0].isspace()), ""):
        return first_line[:500]
    text = str(error).strip().partition("\n")[0][:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _print(line: str) -> None:
    sys.stdout.flush()
    os.write(2, (line + "\n").encode())
