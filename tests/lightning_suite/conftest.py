"""For tests adapted from Lightning's own: limits of time, quiet warnings, and an environment that is put back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only

LIMIT_S = 270


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """A test ends within its limit, and so do the processes that it forked."""

    def too_late(*_: Any) -> None:
        raise TimeoutError(f"the test took more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """Lightning warns of small loaders and sets variables for the processes that it starts; none of it stays."""
    environment, rank = dict(os.environ), vars(rank_zero_only).get("rank")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    os.environ.clear()
    os.environ.update(environment)
    vars(rank_zero_only)["rank"] = rank
