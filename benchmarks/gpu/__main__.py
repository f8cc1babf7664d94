"""The command of `scripts/gpu.sh`: ``python -m benchmarks.gpu [--dry] [--list] [CHECK ...]``."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path

from benchmarks.gpu import report, supervisor
from benchmarks.gpu.checks import CHECKS, Check, chosen
from benchmarks.gpu.machine import Machine, probe
from benchmarks.gpu.rows import Row

MINUTES = 25


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bash scripts/gpu.sh", description="Prove and measure on GPUs.")
    parser.add_argument("names", nargs="*", metavar="CHECK", help="a check or a group of them; all without any")
    parser.add_argument("--dry", action="store_true", help="small sizes on the CPU: every code path but the kernels")
    parser.add_argument("--list", action="store_true", help="print the checks")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="wall-clock limit of all checks together")
    parser.add_argument(
        "--out", type=Path, help="folder of figures_gpu.md and .json; docs, or build/gpu_dry with --dry"
    )
    for inner in ("--serve", "--machine", "--rows"):  # of the processes that this command starts
        parser.add_argument(inner, help=argparse.SUPPRESS)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.probe:
        print(json.dumps(probe()))
        return 0
    if given.serve:
        machine = Machine(**json.loads(Path(given.machine).read_text()))
        return supervisor.serve(given.serve, machine, Path(given.rows))
    if given.list:
        print("\n".join(f"{check.name}: {check.title} (at most {check.limit_s} s)" for check in CHECKS))
        return 0
    out = given.out or supervisor.ROOT / ("build/gpu_dry" if given.dry else "docs")
    return run(chosen(given.names), out, is_dry=given.dry, minutes=given.minutes, command=arguments)


def run(checks: list[Check], out: Path, *, is_dry: bool, minutes: float, command: list[str]) -> int:
    """Run checks and write the report; return 1 where one failed or missed its aim, 2 without a GPU, else 0.

    A dry run misses no aim: its figures mean nothing.
    """
    probed = supervisor.probed()
    if not probed["gpus"] and not is_dry:
        cuda = probed["cuda"] or "not in this build"
        print(f"torch {probed['torch']} (CUDA {cuda}) finds no GPU; see docs/gpu.md")
        return 2
    machine = Machine(is_dry=is_dry, probed=probed)
    results = supervisor.run_all(checks, machine, minutes * 60)
    about = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["bash", "scripts/gpu.sh", *command]),
        "machine": {**probed, "is_dry": is_dry},
    }
    all_results = report.stored_results(out / "figures_gpu.json") | {
        name: {**about, **each} for name, each in results.items()
    }
    report.keep(out / "figures_gpu.json", all_results)
    (out / "figures_gpu.md").write_text(report.page(all_results))
    print(f"written: {out}/figures_gpu.md and .json")
    rows = [Row(**row) for result in results.values() for row in result["rows"]]
    return int(any(row.status == "failed" or (row.met is False and not is_dry) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
