"""Two workers of Ray's trainer train as one process does; a killed one ends the run, or starts all workers again.

Ray's head ends with the script that started it, and none of its processes is left.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from clusters.started import check_losses, end_job, one_process, records, start_all
from clusters.test_job_scripts import loss_of, loss_of_one_process

__all__ = ["loss_of_one_process", "one_process"]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[train]"),
]


def processes_of(folder: Path) -> list[int]:
    """Processes that were started with this folder among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(folder) in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def variables(folder: Path) -> dict[str, str]:
    """Ray writes a token for its processes into the home folder."""
    return {"RAY_USAGE_STATS_ENABLED": "0", "HOME": str(folder)}


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A folder for what Ray writes, with a path that is short enough for its sockets."""
    folder = Path(tempfile.mkdtemp(prefix="mm5d-ray-"))
    yield folder
    end = time.monotonic() + 15
    while processes_of(folder) and time.monotonic() < end:
        time.sleep(0.1)
    left = processes_of(folder)
    for number in left:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, "processes of Ray are left"


def test_workers_of_ray_train_as_one_process_does_and_go_on_after_one_is_killed(
    one_process: dict[int, dict[str, Any]], ray_folder: Path, tmp_path: Path
) -> None:
    """vision: rank 0; language: rank 1, which is killed before step 5; the last checkpoint is that of step 4"""
    again, once = tmp_path / "again", tmp_path / "once"
    again.mkdir()
    once.mkdir()
    driver = [sys.executable, str(Path(__file__).with_name("ray_driver.py")), str(again), str(once), str(ray_folder)]
    ended = start_all(tmp_path, [(driver, variables(ray_folder))], limit=580)
    assert ended.codes == [0], ended.printed
    assert "trained again" in ended.printed
    assert (again / "fired-1-5").exists()
    assert {line["began"] for line in records(again)} == {0, 4}
    check_losses(again, one_process, 2)
    assert (once / "fired-1-5").exists()
    assert max(line["step"] for line in records(once) if line["rank"] == 1) == 4
    assert "failed once: " in ended.printed
    assert "rank 1" in ended.printed.partition("failed once: ")[2].lower()
    assert not end_job(again)
    assert not end_job(once)


def test_the_job_script_for_ray_trains_as_one_process_does(
    loss_of_one_process: float, ray_folder: Path, tmp_path: Path
) -> None:
    script = [sys.executable, "examples/clusters/ray_job.py", "--folder", str(tmp_path / "run")]
    sizes = ["--workers", "2", "--devices", "2", "--language-stages", "1", "--epochs", "1"]
    ended = start_all(tmp_path, [([*script, *sizes], {**variables(ray_folder), "RAY_TMPDIR": str(ray_folder)})])
    assert ended.codes == [0], ended.printed
    assert loss_of(ended.printed) == pytest.approx(loss_of_one_process, rel=1e-5)
    assert torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["global_step"] == 8
