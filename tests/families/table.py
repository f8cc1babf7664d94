"""The table of families as a file of cells, and as a page of the docs that is made of nothing else.

`families.json` holds what was measured: the cells of each family, and where and when. A rerun replaces the cells that
it measures and leaves the others; the page is a function of the file alone.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE, PAGE = ROOT / "benchmarks" / "families.json", ROOT / "docs" / "families.md"
COLUMNS = {
    "found": "found",
    "modality": "modality parallel",
    "pp": "pp",
    "tp": "tp",
    "cp": "cp",
    "ep": "ep",
    "frozen": "frozen",
    "generate": "generate",
    "checkpoint": "checkpoint",
    "recompute": "recompute",
}
"""Names of the columns, and their headings."""
ALONE = "of one modality"
Table = dict[str, Any]

INTRODUCTION = """# Families

What works with which model of transformers {transformers}, measured: each family is built from its configuration with
random weights, shrunk to a few thousand parameters, and trained for two steps on two microbatches under each layout.
A cell is green where losses, gradients and parameters equal those of one process, to a relative difference of 1e-9 in
float64. `✓ float32` is equal to 1e-6 alone, in a model that computes a part in float32, often its loss.
Every other cell says why. No cell is inferred from another.

| column | what was run |
| --- | --- |
| found | encoders are found without a path; the cell names them |
| modality parallel | each encoder on a rank of its own, the language model on another |
| pp, tp, cp | all modalities in two stages, on two tensor parallel ranks, on two context parallel ranks |
| ep | two ranks share the experts of the language model, each with batches of its own |
| frozen | the encoders do not train; then nothing but their projectors trains, see below |
| generate | `model.generate` in a validation step gives the tokens of one process, the language model in two stages |
| checkpoint | saved after the first step, continued under another layout |
| recompute | modality parallel with `activation_checkpointing: full` |

{yes} is measured and equal; {part} is for the language model alone, with encoders on ranks of their own, and its reason
is the encoder's; {near} misses 1e-6 by less than a factor of ten in a model that computes in float32, which may be
rounding and is not proved to be, so that it is not counted as green; {no} is refused or fails; {wrong} trains with
another result; {none} means that the family has nothing to measure there. Numbers point to the reasons below.

Frozen is two runs: in the second, what names show to be a projector trains alone, or the encoders where no name does.
A family without an encoder freezes the first half of its parameters, in one run.

One command measures again what it is asked to, and writes this page:

