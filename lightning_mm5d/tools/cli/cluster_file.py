"""The file that describes a cluster: reads it, measures the links of this machine and writes it.

Keys are those of `Cluster`, with ``links: {inside: {latency, bandwidth}, between: {...}}`` in seconds and bytes per
second. ``device: H100`` stands for the numbers of a device whose peaks are known, of which products reach `REACHED`;
numbers beside it count before those. Refuses keys that do not exist, and values that no cluster has.

Links are measured by all processes at once, each with a partner: messages go there and back, small ones for the
latency and large ones for the bandwidth. Partners are on one node for `inside`, and at the same place of two nodes for
`between`. The slowest pair counts. A process that is alone starts two on this machine, over gloo.

Processes of a node may share memory or cores. So rank 0 computes a layer of a transformer while the others wait and
while all compute, in turns; the ratio is the slowdown of all computation. Its flops and bytes per second are measured
while the others wait.

On CPUs the cores that compute layers move messages, too. So the overhead of a message inside a node is measured where
all of it shows: in steps of two stages that compute next to nothing, by what each further microbatch takes.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.utils.data import DataLoader

from lightning_mm5d.config.checks import check_count
from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.config.tables import bytes_of
from lightning_mm5d.features.throughput.device_peaks import PEAKS, peaks_of
from lightning_mm5d.strategy import MultimodalStrategy
from lightning_mm5d.tools.cli.configuration import read_configuration
from lightning_mm5d.tools.cli.terminal import write
from lightning_mm5d.tools.planner.layout_costs import Cluster, Link

_SMALL, _LARGE = 8, 2**24  # bytes of a message
_FEW, _MANY = 2**12, 2**20  # bytes of a message between stages
_COUNTS, _STEPS = (2, 10), 9  # microbatches of a step, and steps
_TURNS = 5  # of computing alone and beside others
_NUMBERS = {
    "latency": (1e-12, 1e3, "5e-6"),
    "bandwidth": (1.0, 1e20, "25e9"),
    "overhead": (0.0, 1e3, "1e-6"),
    "overhead_per_byte": (0.0, 1.0, "1e-12"),
    "flops": (1.0, 1e20, "400e12"),
    "efficiency": (1e-6, 1.0, "0.4"),
    "memory_bandwidth": (1.0, 1e20, "2e12"),
    "compute_slowdown": (1.0, 1e3, "1.05"),
}
"""least and largest value of each number, beyond which seconds are none, and a usual one"""
REACHED = 0.4
"""the part of the peak of a device that products are taken to reach where only its name is known"""


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a file describes.

    Raises:
        ConfigError: it cannot be read, or describes none.
    """
    config = read_configuration(path, "--cluster")
    numbers = ("flops", "efficiency", "memory_bandwidth", "compute_slowdown")
    needed = ("nodes", "ranks", *(["memory"] if config.get("device") is None else []))
    _check_keys("cluster", config, ("nodes", "ranks", "memory", "links", "device", *numbers), needed)
    for key in ("nodes", "ranks"):
        check_count(f"cluster.{key}", config[key])
    check_count("cluster.nodes * ranks", config["nodes"] * config["ranks"])
    arguments: dict[str, Any] = {key: config[key] for key in ("nodes", "ranks")}
    arguments |= {} if config.get("device") is None else _named("cluster.device", config["device"])
    if "memory" in config:
        arguments["memory"] = bytes_of("cluster.memory", config["memory"])
    arguments |= {key: _number(f"cluster.{key}", config[key]) for key in numbers if key in config}
    links = config.get("links", {})
    _check_keys("cluster.links", links, ("inside", "between"))
    names = [each.name for each in fields(Link)]
    for kind, link in links.items():
        field = f"cluster.links.{kind}"
        _check_keys(field, link, names, needed=("latency", "bandwidth"))
        arguments[kind] = Link(**{name: _number(f"{field}.{name}", number) for name, number in link.items()})
    return Cluster(**arguments)


