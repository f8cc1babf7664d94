"""The monitor reads no frame of a thread that runs or comes forward: CPython may crash where it does."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from lightning_mm5d.monitor import stack
from lightning_mm5d.monitor.monitor import Monitor
from lightning_mm5d.sharded.host_copies import _noting


def monitor(position: Any) -> Monitor:
    nothing: Any = lambda *_: None  # noqa: E731
    return Monitor(0, 1, 60.0, blocking={}, position=position, wake=nothing, children=dict, report=nothing)


def test_no_frame_is_read_of_a_thread_that_runs_or_waits_outside_of_torch_distributed() -> None:
    closing, looker = threading.Event(), stack.Looker({})
    both = threading.Barrier(3)

    def run() -> None:
        both.wait(10)
        while not closing.is_set():
            sum(range(1000))

    def wait() -> None:
        both.wait(10)
        closing.wait()

    threads = [threading.Thread(target=stack.readable()(one)) for one in (run, wait)]
    for thread in threads:
        thread.start()
    both.wait(10)
    with patch.object(stack, "_get_frame") as read:
        for thread, _ in itertools.product(threads, range(3)):
            assert thread.ident is not None
            looker.look(thread.ident)
    closing.set()
    for thread in threads:
        thread.join()
    assert not read.called


def test_the_frame_of_a_function_of_torch_distributed_is_read_when_it_is_seen_in_the_same_place_again() -> None:
    names: dict[str, Any] = {"event": threading.Event(), "begun": threading.Event()}
    definition = "def all_reduce(group=None): begun.set(); event.wait(timeout=10)"
    exec(compile(definition, str(Path(dist.__file__).parent / "distributed_c10d.py"), "exec"), names)
    thread = threading.Thread(target=stack.readable()(names["all_reduce"]))
    thread.start()
    assert thread.ident is not None
    assert names["begun"].wait(10)
    looker = stack.Looker({})
    with patch.object(stack, "_get_frame", side_effect=stack._get_frame) as read:
        for position, has_read in enumerate((False, False, True)):
            found = looker.look(thread.ident, None, min(position, 1))
            assert (found.wait is not None, read.called) == (has_read, has_read)
    names["event"].set()
    thread.join()


def test_a_collective_that_waits_behind_the_notes_of_writes_is_seen() -> None:
    begun, event = threading.Event(), threading.Event()
    names: dict[str, Any] = {"collective": _noting(lambda _: begun.set(), event.wait)}
    definition = "def all_reduce(group=None): collective()"
    exec(compile(definition, str(Path(dist.__file__).parent / "distributed_c10d.py"), "exec"), names)
    thread = threading.Thread(target=stack.readable()(names["all_reduce"]))
    thread.start()
    assert thread.ident is not None
    assert begun.wait(10)
    looker = stack.Looker({})
    for _ in range(3):
        found = looker.look(thread.ident)
        time.sleep(0.05)  # so that the thread reaches the wait
    event.set()
    thread.join()
    assert found.wait is not None
    assert found.wait.operation == "all_reduce"


def test_only_a_thread_that_stands_is_looked_at() -> None:
    numbers = itertools.count()
    moving, standing = monitor(lambda: {"batch": next(numbers)}), monitor(lambda: {"batch": 1})
    with patch.object(moving._looker, "look") as at_moving, patch.object(standing._looker, "look") as at_standing:
        now = time.monotonic()
        for passed in (0.0, 0.2, 0.4):
            moving._look(now + passed)
            standing._look(now + passed)
        assert not at_standing.called
        moving._look(now + 5.0)
        assert not at_moving.called
        standing._look(now + 5.0)
        assert at_standing.call_count == 1