```bash
python benchmarks/families.py                             # cells that are missing
python benchmarks/families.py --again --workers 2         # everything, two families at once
python benchmarks/families.py --family llava --column tp  # these
```
"""
EXACT = 1e-9
BEFORE = "2026-11-23, before commits were noted"
YES, PART, NEAR, NO, WRONG, NONE = "✓", "part", "near", "✗", "**wrong**", "–"
SIGNS = {"ok": YES, "language": PART, "no": NO, "wrong": WRONG, "near": NEAR, "n/a": NONE, "not built": NO}


def load(path: Path = FILE) -> Table:
    """The table, or an empty one where there is no file."""
    if not path.exists():
        return {"measured": {}, "families": {}}
    table: Table = json.loads(path.read_text())
    return table


def save(table: Table, path: Path = FILE) -> None:
    """Write the table in a stable order, so that it can be compared."""
    table["families"] = dict(sorted(table["families"].items()))
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(table, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    os.replace(beside, path)


def page(table: Table) -> str:
    """The page of the docs."""
    where, rows = table["measured"], table["families"]
    signs = {"yes": YES, "part": PART, "near": NEAR, "no": NO, "wrong": WRONG, "none": NONE}
    built = {name: row for name, row in rows.items() if "cells" in row}
    several = {name: row for name, row in built.items() if row["kind"] != ALONE}
    single = {name: row for name, row in built.items() if row["kind"] == ALONE}
    notes: dict[str, int] = {}
    lines = [INTRODUCTION.format(**where, **signs), counts(rows, several)]
    lines += [
        "## Multimodal families\n",
        *grid(several, notes),
        "\n## Families of one modality\n",
        *grid(single, notes),
    ]
    lines += ["\n## Reasons\n", *(f"{number}. {note}" for note, number in notes.items())]
    lines += ["\n## Not built\n", *missing(rows)]
    if table.get("left"):
        lines += ["\n## Not measured yet\n", f"{', '.join(table['left'])}."]
    versions = f"torch {where['torch']}, lightning {where['lightning']}, transformers {where['transformers']}"
    lines.append(f"\nMeasured on {where['machine']}, {versions}.\n")
    lines += when(rows)
    return "\n".join(lines) + "\n"


def counts(rows: Table, several: Table) -> str:
    """How many families hold what, in one sentence each."""
    green = {key: sum(is_green(row, key) for row in several.values()) for key in COLUMNS}
    rounded = sum(
        cell["status"] == "ok" and is_rounded(cell) for row in several.values() for cell in row["cells"].values()
    )
    three = sum(all(is_green(row, key) for key in ("modality", "pp", "tp")) for row in several.values())
    wrong = sum(cell["status"] == "wrong" for row in several.values() for cell in row["cells"].values())
    each = ", ".join(f"{heading} {green[key]}" for key, heading in COLUMNS.items())
    of_several = sum(row["kind"] != ALONE for row in rows.values())
    return (
        f"{of_several} multimodal families were tried, {len(several)} are built on a CPU. Green: {each}. "
        f"Modality parallel, pp and tp are all green in **{three}**. "
        f"Of the green cells, {rounded} are equal to 1e-6 alone. Cells with another result: {wrong}.\n"
    )


def is_green(row: Table, column: str) -> bool:
    cell = row["cells"].get(column, {})
    return bool(cell.get("status") == "ok")


def is_rounded(cell: Table) -> bool:
    """Whether a cell is equal only to what float32 holds."""
    return bool(cell.get("off", 0.0) > EXACT)


def when(rows: Table) -> Iterable[str]:
    """On which days and commits what was measured; the families by name where it is not the same for all."""
    times: dict[str, list[str]] = {}
    for name, row in rows.items():
        of_row = (
            {cell.get("on", BEFORE) for cell in row["cells"].values()} if "cells" in row else {row.get("on", BEFORE)}
        )
        for one in of_row:
            times.setdefault(one, []).append(name)
    longest = max(times, key=lambda one: len(times[one]), default=BEFORE)
    for one, names in sorted(times.items()):
        few = f"{len(names)} families" if one == longest else ", ".join(names)
        yield f"- {one}: {few}"


def grid(rows: Table, notes: dict[str, int]) -> Iterable[str]:
    """A table in Markdown; reasons get numbers in `notes`."""
    yield "| family | class | " + " | ".join(COLUMNS.values()) + " |"
    yield "| --- | --- |" + " --- |" * len(COLUMNS)
    for name, row in rows.items():
        yield (
            f"| {name} | {row['model']} | " + " | ".join(shown(row["cells"].get(key), notes) for key in COLUMNS) + " |"
        )


def shown(cell: Table | None, notes: dict[str, int]) -> str:
    if cell is None:
        return "not measured"
    note = cell.get("note", "")
    if cell["status"] == "ok":
        return note or (f"{YES} float32" if is_rounded(cell) else YES)
    sign = SIGNS[cell["status"]]
    if not note:
        return sign
    return f"{sign} [{notes.setdefault(escaped(note), len(notes) + 1)}](#reasons)"


def escaped(note: str) -> str:
    for sign in "|<>[]_*":
        note = note.replace(sign, f"\\{sign}")
    return note


CAUSES = {
    r"needs \S+, which is not installed": "Need a package that is not installed",
    r"its configuration shrinks to": "Too large when shrunk",
    r"it draws random numbers": "Draw random numbers in training, so that two runs are never equal",
    r"no batch suits": "Built, but what they take is not known here",
    r"": "Their configuration is not known to shrink",
}
"""Patterns of reasons, and what they have in common; the first that fits counts."""


def missing(rows: Table) -> Iterable[str]:
    """Families without cells, by cause, each with the reason why it is not built."""
    causes: dict[str, list[str]] = {cause: [] for cause in CAUSES.values()}
    for name, row in rows.items():
        if "cells" not in row:
            cause = next(cause for pattern, cause in CAUSES.items() if re.match(pattern, row["why"]))
            causes[cause].append(f"- {name} ({row['kind']}): {escaped(row['why'])}")
    if not any(causes.values()):
        yield "All."
    for cause, names in causes.items():
        if names:
            yield f"{cause} ({len(names)}):\n\n" + "\n".join(names) + "\n"


def summary(table: Table) -> str:
    """One line for each status, for the terminal."""
    found = Counter(cell["status"] for row in table["families"].values() for cell in row.get("cells", {}).values())
    return ", ".join(f"{status}: {number}" for status, number in found.most_common())