def device_here() -> dict[str, Any]:
    """Return the speeds of the GPU of this machine, as `Cluster` takes them; nothing where they are not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    speeds = _named("device", name) if peaks_of(name) else {}
    return {key: speed for key, speed in speeds.items() if key != "memory"}


def _named(field: str, name: object) -> dict[str, Any]:
    """What `Cluster` takes of a device with this name."""
    if (peaks := peaks_of(str(name))) is None:
        rule, fix = f"Peaks are known of {', '.join(PEAKS)}", "Write flops, memory_bandwidth and memory instead"
        raise ConfigError(field, name, rule, fix)
    return {**peaks._asdict(), "efficiency": REACHED}


def _check_keys(field: str, content: object, allowed: Collection[str], needed: Collection[str] = ()) -> None:
    if not isinstance(content, Mapping):
        raise ConfigError(field, content, f"It maps {', '.join(allowed)} to values", "Write them below it")
    for key in content:
        if key not in allowed:
            raise ConfigError(f"{field}.{key}", content[key], "There is no such key", did_you_mean(key, list(allowed)))
    for key in needed:
        if key not in content:
            raise ConfigError(f"{field}.{key}", None, "It has no default", "Add it, or run mm5d doctor --links --out")


def _number(field: str, raw: object) -> float:
    try:
        number = float(raw) if isinstance(raw, (int, float, str)) and not isinstance(raw, bool) else math.nan
    except ValueError:
        number = math.nan
    least, most, usual = _NUMBERS[field.rpartition(".")[2]]
    if not least <= number <= most:
        raise ConfigError(field, raw, f"It is a number from {least:g} to {most:g}", f"Write for instance {usual}")
    return number


def as_yaml(cluster: Cluster) -> str:
    """Return the file of a cluster."""
    content = asdict(cluster)
    links = {kind: content.pop(kind) for kind in ("inside", "between")}
    return yaml.safe_dump({**content, "links": links}, sort_keys=False)


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
        cluster, note = _measured(device)
        rank, world = dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
    if not has_gpu and not cluster.ranks % 2 and cluster.size == world and "LOCAL_RANK" in os.environ:
        cluster = replace(cluster, inside=_with_overhead(cluster))
    if rank == 0:
        text = note + as_yaml(cluster)
        print(text, end="")
        if out is not None:
            write("--out", out, text)
    return 0


def _measured(device: torch.device) -> tuple[Cluster, str]:
    """Return the cluster, and a comment on what was not measured; of the device on rank 0, with defaults on others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, os.environ.get("GROUP_RANK", "") + socket.gethostname())
    nodes = list(dict.fromkeys(hosts))
    size = -(-world // len(nodes))
    pairs = {"inside": rank ^ 1, "between": (rank + size if rank // size % 2 == 0 else rank - size)}
    links: dict[str, Any] = {}
    for kind, partner in pairs.items():
        able = 0 <= partner < world and (hosts[rank] == hosts[partner]) == (kind == "inside")
        times = [_there_and_back(partner if able else None, rank, size, device) for size in (_SMALL, _LARGE)]
        if all(times):
            links[kind] = Link(times[0], _LARGE / max(times[1] - times[0], 1e-9))
    note = "".join(f"# {kind}: not measured by these processes, the default\n" for kind in pairs if kind not in links)
    dist.barrier()
    speeds = _device_speeds(device) if rank == 0 else {}
    speeds |= _slowdown(device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    memory = memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // size
    cluster = Cluster(nodes=len(nodes), ranks=size, memory=memory, **speeds, **links)
    return cluster, note


def _with_overhead(cluster: Cluster) -> Link:
    """The links inside a node with the overhead of a message on CPUs, by steps of two stages on every two ranks."""
    few, many = (_taken(cluster, size) for size in (_FEW, _MANY))
    each = max((many - few) / (_MANY - _FEW), 0.0)
    return replace(cluster.inside, overhead=max(few - _FEW * each, 0.0), overhead_per_byte=each)


def _taken(cluster: Cluster, size: int) -> float:
    """Seconds that a message of `size` bytes takes of a stage: its forward has one, and its backward."""
    few, many = (_step_seconds(cluster, size, count) for count in _COUNTS)
    layer, hidden = _Layer(), torch.ones(1, size // 4, requires_grad=True)
    layer_seconds = _timed(lambda: layer(hidden).sum().backward(), torch.device("cpu"), rounds=10)
    return max(((many - few) / (_COUNTS[1] - _COUNTS[0]) - layer_seconds) / 2, 0.0)


class _Layer(nn.Module):
    """Computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(())), nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden * self.scale)


class _TwoLayers(L.LightningModule):
    """Notes when its steps begin."""

    def __init__(self) -> None:
        super().__init__()
        self.language, self.began = nn.Sequential(_Layer(), _Layer()), list[float]()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.language(batch).mean()

    def on_train_batch_start(self, *_: object) -> None:
        self.began.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _step_seconds(cluster: Cluster, size: int, count: int) -> float:
    """The median step of `count` microbatches that send messages of `size` bytes, the first steps left out."""
    module = _TwoLayers()
    strategy = MultimodalStrategy(
        modalities={"language": Modality(pp_size=2, dp_size=cluster.size // 2)},
        schedule="gpipe",
        batching={"num_microbatches": count},
    )
    data: Any = torch.ones(_STEPS * count * cluster.size // 2, size // 4)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=cluster.ranks,
            num_nodes=cluster.nodes,
            max_steps=_STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(data, batch_size=count))
    return median(after - before for before, after in pairwise(module.began[3:]))


def _there_and_back(partner: int | None, rank: int, size: int, device: torch.device) -> float:
    """Seconds of one message of the slowest pair; 0 where there is no pair."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)

    def once() -> None:
        if partner is not None:
            for sends in (rank < partner, rank > partner):
                (dist.send if sends else dist.recv)(message, partner)

    dist.barrier()
    seconds = torch.tensor([0.0 if partner is None else _timed(once, device, rounds=10) / 2], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _device_speeds(device: torch.device) -> dict[str, Any]:
    """Flops per second of a large product, and bytes per second of a copy."""
    size = 8192 if device.type == "cuda" else 1024
    matrix = torch.zeros(size, size, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)
    product = _timed(lambda: matrix @ matrix, device, rounds=5)
    return {
        "flops": 2 * size**3 / product,
        "memory_bandwidth": 2 * matrix.nbytes / _timed(matrix.clone, device, rounds=5),
    }


def _slowdown(device: torch.device) -> dict[str, float]:
    """How many times as long rank 0 computes a layer while all ranks do as while the others wait; nothing on others.

    Weights, gradients and activations of the layer are more than caches hold, so that they pass through memory.
    """
    width, length, dtype = (4096, 2048, torch.bfloat16) if device.type == "cuda" else (512, 128, torch.float32)
    kind: dict[str, Any] = {"device": device, "dtype": dtype}
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True, **kind)
    hidden = torch.randn(4, length, width, requires_grad=True, **kind)
    rank, solo, beside = dist.get_rank(), list[float](), list[float]()
    for _ in range(_TURNS):
        for computes, seconds in ((rank == 0, solo), (True, beside)):
            dist.barrier()
            if computes:
                seconds.append(_timed(lambda: layer(hidden).sum().backward(), device, rounds=2))
    ratios = [together / single for together, single in zip(beside, solo, strict=False)]  # none on other ranks
    return {"compute_slowdown": max(median(ratios), 1.0)} if ratios else {}


def _timed(call: Callable[[], object], device: torch.device, *, rounds: int) -> float:
    """The median of the seconds of a call, after one that is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
