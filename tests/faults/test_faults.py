"""The fast part of the scorecard: all wrong configurations that need no torch, and one fault of each kind on ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import trees
from .cases import trees as tree_cases

QUICK = (
    "kill -9: forward, rank 2",
    "kill -9: checkpoint, rank 0",
    "exceptions: in step, rank 3",
    "exceptions: on all ranks",
    "disagreements: fewer batches, rank 2, pipe",
    "disagreements: microbatches, rank 1, pipe",
    "batches: one sample",
)


@pytest.mark.parametrize(("options", "number"), [([], 150), (["--model"], 35)], ids=["without torch", "with a model"])
def test_wrong_configurations_are_refused_by_field_and_fix(options: list[str], number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.configurations", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert len(found) >= number
    assert {name: problems for name, problems in found.items() if problems} == {}


@pytest.mark.processes
@pytest.mark.parametrize("name", QUICK)
def test_a_fault_ends_all_ranks_and_the_last_line_names_it(name: str) -> None:
    """Four ranks: vision: rank 0; language: ranks 1-3 as stages"""
    cases = {f"{kind}: {case.name}": case for kind, kinds in tree_cases(0).items() for case in kinds}
    record = trees.run(cases[name])
    assert record.problems == [], record.printed
    long = [text for text in record.printed.split("Traceback (most recent call last):")[1:] if text.count("\n") > 12]
    assert len(long) <= 1, record.printed  # of the rank that failed; others say it in a line or two
