"""torchrun's agents on two nodes are one job, which a killed rank or a lost node costs the work since a checkpoint.

The nodes are two network namespaces where this machine lets us make them, else two loopback addresses. The default run
loses a node, and with it a rank; the other cases are `exhaustive`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import seed_everything
from torch.utils.data import default_collate

from clusters.cluster_job import Module, Pairs
from clusters.started import JOB, Ended, check_losses, check_samples, one_process, records, start_all
from lightning_mm5d.trainer.process_group import free_port

__all__ = ["one_process"]
pytestmark = pytest.mark.processes
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

Node = tuple[list[str], str, dict[str, str]]  # what a command is prefixed with, the address, and its variables


def ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two nodes that reach each other: network namespaces, joined by a pair of virtual interfaces."""
    names = [f"mm5d-{os.getpid()}-{number}" for number in range(2)]
    ends = [f"mm{os.getpid()}x{number}" for number in range(2)]
    made = shutil.which("ip") is not None and all(ip("netns", "add", name) for name in names)
    try:
        made = made and ip(
            "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1]
        )
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            made = made and ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/24", "dev", end)
            made = made and ip("-n", name, "link", "set", end, "up") and ip("-n", name, "link", "set", "lo", "up")
            made = made and ip("netns", "exec", name, "true")
        if made:
            yield [
                (["ip", "netns", "exec", name], f"10.213.7.{number + 1}", {"GLOO_SOCKET_IFNAME": end})
                for number, (name, end) in enumerate(zip(names, ends, strict=True))
            ]
        else:
            yield [([], f"127.0.0.{number + 1}", {}) for number in range(2)]
    finally:
        for name in names:
            ip("netns", "del", name)


def torchrun(
    nodes: list[Node],
    folder: Path,
    number: str,
    *options: str,
    variables: Mapping[str, str] | None = None,
    last_call: int = 5,
    ranks: int = 1,
) -> Ended:
    """One agent on each node, with `ranks` ranks; they meet at the first node."""
    endpoint = f"{nodes[0][1]}:{free_port()}"
    commands = []
    for prefix, address, own in nodes:
        agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={number}", f"--nproc-per-node={ranks}"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=7", f"--local-addr={address}"]
        # a node that is silent for 3 s is lost, and none is waited for longer than `last_call` once there are enough
        waits = f"last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=3"
        # both nodes have the name of this machine, so that torchrun cannot tell which of them is the host
        waits += f",is_host={int(address == nodes[0][1])}"
        job = ["--max-restarts=3", f"--rdzv-conf={waits}", str(JOB), str(folder), "--elastic", *options]
        commands.append(([*prefix, *agent, *meeting, *job], {**own, **(variables or {})}))
    return start_all(folder, commands)


@pytest.mark.exhaustive
def test_a_killed_rank_of_two_nodes_starts_again_from_the_last_checkpoint(
    nodes: list[Node], one_process: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    """vision: rank 0, on the first node; language: rank 1, on the second"""
    ended = torchrun(nodes, tmp_path, "2", "--kill", "1", "5")
    assert ended.codes == [0, 0], ended.printed
    assert (tmp_path / "fired-1-5").exists()
    assert "rank 1" in ended.printed
    check_losses(tmp_path, one_process, 2)
    assert {line["began"] for line in records(tmp_path)} == {0, 4}


def test_a_lost_node_leaves_the_rest_to_the_other_one(nodes: list[Node], tmp_path: Path) -> None:
    """Two replicas, each on its node, until the second node is killed; then one."""
    ended = torchrun(nodes, tmp_path, "1:2", "--kind", "replicas", "--kill-node", "1", "5", variables=OWN_STORES)
    assert ended.codes == [0, -9], ended.printed
    assert (tmp_path / "fired-1-5").exists()
    assert check_samples(tmp_path).worlds[-2:] == [2, 1]


@pytest.mark.exhaustive
def test_seven_nodes_that_lose_one_go_on_as_six_with_unlike_pipelines(tmp_path: Path) -> None:
    """A rank on each node; language: ranks 0, 2, 4, 6 and 1, 3, 5, then 0, 2, 4 and 1, 3, 5; vision: ranks 0-1

    Rank 4 is killed with its node before step 4; the last checkpoint is that of step 2, in the midst of an epoch.
    """
    seven: list[Node] = [([], f"127.0.0.{number + 1}", {}) for number in range(7)]
    options = ["--kind", "pipelines", "--kill-node", "4", "4"]
    ended = torchrun(seven, tmp_path, "6:7", *options, variables=OWN_STORES, last_call=15)
    assert ended.codes == [0, 0, 0, 0, -9, 0, 0], ended.printed
    assert (tmp_path / "fired-4-4").exists()
    trained = check_samples(tmp_path)
    assert trained.worlds[-2:] == [7, 6]
    assert [[len(line["samples"]) for line in step] for step in trained.steps] == [[5, 3]] * 2 + [[4, 4]] * 4
    expected = losses_of([[sample for line in step for sample in line["samples"]] for step in trained.steps])
    for step, loss in zip(trained.steps, expected, strict=True):
        samples = sum(len(line["samples"]) for line in step)
        mean = sum(line["loss"] * len(line["samples"]) for line in step) / samples
        assert mean == pytest.approx(loss, rel=1e-5), step


def losses_of(steps: list[list[int]]) -> list[float]:
    """The losses of one process without Lightning, whose steps have these samples."""
    seed_everything(7, verbose=False)
    module, data, losses = Module(), Pairs(), []
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for samples in steps:
        loss = module.loss(default_collate([data[sample] for sample in samples]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
