"""The table of ordinary uses: what is expected of each cell (`expected.json`), and its page in the docs.

``PYTHONPATH=tests .venv/bin/python -m ordinary.table [words]`` runs the rows whose name holds the words (all without),
writes both files, and prints faults, which have no place in the table: a row with one is left out of it.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path

from ordinary.cells import COLUMNS, HEADINGS, Outcome, outcomes
from ordinary.rows import USES
from ranks import POOL

EXPECTED = Path(__file__).parent / "expected.json"
PAGE = Path(__file__).parents[2] / "docs" / "ordinary.md"
BATCH = 12
"""cells that run in the same processes, one after the other"""
Table = dict[str, dict[str, Outcome]]
HEAD = """\
# Ordinary uses

What Lightning users ordinarily write, and what becomes of it in each layout. Every cell was compared with a run of
plain Lightning in one process: losses, logged values, final parameters, and what else the use observes, in float64 to
1e-9.

- **equal**: the same, on every rank.
- **refused**: an error says why not, and what works; it stands below.
- **differs**: known to differ, for the reason below.

The columns: *one process* of this strategy; *replicas*, two of the whole model, compared with a run in the order of
Lightning's distributed sampler; *vision | language* on a rank each, with two microbatches; *pp 2*, the language model
in two stages, with two microbatches; *tp 2*, all layers sharded over two ranks; *zero 3*, two replicas with
`zero_stage: 3`.

The page is written by `PYTHONPATH=tests .venv/bin/python -m ordinary.table`; tests hold it against the runs.
"""


def read() -> Table:
    """The expected outcomes by row and column."""
    lines = json.loads(EXPECTED.read_text())
    return {
        name: {column: Outcome(*cells.get(column, ["equal"])) for column in COLUMNS} for name, cells in lines.items()
    }


def write(table: Table) -> None:
    """Write the expected outcomes, a row a line, with cells that are not equal, and the page."""
    lines = []
    for name in USES:
        if name in table:
            cells = {c: [o.kind, o.text] for c, o in table[name].items() if o.kind != "equal"}
            lines.append(f"{json.dumps(name)}: {json.dumps(cells)}")
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    PAGE.write_text(page(table))


def page(table: Table) -> str:
    """The page of the docs."""
    notes: dict[Outcome, int] = {}
    parts = [HEAD]
    counts = {kind: sum(o.kind == kind for row in table.values() for o in row.values()) for kind in KINDS}
    said = f"{counts['equal']:,} cells are equal, {counts['refused']} refused, and {counts['differs']} differ"
    parts.append(f"Of {len(table)} uses {said}.\n")
    names = [name for name in USES if name in table]
    for section, rows in groupby(names, lambda name: USES[name].section):
        parts.append(f"## {section}\n\n| use | {' | '.join(HEADINGS.values())} |\n|{' --- |' * (len(HEADINGS) + 1)}")
        for name in rows:
            cells = " | ".join(_cell(table[name][column], notes) for column in COLUMNS)
            title = USES[name].title.replace("|", "\\|")
            parts.append(f"| {title} | {cells} |")
        parts.append("")
    parts.append("## Why not\n")
    parts += [f"[^{number}]: {_escaped(outcome)}" for outcome, number in notes.items()]
    return "\n".join(parts) + "\n"


KINDS = ("equal", "refused", "differs")


def _cell(outcome: Outcome, notes: dict[Outcome, int]) -> str:
    if outcome.kind == "equal":
        return "equal"
    return f"{outcome.kind}[^{notes.setdefault(outcome, len(notes) + 1)}]"


def _escaped(outcome: Outcome) -> str:
    return f"`{outcome.text.replace('`', chr(39))}`" if outcome.kind == "refused" else outcome.text


def main(words: list[str]) -> int:
    """Run the rows that hold `words`, write the table, and return the number of faults."""
    asked = [name for name in USES if all(word.lower() in name.lower() for word in words)]
    found: Table = {name: {} for name in asked}
    for column in COLUMNS:
        for start in range(0, len(asked), BATCH):
            for name, outcome in outcomes(column, asked[start : start + BATCH]).items():
                found[name][column] = outcome
    POOL.close()
    faults = {name: row for name, row in found.items() if any(o.kind == "fault" for o in row.values())}
    for name, row in faults.items():
        for column, outcome in row.items():
            if outcome.kind == "fault":
                print(f"{name} | {column} | {outcome.text}")
    table = read() if EXPECTED.exists() else {}
    table = {name: row for name, row in (table | found).items() if name in USES and name not in faults}
    write(table)
    print(f"{len(table)} rows, {len(faults)} left out for faults")
    return len(faults)


if __name__ == "__main__":
    import conftest  # noqa: F401  (quiet logs, one thread)

    sys.exit(min(main(sys.argv[1:]), 1))
