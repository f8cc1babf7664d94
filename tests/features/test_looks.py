"""The monitor does not read the frames of a thread that runs and comes forward: CPython may crash where it does."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest

from lightning_mm5d.monitor import stack
from lightning_mm5d.monitor.monitor import Monitor


def monitor(position: Any) -> Monitor:
    nothing: Any = lambda *_: None  # noqa: E731
    return Monitor(0, 1, 60.0, blocking={}, position=position, wake=nothing, children=dict, report=nothing)


def computed_until(future: Future[Any]) -> Any:
    """Let the calling thread compute until `future` has a result."""
    while not future.done():
        sum(range(1000))
    return future.result()


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clock of a thread")
def test_a_thread_runs_or_waits() -> None:
    with ThreadPoolExecutor(1) as other:
        main = threading.get_ident()
        assert any(computed_until(other.submit(stack.runs, main)) for _ in range(5))
        assert not all(other.submit(stack.runs, main).result() for _ in range(5))


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clock of a thread")
def test_only_a_thread_that_waits_or_stands_is_looked_at() -> None:
    numbers = itertools.count()
    moving, standing = monitor(lambda: {"batch": next(numbers)}), monitor(lambda: {"batch": 1})
    with patch.object(stack, "runs", lambda thread: True), patch.object(stack, "look") as look:
        now = time.monotonic()
        for passed in (0.0, 0.5, 1.0, 1.9):
            moving._look(now + passed)
            standing._look(now + passed)
        assert not look.called
        moving._look(now + 5.0)
        assert not look.called
        standing._look(now + 5.0)
        assert look.call_count == 1
        with patch.object(stack, "runs", lambda thread: False):
            moving._look(now + 6.0)
        assert look.call_count == 2
