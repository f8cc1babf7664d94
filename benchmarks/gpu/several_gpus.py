"""Ranks with a GPU each, over NCCL: parity, 1F1B and tensor parallelism beside torch's own, bubbles beside simulated.

Dry, ranks compute on the CPU over gloo.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import Logger
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.gpu import shared_gpu, towers
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import LackingError, Row
from lightning_mm5d import Modality, MultimodalStrategy

BENCHMARKS = str(Path(__file__).parents[1])
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import turns  # noqa: E402

from benchmarks import tensor_parallel  # noqa: E402
from ranks import run_ranks  # noqa: E402

LIMIT_S = 200
MICROBATCHES = 8
APART = {"vision": Modality(module="encoder", boundary="encoder"), "language": Modality()}
LARGE = towers.Size(width=2048, heads=16, vision=16, language=8, patches=1024, tokens=1024, vocabulary=32000)
"""Both towers take about as long: the decoder sees twice as many tokens."""
LLAMA = tensor_parallel.Size(width=4096, hidden=11008, layers=4, vocabulary=32000, batch=2, tokens=2048)
SMALL_LLAMA = tensor_parallel.Size(width=64, hidden=128, layers=2, vocabulary=128, batch=1, tokens=16)


def _steps(machine: Machine) -> int:
    return turns.WARMUP + machine.pick(16, 1)


def _two(machine: Machine) -> None:
    if machine.gpus < 2:
        raise LackingError("needs two GPUs or more")


def parity(machine: Machine) -> Iterator[Row]:
    """Yield for each layout that the GPUs can hold whether it equals one process."""
    _two(machine)
    torch.set_default_dtype(torch.float64)
    for world, name, run in shared_gpu.LAYOUTS:
        title = f"{world} GPUs, {run.name}: {name}: differences from one process"
        if world > machine.gpus:
            yield Row(name=title, status="skipped", note=f"needs {world} GPUs")
        elif not machine.is_dry or name == "tp 2, sequence_parallel":
            yield shared_gpu.compared(title, world, replace(run, accelerator=machine.accelerator))
    shared_gpu.POOL.close()


# --- 1F1B beside torch.distributed.pipelining ---


def one_f_one_b(machine: Machine) -> Iterator[Row]:
    """Yield the time of a step over that of the same stages by hand."""
    _two(machine)
    size, steps = machine.pick(LARGE, towers.SMALL), _steps(machine)
    data = towers.batches(size, steps, MICROBATCHES)
    ours, theirs = turns.race(
        turns.Side(2, lambda each, rank: _by_strategy(machine, each, size, data)),
        turns.Side(2, lambda each, rank: _by_hand(machine, each, rank, size, data)),
        steps,
    )
    note = f"{turns.milliseconds(ours)} / {turns.milliseconds(theirs)}"
    ratio = turns.median_ratio(ours, theirs)
    title = "vision | language under 1f1b: time of a step, strategy / torch.distributed.pipelining"
    yield Row(name=title, value=ratio, at_most=1.0, note=note)
    pairs = zip(ours.results[1], theirs.results[1], strict=True)
    off = max(abs(loss - expected) / abs(expected) for loss, expected in pairs)
    yield Row(name="losses of both sides: relative difference", value=off, at_most=0.02)


def _by_strategy(machine: Machine, each: turns.Turns, size: towers.Size, data: list[Any]) -> list[float]:
    strategy = MultimodalStrategy(
        APART, batching={"num_microbatches": MICROBATCHES}, launch={"timeout": towers.TIMEOUT}
    )
    module = towers.Towers(size)
    return towers.fit(module, data, strategy, machine.accelerator, each, devices=2, precision="bf16-true")


def _by_hand(machine: Machine, each: turns.Turns, rank: int, size: towers.Size, data: list[Any]) -> list[float]:
    """Return the losses on the last rank, nothing on the first."""
    device = machine.device if machine.is_dry else torch.device("cuda", rank)
    if not machine.is_dry:
        torch.cuda.set_device(device)
    dist.init_process_group(machine.backend, timeout=towers.TIMEOUT, device_id=None if machine.is_dry else device)
    whole = towers.Towers(size)
    part = (whole.encoder if rank == 0 else whole.decoder).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, device), MICROBATCHES, loss_fn=towers.next_token_loss)
    means = []
    for batch in data:
        each()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch["images"].to(device, torch.bfloat16))
        else:
            losses: list[Any] = []
            tokens = batch["tokens"].to(device)
            schedule.step(tokens=tokens, target=tokens, losses=losses)
            means.append(torch.stack([loss.detach() for loss in losses]).mean())
        optimizer.step()
    each.end()
    return [float(mean) for mean in means]


# --- tensor parallelism beside torch's DTensor plan ---


def tensor(machine: Machine) -> Iterator[Row]:
    """Yield the time of a step over that of Lightning's ModelParallelStrategy, with and without sequence shards."""
    _two(machine)
    size = machine.pick(LLAMA, SMALL_LLAMA)
    for divided in machine.pick((False, True), (False,)):
        mine, theirs = turns.race(
            turns.Side(2, lambda each, rank, d=divided: _tensor(machine, each, size, d, by_hand=False)),
            turns.Side(2, lambda each, rank, d=divided: _tensor(machine, each, size, d, by_hand=True)),
            _steps(machine),
        )
        name = f"tp 2, Llama of width {size.width}{', sequence_parallel' * divided}"
        note = f"{turns.milliseconds(mine)} / {turns.milliseconds(theirs)}"
        title = f"{name}: time of a step, strategy / DTensor"
        yield Row(name=title, value=turns.median_ratio(mine, theirs), at_most=1.0, note=note)
        pairs = zip(mine.results[0], theirs.results[0], strict=True)
        off = max(abs(loss - expected) / abs(expected) for loss, expected in pairs)
        yield Row(name=f"{name}: losses of both sides: relative difference", value=off, at_most=0.01)


