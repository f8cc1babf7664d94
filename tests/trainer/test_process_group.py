"""The store that ranks meet at."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.trainer.process_group import connect, free_port, rendezvous_store
from ranks import run_ranks

TIMEOUT = timedelta(seconds=10)


def environment(rank: int) -> LightningEnvironment:
    ours = LightningEnvironment()
    ours.set_global_rank(rank)
    return ours


def test_a_rank_that_is_in_the_next_run_already_keeps_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """rank 0 lets go of all that a failed run had, also of its store, and opens that of the next run late"""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    failed = rendezvous_store(environment(0), TIMEOUT)
    early = rendezvous_store(environment(1), TIMEOUT)
    early.set("rank 1", "is there")
    del failed
    gc.collect()
    assert early.get("rank 1") == b"is there"
    assert rendezvous_store(environment(0), TIMEOUT).get("rank 1") == b"is there"


def connected(rank: int, backend: str, chosen: str | None) -> str:
    """What is said of a run on a GPU in a process that has a group of `backend` already."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            connect(environment(0), dist.HashStore(), chosen, TIMEOUT, torch.device("cuda", 0))
        except ConfigError as error:
            return str(error)
    return "".join(str(one.message) for one in caught)


def test_a_group_of_an_earlier_run_that_does_not_fit_the_device_is_told_of() -> None:
    assert "which carries no tensors of cuda" in run_ranks(1, connected, "cpu:gloo", None)[0]
    assert "through host memory" in run_ranks(1, connected, "gloo", None)[0]
    assert run_ranks(1, connected, "gloo", "gloo") == [""]


COLLECTS_EARLY = """
import gc, os
from lightning_mm5d.trainer.process_group import _keep_garbage_in_forks

class Group:
    def __del__(self):
        print("ends", "in the fork" if os.getpid() != first else "where it was made", flush=True)

os.register_at_fork(after_in_child=lambda: (gc.set_threshold(1, 1, 1), [[] for _ in range(100)]))
_keep_garbage_in_forks()
first = os.getpid()
gc.collect()
earlier = Group()
earlier.cycle = earlier
del earlier
if os.fork() == 0:
    [[] for _ in range(100)]
    os._exit(0 if gc.isenabled() else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert gc.isenabled()
gc.collect()
"""


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="there are no forks")
def test_a_fork_never_ends_what_its_parent_has_left_also_where_other_functions_for_forks_allocate() -> None:
    ended = subprocess.run([sys.executable, "-c", COLLECTS_EARLY], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["ends where it was made"]
