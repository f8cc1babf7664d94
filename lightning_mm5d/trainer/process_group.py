"""The default process group: made once, and asked where messages live and which seed all ranks use.

Ranks meet at a store, which the first of them serves. The process group is made over it; what ranks compare before any
collective goes through it as well.

The name of a round of torchrun's workers, which all of them know and no other round has.

torchrun's agents keep one store over all restarts, in which keys of earlier rounds remain. The environment does not
tell rounds apart: a restart after nodes have come or gone is not counted, and agents count for themselves. So the
workers agree on a name through that store:

1. ask: each rank publishes a number that it has drawn.
2. answer: rank 0 publishes its own number, the name, under the number of every rank. It also answers numbers of earlier
   rounds, which nobody reads any more, and goes on until every rank of this round says that it has heard.
3. hear: each rank reads the name under its own number, and says so under the name.

Checks of the environment variables that tell a process its rank, where Lightning itself starts the processes.

A modality's ranks as a `DeviceMesh` of torch, so that torch's own tools work beside the strategy.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_mm5d.config.errors import ConfigError, RankLostError, did_you_mean
from lightning_mm5d.config.options import AXES
from lightning_mm5d.data.random_state import packed_state, seed_of
from lightning_mm5d.engine.agreement import looks, ranks_of
from lightning_mm5d.engine.run_groups import Groups, Wish
from lightning_mm5d.layout import Layout
from lightning_mm5d.sharded.collectives import backend_of, message_device, waits_on_device, warn_on_first_rank


def check_environment(environment: Mapping[str, str], *, num_processes: int, num_nodes: int) -> None:
    """Refuse ranks and ports that contradict the trainer, since a process would wait for others that never come.

    Args:
        environment: variables of this process.
        num_processes: ranks on each node.
        num_nodes: nodes.

    Raises:
        ConfigError: at the first variable that is no number or out of range.
    """
    world = num_processes * num_nodes
    limits = {
        "LOCAL_RANK": (0, num_processes - 1, f"The trainer has {num_processes} devices on each node"),
        "NODE_RANK": (0, num_nodes - 1, f"The trainer has num_nodes={num_nodes}"),
        "GROUP_RANK": (0, num_nodes - 1, f"The trainer has num_nodes={num_nodes}"),
        "MASTER_PORT": (1, 65535, "A port is a number up to 65535"),
    }
    if "LOCAL_RANK" in environment:  # else the processes that will be started get a new one
        limits["WORLD_SIZE"] = (world, world, f"The trainer has {num_processes} devices on each of {num_nodes} nodes")
    for name, (least, most, rule) in limits.items():
        got = environment.get(name)
        if got is None or (got.isdecimal() and least <= int(got) <= most):
            continue
        between = f"{least}" if least == most else f"a number from {least} to {most}"
        rule = f"{rule}, so it is {between}"
        raise ConfigError(name, got, rule, "Leave the environment variable unset, or correct it")


NAMED = "LIGHTNING_MM5D_ROUND"
"""variable of a process: its number, and the name of its round"""


def has_agent_store() -> bool:
    """Return whether torchrun's agent hosts the store that workers meet at."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def round_name(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return the name of the round that this process belongs to; the first call waits for all ranks.

    Arguments and errors are those of `agreed_name`.
    """
    process, _, name = os.environ.get(NAMED, "").partition(" ")
    if process != str(os.getpid()):  # that of a process above this one
        name = agreed_name(store, rank=rank, world_size=world_size, timeout=timeout)
        os.environ[NAMED] = f"{os.getpid()} {name}"
    return name


def agreed_name(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a new name, equal on all ranks; waits for all of them.

    Args:
        store: the agents' own, with the same keys in every round.
        rank: global rank in this round.
        world_size: number of ranks in this round.
        timeout: how long to wait for other ranks.

    Raises:
        RankLostError: a rank did not come within the timeout.
    """
    token = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asks {rank}", token)
        for _ in looks(timeout.total_seconds()):
            if store.check([f"answer {token}"]):
                name = store.get(f"answer {token}").decode()
                store.set(f"{name} heard by {rank}", "")
                return name
        raise RankLostError(f"rank 0 did not come to this round of torchrun within {timeout}")
    away = set(range(1, world_size))
    for _ in looks(timeout.total_seconds()):
        for other in sorted(away):
            if store.check([f"{token} heard by {other}"]):
                away.remove(other)
            elif store.check([f"asks {other}"]):
                store.set(f"answer {store.get(f'asks {other}').decode()}", token)
        if not away:
            return token
    raise RankLostError(f"{ranks_of(sorted(away))} did not come to this round of torchrun within {timeout}")


