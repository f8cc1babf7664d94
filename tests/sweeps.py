"""Products of cases, of which the default run holds a part; `exhaustive` holds the rest.

The part is generated and seeded. `covering` chooses the fewest cases in which every value of an aspect still occurs, or
every pair of values. `dealt` gives a file one layout of those that its tests are written for; over all files, every
layout occurs.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import pytest

SEED = 40


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


def covering(
    cases: Iterable[Sequence[Hashable]], *aspects: tuple[int, ...], kept: Collection[Sequence[Hashable]] = ()
) -> list[Any]:
    """All cases; the default run holds `kept`, and a few more in which all values of each aspect occur.

    Args:
        cases: the values of each case.
        aspects: places of values. ``(0,)`` covers each first value, ``(0, 1)`` each pair of a first and a second.
        kept: cases that the default run holds in any case.
    """
    cases = [tuple(case) for case in cases]
    found = {case: {(aspect, *(case[place] for place in aspect)) for aspect in aspects} for case in cases}
    chosen = [tuple(case) for case in kept]
    assert set(chosen) <= set(cases), "a case that is kept is one of the cases"
    missing = set().union(*found.values()).difference(*(found[case] for case in chosen))
    left = random.Random(SEED).sample(cases, len(cases))
    while missing:
        best = max(left, key=lambda case: len(found[case] & missing))
        chosen.append(best)
        missing -= found[best]
    return [pytest.param(*case, marks=() if case in chosen else pytest.mark.exhaustive) for case in cases]


def dealt(file: str, cases: Iterable[Any], count: int = 1) -> list[Any]:
    """All cases; the default run holds `count` of them, drawn by a seed of this `file`."""
    cases = list(cases)
    drawn = random.Random(f"{SEED} {file.rpartition('/tests/')[2]}").sample(range(len(cases)), count)
    return [
        pytest.param(case, marks=() if index in drawn else pytest.mark.exhaustive) for index, case in enumerate(cases)
    ]
