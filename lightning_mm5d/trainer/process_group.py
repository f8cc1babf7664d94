"""The default process group: made once, and asked where messages live and which seed all ranks use."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment


def connect(environment: ClusterEnvironment, backend: str | None, timeout: timedelta, device: torch.device) -> None:
    """Make the default process group, unless there is one.

    Args:
        environment: knows the address, the port and this rank.
        backend: of torch.distributed; None chooses ``nccl`` on CUDA and ``gloo`` elsewhere.
        timeout: of every operation between ranks.
        device: where this rank computes.
    """
    if dist.is_initialized():
        return
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(
        chosen,
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=timeout,
        device_id=device if chosen == "nccl" else None,
    )


def message_device(device: torch.device) -> torch.device:
    """Return where messages of the default group live: on `device` with NCCL, else in host memory."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")


def agreed_seed(device: torch.device) -> int:
    """Return rank 0's seed on every rank; collective."""
    own = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed() % 2**62)
    seed = torch.tensor([own], device=message_device(device))
    dist.broadcast(seed, 0)
    return int(seed)


def decided(decision: bool, all_ranks: bool, device: torch.device) -> bool:
    """Return on every rank whether all ranks decided yes, or any, with ``all_ranks=False``; collective."""
    flag = torch.tensor(int(decision), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN if all_ranks else dist.ReduceOp.MAX)
    return bool(flag)


def broadcast_object(value: Any, src: int) -> Any:
    """Return the object of rank `src` on every rank, for Lightning's own; collective."""
    objects = [value]
    dist.broadcast_object_list(objects, src)
    return objects[0]
