"""For all tests: one thread (processes are forked), quiet logs, float32 unless a test says otherwise."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ranks import POOL
from room_times import room_times

torch.set_num_threads(1)
for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


SET_BY_TRAINERS = (
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
)
BEFORE = {name: os.environ.get(name) for name in SET_BY_TRAINERS}


@pytest.fixture
def float64() -> Iterator[None]:
    """Models and batches in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def _numbers_kept() -> Iterator[None]:
    """The default dtype and whether algorithms are deterministic, put back."""
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(autouse=True, scope="module")
def no_numbers_of_other_files() -> Iterator[None]:
    """What a fixture of a file sets for all its tests ends with the file."""
    with _numbers_kept():
        yield


@pytest.fixture(autouse=True)
def nothing_of_others() -> Iterator[None]:
    """A test leaves no seed to later ones, whose samplers would take it on one side alone, nor ranks or threads.

    A trainer in this process sets both, as a script of which ranks are copies; it sets deterministic algorithms too.
    """
    with _numbers_kept():
        yield
    for name, value in BEFORE.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_group_of_others() -> Iterator[None]:
    """A test that fails in the midst of a run in this process leaves no process group, which later ranks would take."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def new_ranks() -> Iterator[None]:
    """Ranks of `call_ranks` are forked in this test, to see what it changes, and end with it."""
    POOL.close()
    yield
    POOL.close()


# a module that has one of these starts processes in most of its tests
STARTS_PROCESSES = {"run_ranks", "call_ranks", "check_all", "together", "outcomes", "same_steps", "in_both_layouts"}
# layouts that --quick compares with one process
SMOKE = (
    "parity/test_parity.py::test_layouts_with_encoders_equal_one_process[llava-{e} pp 2 | language pp 2]",
    "parity/test_parity.py::test_layouts_with_encoders_equal_one_process[qwen2_5_omni_thinker-{e} with language pp 2]",
    "parity/test_parity.py::test_layouts_of_one_modality_equal_one_process[gpt2-pp 2 dp 2]",
    "parity/test_split_backward.py::test_families_with_all_trainable_equal_one_process[llama_tied-zbv]",
    "tensor_parallel/test_layouts.py::test_one_modality_equals_one_process[llama_tied-tp 2 with sequence shards]",
    "context_parallel/test_layouts.py::test_one_modality_equals_one_process[ring-2]",
)

# tests whose lines others of the default run run too: `scripts/choose_tests.py` writes them
LEFT_OUT = frozenset((Path(__file__).parent / "exhaustive.txt").read_text().splitlines())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and STARTS_PROCESSES & vars(item.module).keys():
            item.add_marker("processes")
        if item.nodeid.endswith(SMOKE):
            item.add_marker("smoke")
        elif item.nodeid in LEFT_OUT:
            item.add_marker("exhaustive")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip("needs a GPU"))
    # files that start processes come first: the last ones that workers take are then short
    long = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: item.path not in long)


def pytest_sessionfinish() -> None:
    POOL.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = room_times(report for reports in terminalreporter.stats.values() for report in reports)
    if len(lines) > 2:  # of several rooms
        terminalreporter.section("seconds and tests of each room")
        terminalreporter.write("\n".join(lines) + "\n")
