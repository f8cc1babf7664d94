"""Judges the entries of all ranks: whether their waits can end, how to say where a rank is, and which ranks are lost.

Verdicts are pure functions of entries, which are JSON objects:

- ``run``: number of the run.
- ``state``: ``"running"``, ``"raised"`` (an error has left the trainer), or ``"ended"``.
- ``loop``, ``epoch``, ``batch``: ``"training"`` and its like, and the last batch that began; absent before loops.
- ``stages``: keys of the stages of the rank; absent or empty before they are known.
- ``action``: what the rank does with a microbatch, as ``"language.1, forward of microbatch 3"``, or empty.
- ``thread``: identifier of the thread that computes in place of the main one, where another one does.
- ``where``, ``phase``: the hook and the line of code; the part of Lightning's loop.
- ``call``: the operation of all ranks that code of the user calls at that line; empty where it calls none.
- ``wait``: None, or an object of ``operation``, ``group``, ``ranks`` and ``seconds`` in this very call. The operation
  ``"check"`` is a check of all ranks over the store.
- ``unsent``, ``due``: payloads that are on their way out, and that are expected.

**Lost ranks** are processes that are gone or stopped, and ranks that no longer answer. The operating system says it of
processes on the same machine, and of those that this process started. Of other ranks only their silence tells. A
process that computes is never lost, however silent it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from math import inf
from subprocess import Popen
from typing import Any

from lightning_mm5d.config.tables import spans
from lightning_mm5d.monitor.board import Board, Entry, ended_how, machine, state_of
from lightning_mm5d.monitor.stack import AFTER_BATCHES, START_OF_BATCH

Entries = Mapping[int, Entry]
_STAGES = 4  # named in a message


def deadlock(entries: Entries, seconds: float) -> str | None:
    """Return one line that says which rank waits where, when no operation of any rank can ever finish; else None.

    A collective can finish when all ranks of its group wait in the same operation of that group. A payload can arrive
    while some rank has payloads under way.

    Args:
        entries: of all ranks.
        seconds: how long each running rank must have waited in one call.
    """
    running = {rank: entry for rank, entry in entries.items() if entry["state"] == "running"}
    waits = {rank: entry["wait"] for rank, entry in running.items()}
    if len({entry["run"] for entry in entries.values()}) > 1:
        return None  # some rank has yet to begin this run
    if not waits or any(wait is None or wait["seconds"] < seconds for wait in waits.values()):
        return None
    if any(entry["unsent"] for entry in running.values()) and any(entry["due"] for entry in running.values()):
        return None
    for wait in waits.values():
        members = list(entries) if wait["operation"] == "check" else wait["ranks"]
        if members and all(_matches(wait, waits.get(rank)) for rank in members):
            return None
        if not members and wait["operation"] not in ("recv", "flush"):
            return None  # who takes part is unknown
    places: dict[str, list[int]] = {}
    for rank, entry in sorted(entries.items()):
        places.setdefault(_waiting_place(entry), []).append(rank)
    told = "; ".join(
        f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}"
        for place, ranks in sorted(places.items(), key=lambda item: item[1][0])
    )
    if _are_apart(entries):
        advice = (
            "All ranks must run equal numbers of batches: give their dataloaders equal lengths, or limit_train_batches"
        )
    elif callers := _lone_callers(running):
        call = running[callers[0]]["call"]
        told = f"{told}. Only {named(callers)} called {call}"
        advice = f"All ranks must call it: take {call} out of `if trainer.is_global_zero` and the like"
        if any(running[rank].get("action") for rank in callers):
            advice = (
                "Each rank runs a step for its own stages and microbatches, so no call in it meets those of others: "
                f"use self.log(..., sync_dist=True), or take {call} to a hook such as on_validation_batch_end"
            )
    else:
        advice = "All ranks must make the same calls in the same order: call it on every rank"
    return f"ranks wait for each other in different places: {told}. {advice}"


def place_text(entry: Entry) -> str:
    """Return where a rank is, for a message: its stages and its action, or its hook and batch."""
    if entry.get("action"):
        return str(entry["action"])
    parts = [entry.get("where") or entry.get("phase") or ""]
    if entry.get("loop"):
        parts.append(f"{entry['loop']} batch {entry['batch']}" if entry["batch"] >= 0 else f"{entry['loop']}")
    place = ", ".join(part for part in parts if part) or "start"
    return f"{stages}: {place}" if (stages := _stages(entry)) else place


def named(ranks: list[int]) -> str:
    """Return ranks as English: ``"rank 2"``, ``"ranks 0-1, 3"``."""
    return f"rank {spans(ranks)}" if len(ranks) == 1 else f"ranks {spans(ranks)}"


def _matches(wait: Entry, other: Entry | None) -> bool:
    return other is not None and (other["operation"], other["group"]) == (wait["operation"], wait["group"])


def _waiting_place(entry: Entry) -> str:
    loop, batch, phase = entry.get("loop"), entry.get("batch", -1), entry["phase"]
    if entry["state"] != "running":
        return "at the end of its run"
    if loop == "training" and phase in AFTER_BATCHES:
        where = entry["where"] or phase
        epoch = entry["epoch"] - (phase == AFTER_BATCHES[1])  # which is counted by then
        return f"after training epoch {epoch}, which ended with batch {batch}, in {where}"
    if loop == "training" and phase == START_OF_BATCH:
        return f"at the start of training batch {batch + 1} of epoch {entry['epoch']}"
    where = entry["where"] or phase
    within = f" of {loop} batch {batch} of epoch {entry['epoch']}" if loop and batch >= 0 else ""
    doing = f" ({entry['action']})" if entry.get("action") else ""
    return f"in {where or 'the trainer'}{within}{doing}, waiting in {entry['wait']['operation']}"


def _stages(entry: Entry) -> str:
    """Return the stages of a rank: ``"vision.0, language.0"``."""
    stages = list(entry.get("stages") or ())
    return ", ".join(stages[:_STAGES]) + (f" and {len(stages) - _STAGES} more" if len(stages) > _STAGES else "")


def _are_apart(entries: Entries) -> bool:
    """Return whether some rank is through with the training batches of an epoch, and another one is not."""
    ended = any(entry["state"] != "running" for entry in entries.values())
    through = [entry.get("epoch", inf) for entry in entries.values() if entry["phase"] in AFTER_BATCHES]
    latest = inf if ended else max(through, default=-1)
    return any(
        entry.get("loop") == "training" and entry["phase"] not in AFTER_BATCHES and entry["epoch"] <= latest
        for entry in entries.values()
        if entry["state"] == "running"
    )


def _lone_callers(running: Entries) -> list[int]:
    """Return the ranks that wait in a call of the user's own which others do not make; empty where all make one."""
    calls = {rank: (entry["call"], entry["where"]) for rank, entry in running.items() if entry.get("call")}
    if len(calls) == len(running):
        return []
    return [rank for rank, call in calls.items() if call == next(iter(calls.values()))]


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
    place = f" ({place_text(entry)})" if entry else ""
    return {"kind": "lost", "rank": rank, "line": f"rank {rank}{place} failed first: {how}", "patience": patience}
