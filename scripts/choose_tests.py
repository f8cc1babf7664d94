"""Choose which tests that train on ranks the default run holds, by the lines that they run; write tests/exhaustive.txt.

usage: python scripts/choose_tests.py FOLDER [--seconds 900]

FOLDER holds what a whole run measured (Python 3.12 or newer, ``-p no:cacheprovider`` leaves nothing else behind):

    COVER=FOLDER python -m pytest -p lines_run -n 3 --dist loadfile

The default run keeps all tests that are cheap, those that start processes whose lines nobody sees, and of the others as
many as CPU `--seconds` allow: always the one whose lines are the rarest for its price. A line counts a half for the
second test that runs it, a quarter for the third, so that first every line is run, and then most of them by several
tests. What is left out moves to `exhaustive`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIST = Path(__file__).parent.parent / "tests" / "exhaustive.txt"
CHEAP_S = 0.7
"""tests of less stay: together they take little"""
UNSEEN_S = 3.0
"""processes that are no ranks of `ranks` took so long"""
ALWAYS = ("tests/ordinary/", "tests/lightning_suite/", "tests/parity/test_parity.py", "tests/test_")
"""what holds a contract whatever lines it runs; the last ones read the code"""

Line = tuple[str, int]


@dataclass
class Test:
    """One test: its CPU seconds, and the lines of the package that it ran in all its processes."""

    name: str
    here: float = 0.0
    ended: float = 0.0
    ranks: float = 0.0
    lines: set[Line] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        # where ranks end that stay over many tests, this one did not take all their time
        return self.here + (self.ranks or self.ended)

    @property
    def stays(self) -> bool:
        is_unseen = not self.ranks and self.ended > UNSEEN_S
        return self.seconds < CHEAP_S or is_unseen or self.name.startswith(ALWAYS)


def measured(folder: Path) -> list[Test]:
    """Return the tests of all records in `folder`."""
    tests: dict[str, Test] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row in path.read_text().splitlines():
            record = json.loads(row)
            test = tests.setdefault(record["test"], Test(record["test"]))
            for where, seconds in record["seconds"].items():
                setattr(test, where, getattr(test, where) + seconds)
            test.lines |= {(name, line) for name, lines in record["lines"].items() for line in lines}
    return [test for test in tests.values() if test.here]


def chosen(tests: Sequence[Test], seconds: float) -> list[Test]:
    """Return the tests of the default run, of which those that are chosen take up to `seconds`."""
    kept = [test for test in tests if test.stays]
    worth: defaultdict[Line, float] = defaultdict(lambda: 1.0)
    for test in kept:
        _run(test, worth)
    left = [test for test in tests if test not in kept]
    gains = {test.name: float("inf") for test in left}
    while left:
        # what a test gains only falls, so that one that leads again after it was counted anew leads for certain
        left.sort(key=lambda test: -gains[test.name])
        first = left[0]
        gain = sum(worth[line] for line in first.lines) / first.seconds
        if gain < gains[first.name]:
            gains[first.name] = gain
            continue
        left.pop(0)
        if first.seconds <= seconds:
            seconds -= first.seconds
            kept.append(first)
            _run(first, worth)
    return kept


def _run(test: Test, worth: defaultdict[Line, float]) -> None:
    for line in test.lines:
        worth[line] /= 2


def _figures(tests: Iterable[Test]) -> tuple[int, float, int]:
    tests = list(tests)
    return len(tests), sum(test.seconds for test in tests), len(set().union(*(test.lines for test in tests)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=900.0)
    arguments = parser.parse_args()
    tests = measured(arguments.folder)
    kept = chosen(tests, arguments.seconds)
    names = {test.name for test in kept}
    LIST.write_text("".join(f"{name}\n" for name in sorted(test.name for test in tests if test.name not in names)))
    for words, some in (("all", tests), ("default", kept)):
        count, seconds, lines = _figures(some)
        print(f"{words:8} {count:6,} tests {seconds:8,.0f} s {lines:7,} lines")


if __name__ == "__main__":
    main()
