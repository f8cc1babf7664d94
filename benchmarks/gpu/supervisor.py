"""Runs checks one after the other, each in a process of its own within its own limit and that of all together.

A check that crashes or hangs becomes a failed row with the end of its output, after the rows that it had found by then.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.checks import Check, load
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import LackingError, Row

ROOT = Path(__file__).parents[2]
SHORTEST_S = 20
"""A check is not started with less time left."""
TAIL_LINES = 12
SKIPPED = 75
"""Exit status of a check that the machine lacks something for."""
# ranks are forked, which a process may not do after the CUDA runtime has counted devices; nothing is downloaded
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def probed() -> dict[str, Any]:
    """Return what `machine.probe` finds, in another process."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--probe"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if answer.returncode:
        raise SystemExit(f"the GPUs could not be described:\n{answer.stderr}")
    return json.loads(answer.stdout.splitlines()[-1])


def run_all(checks: list[Check], machine: Machine, limit_s: float) -> dict[str, dict[str, Any]]:
    """Run `checks` within `limit_s` in all; return for each what the report needs.

    Returns:
        By name: ``title``, ``seconds`` and ``rows``.
    """
    end = time.monotonic() + limit_s
    results = {}
    for check in checks:
        start = time.monotonic()
        left = end - start
        if left < SHORTEST_S:
            rows = [Row(name=check.name, status="skipped", note="not run: the time for all checks was over")]
        else:
            rows = run_one(check, machine, min(check.limit_s, left))
        seconds = round(time.monotonic() - start, 1)
        results[check.name] = {"title": check.title, "seconds": seconds, "rows": [row.as_json() for row in rows]}
        for row in rows:
            print(line(row), flush=True)
    return results


def line(row: Row) -> str:
    """Return a row as a line of text."""
    value = "" if row.value is None else f"{row.value:.4g} {row.unit}".strip()
    verdict = {None: "", True: "met", False: "NOT MET"}[row.met] if row.status == "measured" else row.status
    aim = f"({row.aim})" if row.aim else ""
    return "  ".join(part for part in (row.name, value, aim, verdict, row.note.split("\n")[0]) if part)


def run_one(check: Check, machine: Machine, limit_s: float) -> list[Row]:
    """Run one check in another process; return its rows, and one more where it failed."""
    with TemporaryDirectory() as folder:
        rows_file, log_file, machine_file = (Path(folder, name) for name in ("rows", "log", "machine"))
        machine_file.write_text(json.dumps(asdict(machine)))
        command = [sys.executable, "-m", "benchmarks.gpu", "--serve", check.function]
        command += ["--machine", str(machine_file), "--rows", str(rows_file)]
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
            try:
                status = process.wait(limit_s)
                why = f"failed: exit status {status}"
            except subprocess.TimeoutExpired:
                status, why = 1, f"failed: did not end within {limit_s:.0f} s"
            finally:
                _end(process)
        texts = rows_file.read_text().splitlines() if rows_file.exists() else []
        rows = [Row(**json.loads(text)) for text in texts if text.endswith("}")]
        if status == SKIPPED:
            rows.append(Row(name=check.name, status="skipped", note=_tail(log_file, 1)))
        elif status:
            rows.append(Row(name=check.name, status="failed", note=f"{why}\n{_tail(log_file, TAIL_LINES)}"))
        return rows


def _tail(log: Path, lines: int) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the check's process and all that it started: they share a process group that this module made."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve(function: str, machine: Machine, rows: Path) -> int:
    """The other process: run a check and write each row when it is found; return the exit status."""
    with rows.open("a") as file:
        try:
            for row in load(function)(machine):
                file.write(json.dumps(row.as_json()) + "\n")
                file.flush()
        except LackingError as reason:
            print(reason, flush=True)
            return SKIPPED
    return 0
