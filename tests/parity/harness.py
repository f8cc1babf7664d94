"""Runs a module under the strategy and on one process, and compares losses, gradients and parameters.

Each rank is a process started by fork; the whole run has a wall-clock limit, so that a deadlock fails.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.multiprocessing as mp
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_mm5d import MultimodalStrategy

LIMIT_S = 120


class Recorder(Callback):
    """Keeps the loss of every step, and every gradient before every optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(
            {
                name: p.grad.detach().clone()
                for name, p in pl_module.named_parameters(remove_duplicate=False)
                if p.grad is not None
            }
        )


class Batches(torch.utils.data.Dataset):
    """Samples of batches given whole: item i is batch i."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(world: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT_S) -> list[Any]:
    """Call ``function(rank, *args)`` in `world` processes; return what each returned."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [
            context.Process(target=_entry, args=(rank, world, port, folder, function, args)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + limit
        while time.monotonic() < end and any(p.is_alive() for p in processes):
            if any(p.exitcode not in (None, 0) for p in processes):
                end = min(end, time.monotonic() + 10)
            time.sleep(0.05)
        hung = [rank for rank, p in enumerate(processes) if p.is_alive()]
        for p in processes:
            if p.is_alive():
                p.kill()
            p.join()
        errors = [f.read_text() for f in sorted(Path(folder).glob("*.err"))]
        if errors:
            raise AssertionError("\n".join(errors))
        assert not hung, f"ranks {hung} did not end within {limit} s"
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _entry(rank: int, world: int, port: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    try:
        result = function(rank, *args)
        torch.save(result, Path(folder) / f"{rank}.pt")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    except BaseException:
        (Path(folder) / f"{rank}.err").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def fit(
    module: L.LightningModule, batches: list[Any], strategy: Any = "auto", devices: int = 1, **options: Any
) -> Recorder:
    """Train `module` on `batches` (one a step) and return what was recorded."""
    recorder = Recorder()
    callbacks = [recorder, *options.pop("callbacks", [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
            **{"use_distributed_sampler": False, **options},
        )
        trainer.fit(module, DataLoader(Batches(batches), batch_size=None))
    return recorder


def strategy(modalities: Any, **options: Any) -> MultimodalStrategy:
    return MultimodalStrategy(modalities=modalities, timeout=timedelta(seconds=60), **options)
