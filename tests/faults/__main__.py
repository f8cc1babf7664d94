"""The scorecard: ``python -m tests.faults`` runs every fault once and prints what the runs ended with.

Every case proves that its fault fired, and none is repeated. Exits with 1 where a case did not end as it should.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from . import configurations, trees
from .cases import trees as tree_cases


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the random faults")
    parser.add_argument("--quick", action="store_true", help="one case in eight of every class")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose 'class: name' contains it")
    parser.add_argument("--show", action="store_true", help="print what failing cases printed")
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    options = parser.parse_args(argv)
    rows: list[tuple[str, ...]] = []
    failed = 0
    start = time.monotonic()
    if not options.list and (not options.only or options.only in "configurations"):
        row, lines = configurations.score()
        print(*lines, sep="\n", end="\n" if lines else "")
        rows.append(row)
        failed += len(lines)
    for kind, cases in tree_cases(options.seed).items():
        chosen = [case for case in cases if options.only in f"{kind}: {case.name}"]
        chosen = chosen[::8] if options.quick else chosen
        if options.list:
            print(*(f"{kind}: {case.name}" for case in chosen), sep="\n")
            continue
        records = []
        for case in chosen:
            record = trees.run(case)
            records.append(record)
            verdict = "passed" if record.passed else "FAILED: " + "; ".join(record.problems)
            figures = f"{record.seconds:.1f} s, {record.lines} lines, exit code {record.code}"
            print(f"{kind}: {case.name}: {verdict} ({figures})\n    last line: {record.last[:300]}", flush=True)
            if options.show and not record.passed:
                print(record.printed, flush=True)
        if records:
            rows.append(_row(kind, records))
            failed += sum(not record.passed for record in records)
    if rows:
        print(f"\n{_table(rows)}\n\n{time.monotonic() - start:.0f} s, {failed} failed")
    return 1 if failed else 0


def _row(kind: str, records: Sequence[trees.Record]) -> tuple[str, ...]:
    seconds = sorted(record.seconds for record in records)
    return (
        kind,
        f"{sum(record.passed for record in records)} / {len(records)}",
        f"{sum(record.fired for record in records)}",
        f"{sum(record.ended for record in records)}",
        f"{seconds[len(seconds) // 2]:.1f}",
        f"{seconds[-1]:.1f}",
        f"{max(record.lines for record in records)}",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    header = ("class", "passed / cases", "fired", "all ranks ended", "median s", "longest s", "most lines")
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
