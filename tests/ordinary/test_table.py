"""Each cell of the table of ordinary uses is as it is written: equal to plain Lightning, refused, or known to differ.

The default run holds each row in one column: each section with one row in each layout of ranks, drawn by a seed, and
its other rows on one process. `exhaustive` holds all cells. What changes on purpose is written anew by
``PYTHONPATH=tests .venv/bin/python -m ordinary.table``.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import groupby

import pytest

from ordinary.cells import COLUMNS, outcomes
from ordinary.rows import USES
from ordinary.table import BATCH, KINDS, PAGE, page, read
from ranks import call_ranks
from sweeps import SEED

EXPECTED = read()
assert call_ranks  # for the mark of tests that start processes


def _batches() -> list:
    """Names of a column's rows, `BATCH` a test: those of the seeded cover, and the others under `exhaustive`."""
    cover = dict.fromkeys(EXPECTED, "one")
    on_ranks = [column for column in COLUMNS if column != "one"]
    for _, rows in groupby(EXPECTED, lambda name: USES[name].section):
        names = list(rows)
        cover |= zip(random.Random(SEED).sample(names, len(names)), on_ranks, strict=False)
    params = []
    for column in COLUMNS:
        for marks, names in (
            ((), [name for name in EXPECTED if cover[name] == column]),
            (pytest.mark.exhaustive, [name for name in EXPECTED if cover[name] != column]),
        ):
            for start in range(0, len(names), BATCH):
                kind = "more" if marks else "cover"
                batch = names[start : start + BATCH]
                params.append(pytest.param(column, batch, marks=marks, id=f"{column}-{kind}-{start}"))
    return params


@pytest.mark.parametrize(("column", "names"), _batches())
def test_cells_are_as_the_table_says(column: str, names: list[str]) -> None:
    """one process | two replicas | vision: rank 0, language: rank 1 | two stages | two shards | two replicas in rows"""
    found = outcomes(column, names)
    changed = {name: (EXPECTED[name][column], found[name]) for name in names if found[name] != EXPECTED[name][column]}
    assert not changed


def test_the_page_shows_the_table() -> None:
    assert PAGE.read_text() == page(EXPECTED)


def test_the_table_holds_uses_in_order_and_no_fault() -> None:
    assert list(EXPECTED) == list(USES)
    assert len(EXPECTED) >= 250
    assert Counter(outcome.kind for row in EXPECTED.values() for outcome in row.values()).keys() <= set(KINDS)
