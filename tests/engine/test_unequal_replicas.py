"""Replicas that share ranks and have unequal numbers of microbatches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.engine.engine import count_of


def test_unequal_numbers_of_microbatches_on_shared_ranks_are_refused_by_name() -> None:
    assert count_of(SimpleNamespace(microbatches={0: [1, 2], 1: [1, 2]})) == 2  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got '2 of replica 0, 1 of replica 1'"):
        count_of(SimpleNamespace(microbatches={0: [1, 2], 1: [1]}))  # type: ignore[arg-type]
