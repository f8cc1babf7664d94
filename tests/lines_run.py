"""A plugin of pytest that writes which lines of the package each test runs, in all its processes, and what it costs.

``COVER=FOLDER python -m pytest -p lines_run`` (Python 3.12 or newer) writes files there, for `scripts/choose_tests.py`.
`sys.monitoring` reports each line once for a test, so that tests run nearly as fast as without. Only lines of functions
count: those of modules and classes run where something imports them first. Ranks of `ranks` say what they ran after
each call, other forked processes at their end, and those that are killed or newly started nothing.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import lightning_mm5d

PACKAGE = f"{Path(lightning_mm5d.__file__).parent}/"
OUT = Path(os.environ["COVER"]).absolute()
TOOL = 4
ELSEWHERE = ""
"""the test that is named while none runs"""


class Lines:
    """What this process has run of the package since the test under way began."""

    def __init__(self) -> None:
        self.test = _test_of(os.environ)
        self.found: dict[str, set[int]] = {}

    def begin(self) -> None:
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        monitoring.use_tool_id(TOOL, "lines_run")
        monitoring.register_callback(TOOL, monitoring.events.PY_START, self._function)
        monitoring.register_callback(TOOL, monitoring.events.LINE, self._line)
        monitoring.set_events(TOOL, monitoring.events.PY_START)
        atexit.register(self.end)
        leave = os._exit

        def written(status: int) -> None:
            self.write()
            leave(status)

        os._exit = written  # type: ignore[assignment]

    def end(self) -> None:
        self.write()
        sys.monitoring.set_events(TOOL, 0)  # type: ignore[attr-defined]

    def turn_to(self, test: str) -> None:
        """Count what follows for `test`."""
        if test != self.test:
            self.write()
            self.test = test
            sys.monitoring.restart_events()  # type: ignore[attr-defined]

    def write(self, **seconds: float) -> None:
        """Append what was found to this process's file, and CPU `seconds` that the test took, by where."""
        lines = {name: sorted(numbers) for name, numbers in list(self.found.items())}
        self.found.clear()
        if lines or seconds:
            with open(OUT / f"{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps({"test": self.test, "seconds": seconds, "lines": lines}) + "\n")

    def _function(self, code: CodeType, _: int) -> Any:
        events = sys.monitoring.events  # type: ignore[attr-defined]
        if code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(PACKAGE):
            sys.monitoring.set_local_events(TOOL, code, events.LINE)  # type: ignore[attr-defined]
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]

    def _line(self, code: CodeType, line: int) -> Any:
        self.found.setdefault(code.co_filename.removeprefix(PACKAGE), set()).add(line)
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]


def _test_of(environment: Any) -> str:
    return environment.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


LINES = Lines()
LINES.begin()


def pytest_configure() -> None:
    import ranks

    call = ranks.Call.__call__

    def counted(self: ranks.Call, rank: int) -> bytes:
        LINES.turn_to(_test_of(self.environment))
        begun = time.process_time()
        try:
            return call(self, rank)
        finally:
            LINES.write(ranks=time.process_time() - begun)
            LINES.turn_to(ELSEWHERE)

    ranks.Call.__call__ = counted  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    LINES.turn_to(item.nodeid)
    begun = time.process_time(), _of_processes()
    result = yield
    LINES.write(here=time.process_time() - begun[0], ended=_of_processes() - begun[1])
    return result


def _of_processes() -> float:
    """CPU seconds of processes that have ended: no ranks that stay."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
