"""The command of the GPU checks: its frame, and in the dry mode every check."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from ranks import run_ranks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import checks, nccl_groups, offloaded, report, shared_gpu, shared_nccl, supervisor  # noqa: E402
from benchmarks.gpu.checks import CHECKS, Check  # noqa: E402
from benchmarks.gpu.machine import Machine  # noqa: E402
from benchmarks.gpu.rows import Row  # noqa: E402
from lightning_mm5d.sharded import torch_internals  # noqa: E402

FOUND: dict[str, Any] = {"gpus": [], "driver": "", "torch": "2", "cuda": "", "nccl": ""}
MACHINE = Machine(is_dry=True, probed=FOUND)


def check(function: str, limit_s: int = 60) -> Check:
    return Check(name="group.one", title="One", function=function, limit_s=limit_s)


FORKING = ("transport.waits", "transport.parity", "memory.sums", "memory.casts", "memory.ends", "several", "nccl")


def serve(rank: int, each: Check, path: Path) -> int:
    """Run a check as the command does; one that forks ranks trains nothing itself, which would initialise CUDA."""
    here, fit = os.getpid(), L.Trainer.fit

    def fit_in_ranks(*arguments: Any, **options: Any) -> None:
        assert os.getpid() != here, "the process that forks ranks trains"
        fit(*arguments, **options)

    if each.name.startswith(FORKING):
        L.Trainer.fit = fit_in_ranks  # type: ignore[method-assign]
    return supervisor.serve(each.function, MACHINE, path)


SAME = ("kernels.64", "kernels.72", "kernels.80", "kernels.256")
"""Checks that differ from another one in a number."""


LONG = ("several.", "compile.", "transport.parity", "nccl.parity", "nccl.memory")


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.exhaustive if each.name.startswith(LONG) else ())
        for each in CHECKS
        if each.name not in SAME
    ],
)
def test_checks_run_dry(each: Check, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    if each.name == "flex.tests":  # pytest itself, in another process: what it would start is collected elsewhere
        assert checks.load(each.function)
        return
    assert run_ranks(1, serve, each, path)[0] == 0, "dry, the machine lacks nothing"
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    assert rows
    assert [row for row in rows if row.status == "failed"] == []


def test_time_that_two_streams_share_counts_once() -> None:
    copies, kernels = [(0.0, 4.0), (2.0, 6.0), (8.0, 10.0)], [(1.0, 3.0), (2.0, 3.0), (5.0, 9.0)]
    assert offloaded.shared_time(copies, kernels) == (2 + 1 + 1) / 8
    assert offloaded.shared_time(copies, []) == 0


def test_ranks_that_share_a_gpu_never_use_the_backend_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def compared(title: str, world: int, run: Any) -> Row:
        ran.append(run)
        return Row(name=title, value=0)

    monkeypatch.setattr(shared_gpu, "compared", compared)
    monkeypatch.setattr(shared_gpu, "compared_parameters", compared)
    for _ in shared_gpu.parity(MACHINE):
        pass
    assert {run.options["process_group_backend"] for run in ran} == {"gloo"}
    on_gpu = shared_gpu.on_shared_gpu(shared_gpu.SHARED, MACHINE)
    assert on_gpu.options["process_group_backend"] == "gloo"


def test_replicas_that_share_gradients_are_compared_by_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, list[str]] = {"compared": [], "compared_parameters": [], "without_difference": []}
    for name, titles in ran.items():

        def note(title: str, *_: Any, titles: list[str] = titles) -> Row:
            titles.append(title)
            return Row(name=title, value=0)

        monkeypatch.setattr(shared_gpu, name, note)
    for _ in shared_nccl.parity(MACHINE):
        pass
    assert ["zero" in title for title in ran["compared"]] == [False]
    assert ["zero" in title for title in ran["compared_parameters"]] == [True]
    assert all("ep 2" in title for title in ran["without_difference"])


def test_replicas_are_proved_on_two_gpus_and_on_four() -> None:
    assert {world for world, _, run in shared_gpu.LAYOUTS if run.replicas > 1} >= {2, 4}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_layouts_of_a_shared_gpu_equal_one_process_on_the_cpu() -> None:
    found = [shared_gpu.compared(name, world, run) for world, name, run in shared_gpu.LAYOUTS]
    assert [row.note for row in found if not row.met] == []


def test_every_collective_of_the_package_is_checked() -> None:
    """All but those between two ranks, which one rank does not have."""
    used = {
        name
        for path in (ROOT / "lightning_mm5d").rglob("*.py")
        for name in re.findall(r"\bdist\.([a-z_]*(?:all_|gather|scatter|reduce|broadcast)[a-z_]*)\b", path.read_text())
        if not name.endswith("_object")  # of host memory
    }
    used |= {name for name in vars(torch_internals) if name.endswith("_single")}
    assert used == set(nccl_groups.COLLECTIVES)


def test_a_check_that_crashes_or_hangs_is_a_failed_row() -> None:
    (crashed,) = supervisor.run_one(check("rows:nothing"), MACHINE, 60)
    assert crashed.status == "failed"
    assert "exit status 1" in crashed.note
    assert "AttributeError" in crashed.note, "the end of its output"
    (hung,) = supervisor.run_one(check("rows:nothing"), MACHINE, 0.1)
    assert "did not end within" in hung.note


def test_checks_for_which_no_time_is_left_are_said_to_be_skipped() -> None:
    results = supervisor.run_all([check("rows:nothing")], MACHINE, 1)
    assert [row["status"] for row in results["group.one"]["rows"]] == ["skipped"]


def test_checks_are_chosen_by_group_and_by_name() -> None:
    one = CHECKS[0]
    assert one in checks.chosen([one.name.partition(".")[0]])
    assert checks.chosen([one.name]) == [one]
    assert checks.chosen([]) == list(CHECKS)
    with pytest.raises(SystemExit, match="no check is named nothing"):
        checks.chosen(["nothing"])


def test_aims_are_met_or_not() -> None:
    assert Row(name="a", value=1.0, at_most=1.0).met
    assert not Row(name="a", value=1.1, at_most=1.0).met
    assert not Row(name="a", value=float("nan"), at_least=1.0).met
    assert Row(name="a", value=1.0).met is None
    assert Row(name="a", status="skipped", at_most=1.0).met is None
    assert Row(name="a", status="failed").met is False


def test_the_page_is_that_of_the_figures() -> None:
    """Nobody edits it by hand."""
    results = report.stored_results(ROOT / "docs/figures_gpu.json")
    assert (ROOT / "docs/figures_gpu.md").read_text() == report.page(results)


def test_the_page_shows_what_was_found() -> None:
    rows = [Row(name="a | b", value=0.5, unit="ms", at_most=0.4), Row(name="c", status="failed", note="why\nlong")]
    machine = {**FOUND, "gpus": [{"name": "GPU X"}] * 2, "is_dry": False}
    result = {"title": "T", "seconds": 1, "rows": [row.as_json() for row in rows]}
    page = report.page({"g.t": {**result, "date": "2026-01-02", "command": "bash scripts/gpu.sh", "machine": machine}})
    assert "| a \\| b | 0.5 ms | at most 0.4 | **no** |  |" in page
    assert "2 × GPU X, torch 2" in page
    assert "```text\nwhy\nlong\n```" in page
