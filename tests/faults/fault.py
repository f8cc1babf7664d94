"""Faults of `faulty_job`: each fires once, at one phase of one rank or of all."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class BoomError(Exception):
    """The user's own mistake."""


class Fault:
    """Fires once, at one phase of one rank (or of all, with ``rank=-1``)."""

    def __init__(self, folder: Path, case: dict[str, Any]) -> None:
        self.folder, self.case = folder, case
        self.rank = int(os.environ.get("LOCAL_RANK", 0))
        self.mine = case.get("rank", 0) in (-1, self.rank)
        self.action: Callable[[], Any] = getattr(self, case.get("action", "nothing"))

    def at(self, phase: str, batch_idx: int | None = None) -> Any:
        case = self.case
        if not self.mine or case.get("phase") != phase:
            return None
        if batch_idx is not None and batch_idx != case.get("batch", 1):
            return None
        if (self.folder / f"fired-{self.rank}").exists():
            return None
        self.mark()
        return self.action()

    def mark(self) -> None:
        path = self.folder / f"fired-{self.rank}"
        path.with_suffix(".new").write_text(repr(time.time()))
        path.with_suffix(".new").rename(path)

    def nothing(self) -> None:
        pass

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def term(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def term_parent(self) -> None:
        os.kill(int((self.folder / "started-0").read_text()), signal.SIGTERM)

    def term_all(self) -> None:
        for path in self.folder.glob("started-?"):
            os.kill(int(path.read_text()), signal.SIGTERM)

    def interrupt_all(self) -> None:
        for path in self.folder.glob("started-?"):
            os.kill(int(path.read_text()), signal.SIGINT)

    def hang(self) -> None:
        time.sleep(3600)

    def spin(self) -> None:
        while True:
            pass

    def leave(self) -> None:
        os._exit(3)

    def exit(self) -> None:
        sys.exit(3)

    def abort(self) -> None:
        os.abort()

    def boom(self) -> None:
        raise BoomError("the user's own mistake")

    def failed_assert(self) -> None:
        raise AssertionError("the user's own mistake")

    def out_of_memory(self) -> None:
        raise torch.OutOfMemoryError("the user's own mistake: out of memory")

    def wrong_shape(self) -> None:
        torch.zeros(2, 3) @ torch.zeros(2, 3)

    def many_lines(self) -> None:
        raise BoomError("the user's own mistake\n" + "\n".join(f"detail {number}" for number in range(40)))

    def later(self) -> None:
        time.sleep(2)
