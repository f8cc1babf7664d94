"""Random LightningModules: a seed is a layout and some uses of the table together, compared with one process.

A seed is equal or refused by a named error; anything else is a fault.
``PYTHONPATH=tests .venv/bin/python -m ordinary.fuzz FIRST END`` runs the seeds of a range and prints faults.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ordinary.cells import COLUMNS, Outcome, on_one_process, on_ranks, outcome
from ordinary.rows import USES
from ordinary.table import Table, read
from ordinary.uses import Run, Use, together
from ranks import POOL

LAYOUTS = [column for column in COLUMNS if column != "one"]
BATCH = 10


@dataclass(frozen=True)
class Seed:
    """One random module with its data, flags and layout."""

    number: int

    @property
    def column(self) -> str:
        return LAYOUTS[self.number % len(LAYOUTS)]

    def uses(self) -> list[Use]:
        """Three to six uses, each equal in this layout by itself, that set nothing twice.

        Each use has a place of its own in the order of the seed, so that a new row changes few seeds.
        """
        taken: list[Use] = []
        for name in sorted(candidates()[self.column], key=lambda name: random.Random(f"{self.number} {name}").random()):
            use = USES[name]
            slots = {slot for other in taken for slot in other.slots}
            overs = {other.over for other in (*taken, use)} - {""}
            if not slots & use.slots and len(overs) < 2:
                taken.append(use)
            if len(taken) == 3 + self.number % 4:
                break
        return taken

    def __call__(self, run: Run) -> dict[str, Any]:
        torch.manual_seed(self.number)
        return together(self.uses(), run)

    def __str__(self) -> str:
        return f"seed {self.number} | {self.column} | " + " + ".join(use.name for use in self.uses())


@lru_cache(maxsize=1)
def candidates() -> dict[str, list[str]]:
    """By layout the uses that can be put together, and that are equal there."""
    expected: Table = read()
    parts = [name for name in expected if USES[name].scenario is None and USES[name].over in ("", "mean", "first")]
    return {column: [name for name in parts if expected[name][column].kind == "equal"] for column in LAYOUTS}


def outcomes(seeds: Sequence[Seed]) -> dict[Seed, Outcome]:
    """What becomes of seeds of one layout."""
    column = seeds[0].column
    plain = [on_one_process(seed, COLUMNS[column].replicas) for seed in seeds]
    judged = zip(seeds, plain, on_ranks(column, seeds), strict=True)
    return {seed: outcome(_judge(seed), column, one, ranks) for seed, one, ranks in judged}


def _judge(seed: Seed) -> Use:
    """The use that says how observations of replicas are merged, and how closely numbers agree."""
    uses = seed.uses()
    over = next((use.over for use in uses if use.over), "")
    return Use(section="fuzz", title=str(seed.number), over=over, tolerance=max(use.tolerance for use in uses))


def batches(first: int, end: int) -> list[list[Seed]]:
    """Seeds in lists of one layout each."""
    found = []
    for column in LAYOUTS:
        seeds = [seed for seed in map(Seed, range(first, end)) if seed.column == column]
        found += [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    return found


def main(first: int, end: int) -> None:
    counts: Counter[str] = Counter()
    for seeds in sorted(batches(first, end), key=lambda seeds: seeds[0].number // (BATCH * len(LAYOUTS))):
        for seed, found in outcomes(seeds).items():
            counts[found.kind] += 1
            if found.kind != "equal":
                print(f"{found.kind}: {seed}\n    {found.text}", flush=True)
        print(dict(counts), flush=True)
    POOL.close()


if __name__ == "__main__":
    import conftest  # noqa: F401  (quiet logs, one thread)

    main(int(sys.argv[1]), int(sys.argv[2]))
