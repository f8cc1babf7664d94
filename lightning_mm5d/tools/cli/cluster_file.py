"""The file that describes a cluster: reads it, measures the links of this machine and writes it.

Keys are those of `Cluster`, with ``links: {inside: {latency, bandwidth}, between: {...}}`` in seconds and bytes per
second. Refuses keys that do not exist, and values that no cluster has.

Links are measured by all processes at once, each with a partner: messages go there and back, small ones for the
latency and large ones for the bandwidth. Partners are on one node for `inside`, and at the same place of two nodes for
`between`. The slowest pair counts. A process that is alone starts two on this machine, over gloo.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import yaml

from lightning_mm5d.config.checks import check_count
from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.tables import bytes_of
from lightning_mm5d.tools.cli.configuration import read_configuration
from lightning_mm5d.tools.cli.terminal import write
from lightning_mm5d.tools.planner.layout_costs import Cluster, Link

_SMALL, _LARGE = 8, 2**24  # bytes of a message
_NUMBERS = {
    "latency": (1e-12, 1e3, "5e-6"),
    "bandwidth": (1.0, 1e20, "25e9"),
    "flops": (1.0, 1e20, "400e12"),
    "efficiency": (1e-6, 1.0, "0.4"),
    "memory_bandwidth": (1.0, 1e20, "2e12"),
}
"""least and largest value of each number, beyond which seconds are none, and a usual one"""


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a file describes.

    Raises:
        ConfigError: it cannot be read, or describes none.
    """
    said = read_configuration(path)
    numbers = ("flops", "efficiency", "memory_bandwidth")
    _check_keys("cluster", said, ("nodes", "ranks", "memory", "links", *numbers), needed=("nodes", "ranks", "memory"))
    for key in ("nodes", "ranks"):
        check_count(f"cluster.{key}", said[key])
    check_count("cluster.nodes * ranks", said["nodes"] * said["ranks"])
    found: dict[str, Any] = {key: said[key] for key in ("nodes", "ranks")}
    found["memory"] = bytes_of("cluster.memory", said["memory"])
    found |= {key: _number(f"cluster.{key}", said[key]) for key in numbers if key in said}
    links = said.get("links", {})
    _check_keys("cluster.links", links, ("inside", "between"))
    names = [each.name for each in fields(Link)]
    for kind, link in links.items():
        field = f"cluster.links.{kind}"
        _check_keys(field, link, names, needed=names)
        found[kind] = Link(**{name: _number(f"{field}.{name}", link[name]) for name in names})
    return Cluster(**found)


def _check_keys(field: str, said: object, known: Collection[str], needed: Collection[str] = ()) -> None:
    if not isinstance(said, Mapping):
        raise ConfigError(field, said, f"It maps {', '.join(known)} to values", "Write them below it")
    for key in said:
        if key not in known:
            raise ConfigError(f"{field}.{key}", said[key], "There is no such key", did_you_mean(key, list(known)))
    for key in needed:
        if key not in said:
            raise ConfigError(f"{field}.{key}", None, "It has no default", "Add it, or run mm5d doctor --links --out")


def _number(field: str, said: object) -> float:
    try:
        number = float(said) if isinstance(said, (int, float, str)) and not isinstance(said, bool) else 0.0
    except ValueError:
        number = 0.0
    least, most, usual = _NUMBERS[field.rpartition(".")[2]]
    if not least <= number <= most:
        raise ConfigError(field, said, f"It is a number from {least:g} to {most:g}", f"Write for instance {usual}")
    return number


def as_yaml(cluster: Cluster) -> str:
    """Return the file of a cluster."""
    said = asdict(cluster)
    links = {kind: said.pop(kind) for kind in ("inside", "between")}
    return yaml.safe_dump({**said, "links": links}, sort_keys=False)


def measure_links(out: Path | None) -> int:
    """Measure links and devices over the processes that this one is started with; print and write the cluster file."""
    if "WORLD_SIZE" not in os.environ:
        module = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        options = ["doctor", "--links", *(["--out", str(out)] if out is not None else [])]
        return subprocess.run([*module, "lightning_mm5d.tools.cli.main", *options], check=False).returncode
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    try:
        text = _measured(device)
        if dist.get_rank() == 0:
            print(text, end="")
            if out is not None:
                write("--out", out, text)
    finally:
        dist.destroy_process_group()
    return 0


def _measured(device: torch.device) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, os.environ.get("GROUP_RANK", "") + socket.gethostname())
    nodes = list(dict.fromkeys(hosts))
    size = -(-world // len(nodes))
    pairs = {"inside": rank ^ 1, "between": (rank + size if rank // size % 2 == 0 else rank - size)}
    links: dict[str, Any] = {}
    for kind, other in pairs.items():
        able = 0 <= other < world and (hosts[rank] == hosts[other]) == (kind == "inside")
        times = [_there_and_back(other if able else None, rank, size, device) for size in (_SMALL, _LARGE)]
        if all(times):
            links[kind] = Link(times[0], _LARGE / max(times[1] - times[0], 1e-9))
    note = "".join(f"# {kind}: not measured by these processes, the default\n" for kind in pairs if kind not in links)
    flops, moved = _device_speeds(device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    memory = memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // size
    cluster = Cluster(nodes=len(nodes), ranks=size, memory=memory, flops=flops, memory_bandwidth=moved, **links)
    return note + as_yaml(cluster)


def _there_and_back(other: int | None, rank: int, size: int, device: torch.device) -> float:
    """Seconds of one message of the slowest pair; 0 where there is no pair."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)

    def once() -> None:
        if other is not None:
            for sends in (rank < other, rank > other):
                (dist.send if sends else dist.recv)(message, other)

    dist.barrier()
    found = torch.tensor([0.0 if other is None else _timed(once, device, rounds=10) / 2], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _device_speeds(device: torch.device) -> tuple[float, float]:
    """Flops per second of a large product, and bytes per second of a copy."""
    size = 8192 if device.type == "cuda" else 1024
    one = torch.zeros(size, size, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)
    product = _timed(lambda: one @ one, device, rounds=5)
    return 2 * size**3 / product, 2 * one.nbytes / _timed(one.clone, device, rounds=5)


def _timed(call: Callable[[], object], device: torch.device, *, rounds: int) -> float:
    """The median of the seconds of a call, after one that is not counted."""
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return median(found[1:])
