"""Estimates of `mm5d inspect` and `mm5d plan` beside what was measured, in one table: memory of ranks, and steps.

Runs `memory.py` and `step_times.py`, each in processes of its own, and prints their rows in one form with the number of
estimates that are within 5 % and within 10 %. Arguments choose: ``memory`` or ``steps`` alone, and of memory models and
layouts (``others``: the twelve layouts of one model each). ``--ranks 3`` takes the steps of layouts of three ranks.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
NUMBER = r"\d+(?:\.\d+)?"


def rows(script: str, *arguments: str) -> Iterator[list[str]]:
    """The cells of the rows that a script prints, as it prints them; what else it says is printed."""
    command = [sys.executable, "-u", str(FOLDER / script), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            if line.startswith("|") and any("/" in cell for cell in cells):
                yield cells
    if process.returncode:
        raise SystemExit(f"{script} ended with {process.returncode}")


def memory(arguments: list[str]) -> Iterator[tuple[str, str, str, list[float]]]:
    """What is estimated, its layout, both values as text, and their ratios."""
    for model, *layout, values, _ in rows("memory.py", *arguments):
        if pairs := re.findall(f"({NUMBER}) / ({NUMBER})", values):
            yield f"memory of {model}", " | ".join(layout), f"{values} MB", [float(a) / float(b) for a, b in pairs]


def steps(ranks: int) -> Iterator[tuple[str, str, str, list[float]]]:
    """The same of steps."""
    for *figure, ratio, _, values, _ in rows("step_times.py", "--ranks", str(ranks)):
        what, _, layout = " | ".join(figure).partition(", ")
        if what == "estimate over step":
            yield "step", layout, values, [float(ratio)]


def main(kinds: list[str], chosen: list[str], ranks: int) -> None:
    print("| estimate of | layout | estimated / measured | ratio |\n| --- | --- | --- | --- |", flush=True)
    counts = []
    for kind in kinds:
        ratios = list[float]()
        for what, layout, values, found in memory(chosen) if kind == "memory" else steps(ranks):
            ratios += found
            print(f"| {what} | {layout} | {values} | {', '.join(f'{ratio:.3f}' for ratio in found)} |", flush=True)
        near, wider = (sum(abs(ratio - 1) <= limit for ratio in ratios) for limit in (0.05, 0.1))
        counts.append(f"{kind}: {near} of {len(ratios)} estimates within 5 %, {wider} within 10 %")
    print("\n".join(["", *counts]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="memory or steps; models and layouts of memory.py")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 3, 4))
    given = parser.parse_args()
    wanted = [name for name in given.names if name in ("memory", "steps")] or ["memory", "steps"]
    main(wanted, [name for name in given.names if name not in ("memory", "steps")], given.ranks)