_LOOK_S, _LOOKS_S = 0.2, 1.0  # for a server, of one look and of all
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
    is_master = environment.global_rank() == 0 and not has_agent_store()
    if not is_master:
        _until_served(environment.main_address, environment.main_port)
    store = dist.TCPStore(
        environment.main_address,
        environment.main_port,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    _LATEST[os.getpid(), environment.global_rank()] = store
    return dist.PrefixStore("lightning_mm5d", store)


def _until_served(address: str, port: int) -> None:
    """Wait a second for a server: a store that comes too early tries again after half a second or more."""
    for _ in looks(_LOOKS_S):
        with suppress(OSError), socket.create_connection((address, port), timeout=_LOOK_S):
            return


def round_store(environment: ClusterEnvironment, timeout: timedelta) -> dist.Store:
    """Return a new connection to the store that all ranks meet at, with keys of this round of torchrun alone.

    The first call waits for all ranks where torchrun's agent hosts the store. Arguments are those of
    `rendezvous_store`.

    Raises:
        RankLostError: a rank did not come within the timeout.
    """
    store = rendezvous_store(environment, timeout)
    if not has_agent_store():
        return store
    rank, size = environment.global_rank(), environment.world_size()
    return dist.PrefixStore(round_name(store, rank=rank, world_size=size, timeout=timeout), store)


@cache
def _keep_garbage_in_forks() -> None:
    """Let processes forked from now on, as workers of dataloaders, never collect what they inherit.

    Stores and groups of earlier runs lie in cycles. Their destructors wait for threads, which do not live on in a fork.
    Nothing is collected either while others' functions for forks run, which may come before these in the new process.
    """
    if not hasattr(os, "register_at_fork"):
        return
    were_on = list[bool]()  # of threads that fork at the same time each has one

    def stop() -> None:
        were_on.append(gc.isenabled())
        gc.disable()

    def go_on() -> None:
        if were_on.pop():
            gc.enable()

    def keep() -> None:
        gc.freeze()
        go_on()

    os.register_at_fork(before=stop, after_in_parent=go_on, after_in_child=keep)


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

    Raises:
        ConfigError: there is one, of an earlier run or of the user's own, which does not carry tensors of `device`.
    """
    _keep_garbage_in_forks()
    if dist.is_initialized():
        carries = backend_of(device) or (device.type != "cuda" and backend_of(torch.device("cpu")))
        if not carries:
            has = dist.get_backend_config()
            rule = f"This process has a process group already, for {has}, which carries no tensors of {device.type}"
            fix = "Call torch.distributed.destroy_process_group() before, or begin with 'cpu:gloo,cuda:nccl'"
            raise ConfigError("launch.process_group_backend", backend, rule, fix)
        if backend is None and device.type == "cuda" and not waits_on_device(device):
            warn_on_first_rank("This process has a group of gloo already, which takes messages through host memory")
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
    """Return a seed of all random streams of a run on every rank, by rank 0's random state; collective.

    So a second run of a script draws other numbers than the first, as on one process, whose state goes on.
    """
    seed = torch.tensor([seed_of(_digest(torch.get_rng_state()))], device=message_device(device))
    dist.broadcast(seed, 0)
    return int(seed)


def random_states_agree(device: torch.device) -> bool:
    """Return whether random generators have the same state on all ranks; collective."""
    seed = seed_of(_digest(packed_state()))
    ends = torch.tensor([seed, -seed], device=message_device(device))
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return bool(ends.sum() == 0)


def _digest(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def decided(decision: bool, all_ranks: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return on every rank of a group whether all decided yes, or any, with ``all_ranks=False``; collective."""
    flag = torch.tensor(int(decision), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN if all_ranks else dist.ReduceOp.MAX, group)
    return bool(flag)


def device_mesh(layout: Layout, modality: str, groups: Groups, device: torch.device, rank: int) -> DeviceMesh | None:
    """Return the mesh of a modality with process groups of its own; None on other ranks. Collective over the world.

    Args:
        layout: of all modalities.
        modality: its name.
        groups: makes the groups of its dims.
        device: where this rank computes.
        rank: global rank.

    Raises:
        ConfigError: the modality is unknown, is on one rank, or its ranks are no mesh whose groups are in rising order.
    """
    if modality not in layout.modalities:
        rule = f"Modalities are {', '.join(layout.modalities)}"
        raise ConfigError("device_mesh", modality, rule, did_you_mean(modality, layout.modalities))
    size = layout.sizes(modality)
    lengths = {name: getattr(size, name) for name in AXES if getattr(size, name) > 1}
    ranks = layout.ranks_of(modality)
    if len(ranks) != int(np.prod([*lengths.values()])):
        rule = "Its replicas have pipelines of unlike lengths, which are no mesh"
        raise ConfigError("device_mesh", modality, rule, "Use pp_size in place of pipelines")
    if not lengths:
        rule = f"It is on rank {ranks[0]} alone, and a mesh has a dim with two ranks or more"
        raise ConfigError("device_mesh", modality, rule, "Ask for a modality with several ranks")
    mesh = np.array(ranks).reshape([*lengths.values()])
    lines = {name: np.moveaxis(mesh, dim, -1).reshape(-1, lengths[name]) for dim, name in enumerate(lengths)}
    for name, rows in lines.items():
        if (np.diff(rows, axis=1) < 0).any():
            rule = f"Along {name} its ranks do not rise, and those of a process group do"
            raise ConfigError("device_mesh", modality, rule, "Use a placement of axes, or leave it unset")
    wishes = {
        name: [Wish(tuple(map(int, row)), f"{modality} mesh {name}") for row in rows] for name, rows in lines.items()
    }
    groups.make(wish for rows in wishes.values() for wish in rows)
    if rank not in ranks:
        return None
    by_dim = [groups.get(next(row for row in rows if rank in row.ranks).ranks, rows[0].tag) for rows in wishes.values()]
    held: list[ProcessGroup] = [group for group in by_dim if group is not None]
    if len(held) == 1:
        return DeviceMesh.from_group(held[0], device.type, mesh_dim_names=tuple(lengths))
    return DeviceMesh.from_group(held, device.type, mesh=torch.from_numpy(mesh), mesh_dim_names=tuple(lengths))
