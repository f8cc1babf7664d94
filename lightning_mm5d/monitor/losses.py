"""Finds ranks that are lost: processes that are gone or stopped, and ranks that no longer answer.

The operating system says it of processes on the same machine, and of those that this process started. Of other ranks
only their silence tells. A process that computes is never lost, however silent it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from subprocess import Popen
from typing import Any

from lightning_mm5d.monitor import verdict
from lightning_mm5d.monitor.board import Board, Entry, ended_how, machine, state_of

STOPPED_S = 6.0
"""a process that is stopped for that long counts as lost"""
SILENT_S = 60.0
"""a rank on another machine that is silent for that long counts as lost"""
GONE_S = 2.0
"""a silence that long is enough after a connection was lost"""


LAUNCHED_BY = "LIGHTNING_MM5D_LAUNCHED_BY"
"""variable of a process that another rank started: process id and rank of that one"""


class Losses:
    """Finds lost ranks for one rank.

    Args:
        rank: global rank.
        children: processes of the ranks that this process started, by rank.
    """

    def __init__(self, rank: int, children: Callable[[], Mapping[int, Popen[Any]]]) -> None:
        self._rank, self._children = rank, children

    def find(self, board: Board | None, *, patient: bool) -> Entry | None:
        """Return a cause that names a lost rank; None where none is known.

        Args:
            board: of this rank; None before it is connected.
            patient: False after a connection was lost, when a short silence is enough.
        """
        now = time.monotonic()
        if board is not None and board.error is None and not board.is_current:
            return self._host(board, now, patient)  # the next look knows who has come, and where ranks were last
        for rank, child in self._children().items():
            code = child.poll()
            has_met = board is not None and rank in board.entries
            if code or (code == 0 and not has_met):
                when = "" if has_met else " before it met the other ranks"
                return _cause(board, rank, ended_how(code) + when, patience=0.5 if board is None else 3.0)
        if board is None:
            return self._launcher_lost()
        for rank, entry in list(board.entries.items()):
            if rank == self._rank:
                continue
            silent = now - board.heard.get(rank, now)
            here = state_of(entry["pid"]) if entry["machine"] and entry["machine"] == machine() else "unknown"
            if entry["state"] == "ended" and entry["run"] == board.run and not patient:
                return _cause(board, rank, "it had ended its run", patience=3.0)
            if here == "gone" and entry["state"] == "running":
                return _cause(board, rank, "its process is gone", patience=3.0)
            if here == "gone" and entry["run"] < board.run:
                return _cause(board, rank, "its process ended after an earlier run", patience=3.0)
            if here == "stopped" and silent > STOPPED_S:
                return _cause(board, rank, f"its process is stopped (SIGSTOP) for {silent:.0f} s", patience=0.5)
            if here == "unknown" and entry["state"] == "running" and silent > (SILENT_S if patient else GONE_S):
                return _cause(board, rank, f"it has not answered for {silent:.0f} s", patience=0.5)
        return self._host(board, now, patient)

    def _launcher_lost(self) -> Entry | None:
        """Judge the process that started this one, which may end before it has made the store that all meet at."""
        pid, _, rank = os.environ.get(LAUNCHED_BY, "").partition(" ")
        if not pid or int(rank) >= self._rank or os.getppid() == int(pid):
            return None
        return _cause(None, int(rank), "its process is gone", patience=0.5)

    def _host(self, board: Board, now: float, patient: bool) -> Entry | None:
        """Judge by the store, which answers no more when its host is gone."""
        silent = now - board.synced
        if board.error is None and silent < STOPPED_S:
            return None
        host = board.entries.get(0)
        here = state_of(host["pid"]) if host and host["machine"] == machine() and machine() else "unknown"
        # a host that has not told of itself yet may be starting on a machine under load
        is_slow = here == "unknown" and board.error is None and silent < SILENT_S
        if patient and (here == "alive" or is_slow):
            return None
        how = {"gone": "its process is gone", "stopped": "its process is stopped (SIGSTOP)"}.get(
            here, "the store of the ranks no longer answers"
        )
        return _cause(board, 0, how, patience=0.5 if here == "stopped" else 3.0)


def _cause(board: Board | None, rank: int, how: str, patience: float) -> Entry:
    entry = board.entries.get(rank) if board is not None else None
    place = f" ({verdict.said(entry)})" if entry else ""
    return {"kind": "lost", "rank": rank, "line": f"rank {rank}{place} failed first: {how}", "patience": patience}