def _tensor(
    machine: Machine, each: turns.Turns, size: tensor_parallel.Size, divided: bool, by_hand: bool
) -> list[float]:
    torch.set_float32_matmul_precision("high")
    module = tensor_parallel.ByHand(size, divided) if by_hand else tensor_parallel.Llama(size)
    strategy = tensor_parallel.by_hand() if by_hand else tensor_parallel.ours(divided)
    return tensor_parallel.train(each, module, strategy, size, machine.accelerator, _steps(machine))[0]


# --- bubbles ---


class Shares(Logger):
    """Keeps the last idle share of each rank that `DeviceStatsMonitor` logs."""

    def __init__(self) -> None:
        super().__init__()
        self.idle_shares: dict[str, float] = {}

    @property
    def name(self) -> str:
        return "shares"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.idle_shares |= {key: value for key, value in metrics.items() if key.endswith("/bubble_share")}


def bubbles(machine: Machine) -> Iterator[Row]:
    """Yield the mean idle share of ranks in a step, and over the simulated one."""
    _two(machine)
    world = min(machine.gpus, 8)
    size = machine.pick(LARGE, towers.SMALL)
    # encoder and language model take as long: layers per GPU are equal where the count is even
    pipelines = max(world // 2, 1)
    modalities = {
        "vision": replace(APART["vision"], pp_size=pipelines),
        "language": replace(APART["language"], pp_size=world - pipelines),
    }
    for schedule in machine.pick(("1f1b", "zero_bubble"), ("1f1b",)):
        strategy = MultimodalStrategy(
            modalities,
            schedule=schedule,
            batching={"num_microbatches": MICROBATCHES},
            launch={"timeout": towers.TIMEOUT},
        )
        results = run_ranks(world, _shares, machine, strategy, size, world, limit=LIMIT_S)
        measured, simulated = results[0]
        name = f"{world} GPUs, vision pp {pipelines} | language pp {world - pipelines}, {schedule}: idle share"
        yield Row(name=name, value=measured, note=f"simulated {simulated:.3f}")
        if simulated > 0:
            yield Row(name=f"{name}, measured / simulated", value=measured / simulated)


def _shares(
    rank: int, machine: Machine, strategy: MultimodalStrategy, size: towers.Size, world: int
) -> tuple[float, float]:
    """Return the mean idle share of ranks in the last step, measured and simulated."""
    shares = Shares()
    towers.fit(
        towers.Towers(size),
        towers.batches(size, 6, MICROBATCHES),
        strategy,
        machine.accelerator,
        DeviceStatsMonitor(),
        devices=world,
        precision="bf16-true",
        logger=shares,
        log_every_n_steps=1,
    )
    simulated = statistics.mean(strategy.simulate(towers.Towers(size)).bubble.values())
    return (statistics.mean(shares.idle_shares.values()) if shares.idle_shares else 0.0), simulated
