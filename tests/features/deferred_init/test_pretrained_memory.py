"""A model of over 2 GB is loaded by four ranks that hold their own share of it and, at most, one tensor beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("layout", ["vision | language in 3 stages", "vision tp 2 | language tp 2"])
def test_each_rank_reads_and_keeps_its_own_share(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0-3, as the layout says."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from pretrained_memory import LAYOUTS, measured, write

    sizes = write(tmp_path, layers=36)
    assert sum(sizes) > 2 * 10**9
    for rank in measured(tmp_path, LAYOUTS[layout]):
        assert rank["memory"] <= 1.15 * rank["share"] + max(sizes)
        assert rank["read"] <= 1.05 * rank["share"]
