"""The store that ranks meet at."""

from __future__ import annotations

import gc
from datetime import timedelta

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_mm5d.trainer.process_group import free_port, rendezvous_store

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
