"""Products of cases, of which the default run holds a part that still pairs every value with others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def swept(cases: Iterable[Any], *exhaustive: Any) -> list[Any]:
    """All cases; those named in `exhaustive` run under ``pytest -m exhaustive`` alone."""
    return [pytest.param(case, marks=pytest.mark.exhaustive if case in exhaustive else ()) for case in cases]


def every(nth: int, rows: Iterable[Any], columns: Iterable[Any], offset: int = 0) -> list[Any]:
    """All pairs of a row and a column; the default run holds each `nth` of every row and of every column."""
    return [
        pytest.param(row, column, marks=() if (i + j + offset) % nth == 0 else pytest.mark.exhaustive)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
