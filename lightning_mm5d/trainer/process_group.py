"""The default process group: made once, and asked where messages live and which seed all ranks use.

Ranks meet at a store, which the first of them serves. The process group is made over it; what ranks compare before any
collective goes through it as well.
"""

from __future__ import annotations

import gc
import os
import random
import socket
from contextlib import suppress
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from lightning_mm5d.data.order_stream import packed_state
from lightning_mm5d.data.random_state import seed_of
from lightning_mm5d.sharded.backends import message_device
from lightning_mm5d.trainer.torchrun_round import has_agent_store

_LATEST: dict[tuple[int, int], dist.TCPStore] = {}
"""the store that was opened last, by process and rank: a fork may not end one that it inherits"""


def free_port() -> int:
    """Return a port of this machine that nothing listens at.

    It lies below those that systems give to outgoing connections, for one of these could take it before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def rendezvous_store(environment: ClusterEnvironment, timeout: timedelta) -> dist.Store:
    """Return the store that all ranks meet at; a new connection with keys of this package alone.

    It does not wait for other ranks. Where torchrun's agent serves a store, that one is used. It outlives the ranks, so
    its keys are to be prefixed by the `round_name` of these. Else rank 0 serves it for as long as its process lives:
    other ranks may be in the next run while this one still ends a run that failed.

    Args:
        environment: knows the address, the port and this rank.
        timeout: of the connection, and of every wait for a key.
    """
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    store = dist.TCPStore(
        environment.main_address,
        environment.main_port,
        is_master=environment.global_rank() == 0 and not has_agent_store(),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    _LATEST[os.getpid(), environment.global_rank()] = store
    return dist.PrefixStore("lightning_mm5d", store)


@cache
def _keep_garbage_in_forks() -> None:
    """Let processes forked from now on, as workers of dataloaders, never collect what they inherit.

    Stores and groups of earlier runs lie in cycles. Their destructors wait for threads, which do not live on in a fork.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


def connect(
    environment: ClusterEnvironment, store: dist.Store, backend: str | None, timeout: timedelta, device: torch.device
) -> None:
    """Make the default process group, unless there is one.

    Args:
        environment: knows this rank and how many there are.
        store: what `rendezvous_store` returns.
        backend: of torch.distributed; None chooses ``nccl`` on CUDA and ``gloo`` elsewhere.
        timeout: of every operation between ranks.
        device: where this rank computes.
    """
    _keep_garbage_in_forks()
    if dist.is_initialized():
        return
    rank = environment.global_rank()
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    # a store that outlives a group still has the addresses of that one
    number = store.add(f"groups of {rank}", 1)
    # torch warns of what the order of messages counts on: those of one communicator run one after the other
    if device.type == "cuda":
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    dist.init_process_group(
        chosen,
        rank=rank,
        world_size=environment.world_size(),
        store=dist.PrefixStore(f"group {number}", store),
        timeout=timeout,
        device_id=device if device.type == "cuda" and "nccl" in chosen.lower() else None,
    )


def agreed_seed(device: torch.device) -> int:
    """Return rank 0's seed on every rank; collective."""
    own = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed() % 2**62)
    seed = torch.tensor([own], device=message_device(device))
    dist.broadcast(seed, 0)
    return int(seed)


def random_states_agree(device: torch.device) -> bool:
    """Return whether random generators have the same state on all ranks; collective."""
    own = seed_of(packed_state().numpy().tobytes().hex())
    ends = torch.tensor([own, -own], device=message_device(device))
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return bool(ends.sum() == 0)


def decided(decision: bool, all_ranks: bool, device: torch.device) -> bool:
    """Return on every rank whether all ranks decided yes, or any, with ``all_ranks=False``; collective."""
    flag = torch.tensor(int(decision), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN if all_ranks else dist.ReduceOp.MAX)
    return bool(flag)
