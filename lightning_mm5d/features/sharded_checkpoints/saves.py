"""The saves of one rank: one at a time, each in the calling thread or in one of its own.

What has to wait for a save, such as the deletion of an older checkpoint, is done after it, and not at all where it
fails. An error of a thread is raised by `finish`, on all ranks, because all of them hear how a save ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from lightning_mm5d.checkpoint.rank_reports import joined
from lightning_mm5d.features.sharded_checkpoints.sharded_save import Save

FAILED_RUN_S = 20.0
"""how long a run that has failed waits for a save that other ranks may never finish"""


class Saves:
    """Runs the phases of saves after their first one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._after: list[Callable[[], object]] = []
        self._is_busy = False
        self._lock = threading.Lock()

    @property
    def has_failed(self) -> bool:
        """Whether a save in a thread has failed, which `finish` would raise."""
        return self._error is not None

    def run(self, save: Save, *, in_thread: bool) -> None:
        """Write and conclude a save whose pieces are taken.

        Args:
            save: after `Save.take`.
            in_thread: whether to return at once.
        """
        if not in_thread:
            try:
                save.write()
            except Exception:
                raise
            except BaseException:
                save.drop()
                raise
            return

        def work() -> None:
            try:
                save.write()
                while action := self._next():
                    action()
            except BaseException as error:
                with self._lock:
                    self._error, self._is_busy = error, False
                    self._after.clear()

        self._is_busy = True
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def then(self, action: Callable[[], object]) -> None:
        """Call `action` once no save is under way; not at all where that one fails, which `finish` raises."""
        with self._lock:
            if self._is_busy:
                self._after.append(action)
            if self._is_busy or self._error is not None:
                return
        action()

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            self._is_busy = bool(self._after)
            return self._after.pop(0) if self._after else None

    def finish(self) -> None:
        """Wait for the save that is under way; raise the error that a thread ended with."""
        joined(self._thread)
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, *, failed: bool) -> None:
        """Wait for the save that is under way; after a failed run not for long, and without its error."""
        if not failed:
            self.finish()
            return
        with suppress(BaseException):
            joined(self._thread, FAILED_RUN_S)
        self._thread = None
