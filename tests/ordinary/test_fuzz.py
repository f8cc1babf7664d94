"""Random LightningModules, made of ordinary uses, train as on one process, or are refused by name."""

from __future__ import annotations

import pytest

from ordinary.fuzz import Seed, batches, outcomes
from ranks import call_ranks

assert call_ranks  # for the mark of tests that start processes


def _params() -> list:
    """50 seeds by default, and 2,000 under `exhaustive`."""
    more = [pytest.param(seeds, marks=pytest.mark.exhaustive) for seeds in batches(50, 2000)]
    return [pytest.param(seeds) for seeds in batches(0, 50)] + more


@pytest.mark.parametrize("seeds", _params(), ids=lambda seeds: f"{seeds[0].column}-{seeds[0].number}")
def test_random_modules_are_equal_or_refused(seeds: list[Seed]) -> None:
    """two replicas | vision: rank 0, language: rank 1 | two stages | two shards | two replicas in rows"""
    found = outcomes(seeds)
    faults = {str(seed): outcome.text for seed, outcome in found.items() if outcome.kind == "fault"}
    assert not faults
