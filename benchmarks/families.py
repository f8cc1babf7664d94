"""What works with which family of transformers: measures the cells of the table, and writes its page in the docs.

Each cell is a run of a shrunk model on two to five processes that is compared with one process. Cells that
`benchmarks/families.json` has are kept; the families and columns that are named are measured again. Every cell has a
limit of time, and ranks that exceed it are replaced.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import subprocess
import sys
import time
import warnings
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from datetime import date
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import lightning
import torch
import transformers

from families import table
from families.family import families
from families.measure import Cell, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", help="model type; all that have missing cells where unset")
    parser.add_argument("--column", action="append", choices=list(table.COLUMNS), help="all where unset")
    parser.add_argument("--again", action="store_true", help="measure everything again")
    parser.add_argument("--limit", type=float, default=60, help="seconds of a cell")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which no family is begun")
    parser.add_argument("--workers", type=int, default=1, help="families that are measured at once")
    parser.add_argument("--page", action="store_true", help="write the page of what is measured, and measure nothing")
    options = parser.parse_args()
    quiet()
    commit()
    results = table.load()
    start = time.monotonic()
    names = [] if options.page else options.family or list(families())
    columns = tuple(options.column or table.COLUMNS)
    wanted = {name: columns for name in names}
    if not (options.again or options.family or options.column):
        wanted = {name: missing(results["families"].get(name, {}), columns) for name in names}
    several = get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=several, initializer=quiet) as pool:
        begun: dict[Future[Any], str] = {
            pool.submit(measure, name, each, options.limit, time.time() + options.until): name
            for name, each in wanted.items()
            if each
        }
        for task in as_completed(begun):
            keep(results, begun[task], task)
    results["left"] = [name for name in families() if name not in results["families"]]
    table.save(results)
    table.PAGE.write_text(table.page(results))
    print(f"{table.summary(results)} in {time.monotonic() - start:.0f} s")


def missing(row: table.Table, columns: tuple[str, ...]) -> tuple[str, ...]:
    """Columns that a family has no cell of; none where a reason says why it is not built."""
    return () if "why" in row else tuple(column for column in columns if column not in row.get("cells", {}))


def measure(name: str, columns: tuple[str, ...], limit: float, until: float) -> dict[str, Cell] | None:
    """Cells of a family, in a process of its own; None where its time has come too late."""
    if time.time() > until:
        return None
    cells: dict[str, Cell] = {}

    def report(column: str, cell: Cell) -> None:
        cells[column] = cell
        print(
            f"{name:28} {column:10} {cell['status']:9} {cell.get('off', '')} {cell.get('note', '')}"[:240], flush=True
        )

    measured(name, columns, report, limit=limit)
    return cells


def keep(results: table.Table, name: str, task: Future[dict[str, Cell] | None]) -> None:
    """Put what was measured into the table, and write the file."""
    try:
        cells = task.result()
    except Exception as error:  # a process that died; what others measured stays
        print(f"{name:28} {error!r}", flush=True)
        return
    if cells is None:
        return
    family, now = families()[name], f"{date.today().isoformat()}, {commit()}"
    row: table.Table = {"model": family.model, "kind": family.kind}
    why = [cell["note"] for cell in cells.values() if cell["status"] == "not built"]
    old = results["families"].get(name, {}).get("cells", {})
    results["families"][name] = (
        row | {"why": why[0], "on": now}
        if why
        else row | {"cells": old | {key: cell | {"on": now} for key, cell in cells.items()}}
    )
    results["measured"] = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread per process, CPU",
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "transformers": transformers.__version__,
    }
    table.save(results)


@cache
def commit() -> str:
    """The commit that is measured, when the measuring begins; "+" follows where files differ from it."""
    root = table.ROOT
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "*.py"], cwd=root)
    return head.stdout.strip() + ("+" if changed.returncode else "")


def quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
