"""A rank that is killed costs a step at most where checkpoints are in the memory of hosts, and no file is read.

The job is that of `cluster_job`, without checkpoints on a disk. The default run kills one rank of four, and a node of
two; the other cases are `exhaustive`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from clusters.started import JOB, ROOT, Ended, check_samples, clean, end_job, records, start_all
from clusters.test_torchrun_nodes import OWN_STORES, Node, nodes, torchrun
from lightning_mm5d.features.sharded_checkpoints.in_memory import SHARED_MEMORY
from lightning_mm5d.trainer.process_group import free_port

__all__ = ["nodes"]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="this system has no shared memory as files"),
]
RANKS = 4
AGAIN = {0, 4}, {0, 3}
"""steps with which attempts begin where a rank is killed in the fifth step: the fourth may not be written by then"""
BOTH = ["--kind", "both", "--devices", str(RANKS), "--memory", "1"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    def there() -> set[Path]:
        return set(SHARED_MEMORY.glob(f"mm5d-{os.getuid()}-*"))

    before = there()
    yield
    left = there() - before
    ended = {folder for folder in left if not Path(f"/proc/{folder.name.split('-')[2]}").exists()}
    for folder in ended:  # of agents that a test has killed, as the next job removes them
        subprocess.run(["rm", "-r", str(folder)], check=True)


def command(folder: Path, *options: str) -> list[str]:
    agent = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "9"]
    return [sys.executable, "-W", "ignore", *agent, "--master-port", str(free_port()), str(JOB), str(folder), *options]


def run(folder: Path, *options: str) -> Ended:
    folder.mkdir(exist_ok=True)
    return start_all(folder, [(command(folder, *options), {})])


def losses(folder: Path) -> dict[tuple[int, int], Any]:
    """Samples and loss of each step and rank; those of several attempts are equal."""
    found: dict[tuple[int, int], Any] = {}
    for line in records(folder):
        key, value = (line["step"], line["rank"]), (line["samples"], line["loss"])
        assert found.setdefault(key, value) == value
    return found


def test_a_killed_rank_costs_one_step_and_nothing_is_read_from_a_disk(tmp_path: Path) -> None:
    """vision: ranks 0-1, language: ranks 2-3; rank 2 is killed in step 5"""
    killed = run(tmp_path / "killed", *BOTH, "--kill", "2", "5")
    assert killed.codes == [0], killed.printed
    assert "goes on from a checkpoint in the memory of the hosts" in killed.printed
    found = losses(tmp_path / "killed")
    assert {line["began"] for line in records(tmp_path / "killed")} in AGAIN
    check_samples(tmp_path / "killed")
    whole = run(tmp_path / "whole", *BOTH)
    assert whole.codes == [0], whole.printed
    assert found == losses(tmp_path / "whole")


def test_a_lost_node_takes_nothing_with_it(nodes: list[Node], tmp_path: Path) -> None:
    """Two replicas, each on its node, until the second node is killed with what is in its memory; then one."""
    options = ["--kind", "replicas", "--memory", "1", "--kill-node", "1", "5"]
    ended = torchrun(nodes, tmp_path, "1:2", *options, variables=OWN_STORES)
    assert ended.codes == [0, -9], ended.printed
    assert check_samples(tmp_path).worlds[-2:] == [2, 1]
    assert {line["began"] for line in records(tmp_path) if line["world"] == 1} | {0} in AGAIN


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["both", "zero", "elastic"])
def test_a_lost_node_of_several_ranks_takes_nothing_with_it(kind: str, nodes: list[Node], tmp_path: Path) -> None:
    """Four ranks on two nodes, until the second node is killed with what is in its memory; then two."""
    options = ["--kind", kind, "--memory", "1", "--kill-node", "3", "5"]
    ended = torchrun(nodes, tmp_path, "1:2", *options, variables=OWN_STORES, ranks=2)
    assert ended.codes == [0, -9], ended.printed
    assert check_samples(tmp_path).worlds[-2:] == [4, 2]
    assert {line["began"] for line in records(tmp_path) if line["world"] == 2} | {0} in AGAIN


@pytest.mark.exhaustive
def test_a_rank_of_two_nodes_finds_the_files_of_the_other_one(nodes: list[Node], tmp_path: Path) -> None:
    """vision: rank 0, on the first node; language: rank 1, on the second; then the same from other shards"""
    ended = torchrun(nodes, tmp_path, "2", "--memory", "1", "--kill", "1", "5")
    assert ended.codes == [0, 0], ended.printed
    assert {line["began"] for line in records(tmp_path)} in AGAIN
    check_samples(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(7))
def test_ranks_that_are_killed_at_any_time_cost_one_step_each(seed: int, tmp_path: Path) -> None:
    """Three kills of a rank, by chance, each some time after the first step of an attempt"""
    whole = run(tmp_path / "whole", *BOTH)
    assert whole.codes == [0], whole.printed
    folder, rng = tmp_path / "killed", random.Random(seed)
    folder.mkdir()
    with (folder / "printed").open("w") as output:
        job = subprocess.Popen(
            command(folder, *BOTH), env=clean(), cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        try:
            kills = list(killed_by_chance(job, folder, rng))
            assert job.wait(120) == 0, (folder / "printed").read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            end_job(folder)
    assert losses(folder) == losses(tmp_path / "whole")
    for moment, step in kills:
        after = sorted((line for line in records(folder) if line["time"] > moment), key=lambda line: line["time"])
        assert not after or after[0]["began"] >= step - 1, (step, after[0])


def killed_by_chance(job: subprocess.Popen[bytes], folder: Path, rng: random.Random) -> Iterator[tuple[float, int]]:
    """Kill a rank three times; yield when it was, and the last step that some rank had ended by then."""
    for _ in range(3):
        before = len(lines(folder))
        while len(lines(folder)) == before and job.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.random() / 2)
        found = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=False)
        ranks = [int(process) for process in found.stdout.split()]
        step = max((line["step"] for line in lines(folder)), default=0)
        if job.poll() is not None or not ranks or step > 10:  # the job is about to end
            return
        with suppress(ProcessLookupError):
            os.kill(rng.choice(ranks), signal.SIGKILL)
        time.sleep(1)  # what the others end meanwhile is of this attempt
        yield time.time(), max(line["step"] for line in lines(folder))


def lines(folder: Path) -> list[dict[str, Any]]:
    """The steps that have been written whole."""
    texts = [text for path in folder.glob("steps-*") for text in path.read_text().splitlines(keepends=True)]
    return [json.loads(text) for text in texts if text.endswith("\n")]
