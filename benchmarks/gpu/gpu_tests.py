"""Runs the tests that pytest skips on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import Row

MARK = "pytest.mark.gpu"


def files() -> list[str]:
    """Return the test files that have tests which need a GPU: collecting all others would take longer than running."""
    return sorted(str(path) for path in Path("tests").rglob("test_*.py") if MARK in path.read_text())


def run(machine: Machine) -> Iterator[Row]:
    """Yield how many tests passed, and a row for each that did not."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", f"--junitxml={report}"]
        # torch's compiler warns when it is imported, and of the precision of products: no reason to fail here
        subprocess.run([*command, "-W", "default", *files()], check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in cases:
        # at most one outcome is written below a case, and none where it passed
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        kind = "passed" if outcome is None else "skipped" if outcome.tag == "skipped" else "failed"
        outcomes[kind].append(case.get("name", ""))
        if kind == "failed":
            assert outcome is not None
            yield Row(name=case.get("name", ""), status="failed", note=(outcome.get("message") or "").strip())
    at_least = machine.pick(len(cases), None)
    yield Row(name="tests that passed", value=len(outcomes["passed"]), at_least=at_least, note=f"of {len(cases)}")
