"""Trains the sides of a comparison step by step in turns, so that all see the same noise of a shared machine.

Each side is a set of forked processes, one a rank, with one thread each. All stay alive from beginning to end; a side
runs one step while the others sleep. A step is timed from the release of its ranks until the last one is done,
with all that happens between two batches. The order within a round alternates, and the result is the median of the
ratios of two sides in a round. A rank that is silent for `LIMIT_S` is an error.
"""

from __future__ import annotations

import datetime
import logging
import os
import resource
import socket
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import lightning as L
import torch
import torch.multiprocessing as mp
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

LIMIT_S = 120
WARMUP = 4


class Turns(Callback):
    """A rank's turn: call it before every step, and `end` after the last one."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self) -> None:
        """Say that the step before is done, on a GPU too; return when the next one may begin."""
        self.end()
        self._pipe.recv()

    def end(self) -> None:
        """Say that the last step is done."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._pipe.send(None)

    def on_train_batch_start(self, *_: Any) -> None:
        """One turn lasts from the start of one batch to the start of the next."""
        self()

    def on_train_epoch_end(self, *_: Any) -> None:
        """The last turn ends with the last batch."""
        self.end()


@dataclass(frozen=True)
class Side:
    """One of the things to compare.

    Attributes:
        world: number of processes.
        train: called in each with the turns and the rank; makes as many steps as the race has, and returns something.
    """

    world: int
    train: Callable[[Turns, int], Any]


@dataclass(frozen=True)
class Raced:
    """The result of one side.

    Attributes:
        seconds: duration of each step after the warm-up.
        results: what `train` returned, by rank.
        peak_bytes: the largest resident memory of each rank's process.
    """

    seconds: list[float]
    results: list[Any]
    peak_bytes: list[int]


def race(first: Side, second: Side, steps: int) -> tuple[Raced, Raced]:
    """Let both sides make `steps` steps each, in turns."""
    a, b = race_all((first, second), steps)
    return a, b


def race_all(sides: Sequence[Side], steps: int) -> list[Raced]:
    """Let all sides make `steps` steps each, in turns."""
    started = [_start(side) for side in sides]
    seconds: list[list[float]] = [[] for _ in sides]
    try:
        for _, pipes in started:
            _gather(pipes)
        for step in range(steps):
            for index in list(range(len(sides)))[:: 1 if step % 2 else -1]:
                seconds[index].append(_turn(started[index][1]))
        ends = [_gather(pipes) for _, pipes in started]
    finally:
        for processes, _ in started:
            for process in processes:
                process.join(timeout=10)
                process.kill()
    return [
        Raced(times[WARMUP:], [result for result, _ in end], [peak for _, peak in end])
        for times, end in zip(seconds, ends, strict=True)
    ]


def median_ratio(first: Raced, second: Raced) -> float:
    """The median over rounds of first / second, in time."""
    return statistics.median(a / b for a, b in zip(first.seconds, second.seconds, strict=True))


def run(side: Side) -> list[Any]:
    """Run one side alone, without turns to wait for; return what `train` returned, by rank."""
    processes, pipes = _start(side)
    try:
        results = []
        for pipe in pipes:
            while (message := _receive(pipe)) is None:
                pipe.send(None)
            results.append(message[0])
        return results
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()


def fit(
    module: L.LightningModule,
    loader: DataLoader,
    strategy: Any,
    world: int,
    *callbacks: Callback,
    accelerator: Any = "cpu",
    **options: Any,
) -> None:
    """Train `module` for one epoch with nothing else switched on but `options` of the trainer."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=world,
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,  # every side gets exactly the batches that it was given
            callbacks=list(callbacks),
            **options,
        )
        trainer.fit(module, loader)


def row(figure: str, ratio: float, aim: str, measured: str) -> None:
    """Print one row of the table in README.md."""
    machine = f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, {datetime.date.today()}"
    print(f"| {figure} | {ratio:.3f} | {aim} | {measured} | {machine} |", flush=True)


def milliseconds(raced: Raced) -> str:
    """The median step as text."""
    return f"{statistics.median(raced.seconds) * 1e3:.1f} ms"


def _start(side: Side) -> tuple[list[Any], list[Connection]]:
    context = mp.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, pipes = [], []
    for rank in range(side.world):
        here, there = context.Pipe()
        process = context.Process(target=_entry, args=(there, side, rank, port), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    return processes, pipes


def _entry(pipe: Connection, side: Side, rank: int, port: int) -> None:
    os.environ |= {  # what torchrun sets, so that Lightning starts no processes of its own
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(side.world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(side.world),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "benchmark",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    try:
        result = side.train(Turns(pipe), rank)
        pipe.send((result, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    except BaseException:
        pipe.send(RuntimeError(f"rank {rank}:\n{traceback.format_exc()}"))
    os._exit(0)


def _turn(pipes: list[Connection]) -> float:
    start = time.perf_counter()
    for pipe in pipes:
        pipe.send(None)
    _gather(pipes)
    return time.perf_counter() - start


def _gather(pipes: list[Connection]) -> list[Any]:
    return [_receive(pipe) for pipe in pipes]


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"a rank was silent for {LIMIT_S} s")
    message = pipe.recv()
    if isinstance(message, RuntimeError):
        raise message
    return message
