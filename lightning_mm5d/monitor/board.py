"""The notice board of a run: an entry for each rank and the first cause of a failure, in the store of the ranks.

All traffic is JSON. One daemon thread of each rank exchanges entries, because an operation on a store blocks for as
long as the store's host is stopped. Other threads read what it fetched, and never wait for the store itself.

Keys, under the prefix of the caller: the rank's number holds its latest entry; ``cause/RUN`` the first cause of a run,
which the first writer wins. Each exchange writes this rank's entry and looks for a cause. The entries of other ranks
are fetched only on request, and less often in large worlds.

What the operating system says of the process of a rank on the same machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch.distributed import Store

State = Literal["alive", "stopped", "gone", "unknown"]


def machine() -> str:
    """Return a name that is equal for processes that see each other's process numbers; empty where there is none."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def state_of(pid: int) -> State:
    """Return the state of a process on this machine."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone" if Path("/proc/self").exists() else "unknown"
    except (OSError, IndexError):
        return "unknown"
    return "gone" if letter in "ZX" else "stopped" if letter == "T" else "alive"


def ended_how(code: int) -> str:
    """Return an exit code as English, negative for a signal."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        return f"its process was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was killed by signal {-code}"


Entry = dict[str, Any]

INTERVAL_S = 0.5
RANKS_PER_SECOND = 64
"""entries that a rank fetches each second, so that the host of the store can serve a large world"""


class Board:
    """What one rank tells and learns.

    Args:
        store: a connection of this object's own.
        rank: global rank.
        world_size: number of ranks.
        host: whether rank 0's process hosts the store; it is not asked for anything once that is gone.

    Attributes:
        run: number of the run on this store, from 1, equal on all ranks that made as many runs.
        entries: latest entry of each rank that was fetched.
        heard: time of the fetch at which a rank's entry had last changed.
        cause: of the first failure of this run; None while none is known.
        synced: time of the last exchange that succeeded.
        error: of the store, after which nothing is exchanged any more.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, host: bool) -> None:
        self.run = int(store.add(f"runs/{rank}", 1))
        self.entries: dict[int, Entry] = {}
        self.heard: dict[int, float] = {}
        self.cause: Entry | None = None
        self.synced = time.monotonic()
        self.error: str | None = None
        self._store, self._rank, self._world_size, self._has_host = store, rank, world_size, host and rank > 0
        self._entry: Entry = {}
        self._beat = 0
        self._wished: Entry | None = None
        self._written: tuple[Any, ...] = ()
        self._fetches = False
        self._fetched, self._asked = 0.0, 0.0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._exchange_until_closed, name="mm5d-board", daemon=True)

    def start(self, entry: Mapping[str, Any]) -> None:
        """Begin to exchange, with a first entry of this rank."""
        self._entry = dict(entry)
        self._thread.start()

    def post(self, entry: Mapping[str, Any], *, fetches: bool) -> None:
        """Replace this rank's entry from the next exchange on.

        Args:
            entry: JSON values.
            fetches: whether the entries of other ranks are fetched too.
        """
        with self._changed:
            self._entry = dict(entry)
            if fetches and not self._fetches:  # a silence counts from now on
                self.heard.clear()
                self._asked = time.monotonic()
            self._fetches = fetches

    @property
    def have_come(self) -> bool:
        """Whether all ranks are known to have begun this run."""
        entries = list(self.entries.values())
        return len(entries) == self._world_size and all(entry["run"] >= self.run for entry in entries)

    @property
    def is_current(self) -> bool:
        """Whether the entries of other ranks were fetched since they were asked for."""
        return self._fetches and self._fetched >= self._asked

    def blame(self, cause: Entry) -> None:
        """Propose the first cause of a failure; the next exchange keeps the one that was first."""
        with self._changed:
            self._wished = self._wished or cause
            self._changed.notify_all()

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Exchange at once, and after each exchange look whether `condition` holds, for at most `seconds`."""
        end = time.monotonic() + seconds
        with self._changed:
            self._changed.notify_all()
            while not condition():
                left = end - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return bool(condition())
                self._changed.wait(min(left, INTERVAL_S / 5))
                self._changed.notify_all()
        return True

    def close(self, entry: Mapping[str, Any], seconds: float) -> None:
        """Write a last entry and end the thread; a thread that the store does not answer is left to its end."""
        with self._changed:
            self._entry = dict(entry)
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def _exchange_until_closed(self) -> None:
        while self.error is None:
            with self._changed:
                closing, entry, wished, fetches = self._closing, self._entry, self._wished, self._fetches
            try:
                news = (entry["state"], entry["told"])
                # after a failure the store's host may be gone at any moment, and torch prints a stack for each try
                if self.cause is None or self._rank == 0 or news != self._written:
                    self._check_host()
                    self._exchange(entry, wished, fetches)
                    self._written = news
            except Exception as error:  # the store's host is gone
                self.error = str(error).partition("\n")[0]
            with self._changed:
                self._changed.notify_all()
                if closing:
                    return
                self._changed.wait(INTERVAL_S)

    def _exchange(self, entry: Entry, wished: Entry | None, fetches: bool) -> None:
        store, key = self._store, f"cause/{self.run}"
        self._beat += 1
        store.set(str(self._rank), json.dumps({**entry, "run": self.run, "beat": self._beat}))
        if self.cause is None and wished is not None:
            self.cause = json.loads(store.compare_set(key, "", json.dumps(wished)))
        elif self.cause is None and store.check([key]):
            self.cause = json.loads(store.get(key))
        now = time.monotonic()
        if fetches and now - self._fetched >= self._world_size / RANKS_PER_SECOND:
            self._fetch()
            self._fetched = now
        self.synced = time.monotonic()

    def _check_host(self) -> None:
        """Raise where the store's host is known to be gone; also keeps its latest entry."""
        if not self._has_host:
            return
        host = self.entries.get(0)
        if host is not None and host["machine"] == machine() != "" and state_of(host["pid"]) == "gone":
            raise ConnectionError("the process of rank 0 is gone")
        if self._store.check(["0"]):
            entry = json.loads(self._store.get("0"))
            if 0 not in self.heard or entry["beat"] != self.entries[0]["beat"]:
                self.heard[0] = time.monotonic()
            self.entries[0] = entry

    def _fetch(self) -> None:
        keys = [str(rank) for rank in range(self._world_size)]
        known = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        now = time.monotonic()
        for key, text in zip(known, self._store.multi_get(known), strict=True):
            rank, entry = int(key), json.loads(text)
            if rank not in self.heard or entry["beat"] != self.entries[rank]["beat"]:
                self.heard[rank] = now
            self.entries[rank] = entry
