"""For all tests: one thread (processes are forked), quiet logs, float32 unless a test says otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from ranks import POOL

torch.set_num_threads(1)
for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


@pytest.fixture
def float64() -> Iterator[None]:
    """Models and batches in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def new_ranks() -> Iterator[None]:
    """Ranks of `call_ranks` are forked in this test, to see what it changes, and end with it."""
    POOL.close()
    yield
    POOL.close()


def pytest_sessionfinish() -> None:
    POOL.close()
