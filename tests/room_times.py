"""Seconds that the tests of each room took, for the end of a run: over all workers, with what fixtures took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


def room_times(reports: Iterable[Any]) -> list[str]:
    """Return a line for each room with its seconds and its tests, longest first, and a line of their sum.

    Args:
        reports: of pytest, of set-ups, calls and tear-downs. Others, which lack a duration, count nothing.
    """
    seconds, tests = Counter[str](), dict[str, set[str]]()
    for report in reports:
        if hasattr(report, "duration") and hasattr(report, "nodeid"):
            room = room_of(report.nodeid)
            seconds[room] += report.duration
            tests.setdefault(room, set()).add(report.nodeid)
    lines = [f"{seconds[room]:8.1f} s {len(tests[room]):6,} {room}" for room, _ in seconds.most_common()]
    return [*lines, f"{seconds.total():8.1f} s {sum(map(len, tests.values())):6,} all"]


def room_of(nodeid: str) -> str:
    """Return the top folder of a test below ``tests/``, or its file where it lies in no folder."""
    return nodeid.partition("::")[0].removeprefix("tests/").partition("/")[0]
