"""Keeps what checks found in a JSON file, and writes the page of it. Results of checks that did not run stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Row

HEAD = """# Figures on GPUs

`bash scripts/gpu.sh` measures what is on this page and writes it; [GPUs](gpu.md) says what it needs and what it proves.
"""
NONE = """
**These figures do not exist yet:** no GPU was at hand when this version was written. Run `bash scripts/gpu.sh` on a
machine that has one, and commit `docs/figures_gpu.md` and `docs/figures_gpu.json`. What is known without a GPU, and
how, is in [GPUs](gpu.md#what-was-proved-without-a-gpu).
"""
DRY = """
**A dry run:** a CPU stood for the GPUs, with small sizes. The figures below mean nothing.
"""


def stored_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results in a file, by check; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write results to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the page of results.

    Args:
        results: by check: what `supervisor.run_all` returns, with ``date``, ``command`` and ``machine``.
    """
    if not results:
        return HEAD + NONE
    is_dry = any(result["machine"]["is_dry"] for result in results.values())
    return "\n".join([HEAD + (DRY if is_dry else ""), *(_section(name, result) for name, result in results.items())])


def _section(name: str, result: dict[str, Any]) -> str:
    rows = [Row(**row) for row in result["rows"]]
    lines = [
        f"## {result['title']}",
        "",
        f"`{result['command']}` (`{name}`), {result['date']}, {result['seconds']} s; {described(result['machine'])}",
        "",
        "| figure | measured | aim | met | note |",
        "| --- | --- | --- | --- | --- |",
        *(_line(row) for row in rows),
        "",
    ]
    for row in rows:
        if "\n" in row.note:
            lines += ["```text", row.note.replace("```", "'''"), "```", ""]
    return "\n".join(lines)


def _line(row: Row) -> str:
    value = row.status if row.status != "measured" else "" if row.value is None else f"{row.value:.4g} {row.unit}"
    met = {None: "", True: "yes", False: "**no**"}[row.met]
    cells = (row.name, value.strip(), row.aim, met, row.note.split("\n")[0])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def described(machine: dict[str, Any]) -> str:
    """Return the GPUs and versions of a machine as text."""
    names = [gpu["name"] for gpu in machine["gpus"]]
    each = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)] or ["no GPU"]
    versions = [f"{key} {machine[key]}" for key in ("driver", "torch", "cuda", "nccl") if machine[key]]
    return ", ".join([*each, *versions])
