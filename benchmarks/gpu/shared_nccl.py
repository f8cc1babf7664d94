"""Real NCCL ranks that share one GPU: layouts equal one process, communicators take little memory, a mismatch ends.

NCCL refuses two ranks on one GPU of a host. It tells hosts by ``NCCL_HOSTID``, so each rank has one of its own, and
messages go through the loopback interface: unsupported and slow, and yet real communicators, splits, streams and
watchdogs. No figure of time is taken here. Dry, a backend on the CPU orders operations as NCCL does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from benchmarks.gpu import shared_gpu
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import Row
from benchmarks.gpu.towers import SMALL, TIMEOUT, Towers, batches, fit
from lightning_mm5d import Modality, MultimodalStrategy

import nccl_order  # isort: skip  # of the tests, which `shared_gpu` makes known
from features.shared_experts import composed_training  # isort: skip
from ranks import POOL, call_ranks, run_ranks  # isort: skip
from tensor_parallel.layouts import Compared, State, train  # isort: skip

LLAMA = "llama_tied"
BESIDE = {"pipeline": {"interleaved_microbatches": 2}}
LAYOUTS: list[tuple[int, str, Compared]] = [
    (2, "pp 2, 1f1b", Compared(name=LLAMA, fields={"language": {"pp_size": 2}})),
    (2, "pp 2, zbv", Compared(name=LLAMA, fields={"language": {"pp_size": 2}}, options={"schedule": "zbv"})),
    (2, "dp 2, zero 1", replace(shared_gpu.SHARED, fields={"language": {"sharding": {"zero_stage": 1}}})),
    (2, "dp 2, zero 3", shared_gpu.SHARED),
    *(
        layout
        for layout in shared_gpu.LAYOUTS
        if layout[1]
        in (
            *("tp 2, sequence_parallel", "cp 2, ring", "vision | language pp 2", "dp 2, pp 2"),
            "vision tp 2 | language pp 3 tp 2",
        )
    ),
    (2, "tp 2, two microbatches side by side", Compared(name=LLAMA, fields={"language": {"tp_size": 2, **BESIDE}})),
    (3, "pp 3", Compared(name=LLAMA, fields={"language": {"pp_size": 3}})),
]
"""Ranks, what the report says, and the run."""
DRY = ("pp 2, 1f1b", "dp 2, zero 3")
WATCHDOG_S = 2 * TIMEOUT.total_seconds()


def parity(machine: Machine) -> Iterator[Row]:
    """Yield for each layout whether it equals one process."""
    torch.set_default_dtype(torch.float64)
    for world, name, run in LAYOUTS:
        if machine.is_dry and name not in DRY:
            continue
        title = f"{world} NCCL ranks on one GPU, {run.name}: {name}: differences from one process"
        given = replace(
            run, accelerator=machine.shared, options={**run.options, "process_group_backend": backend(machine)}
        )
        if "sharding" in run.fields["language"]:
            yield shared_gpu.compared_parameters(title, world, given, over_nccl)
        else:
            yield shared_gpu.compared(title, world, given, over_nccl)
    for name, composition in EXPERTS.items():
        yield _of_experts(
            f"2 NCCL ranks on one GPU, qwen3_moe: {name}: differences of parameters", composition, machine
        )
    POOL.close()


EXPERTS = {
    "dp 2, ep 2": composed_training.Composition(microbatches=2),
    "dp 2, ep 2, zero 3": composed_training.Composition(
        fields={"ep_size": 2, "sharding": {"zero_stage": 3}}, microbatches=2
    ),
}


def _of_experts(title: str, composition: composed_training.Composition, machine: Machine) -> Row:
    given = replace(
        composition, trainer={"accelerator": machine.shared}, options={"process_group_backend": backend(machine)}
    )

    def check() -> None:
        (expected,) = call_ranks(1, experts_over_nccl, given.alone, limit=shared_gpu.LIMIT_S)
        weights, _ = call_ranks(2, experts_over_nccl, given, limit=shared_gpu.LIMIT_S)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)  # its norms and routers compute in float32

    return shared_gpu.without_difference(title, check)


def experts_over_nccl(rank: int, composition: composed_training.Composition) -> dict[str, torch.Tensor] | None:
    """What `composed_training.trained` returns on a rank on a host that NCCL takes for its own."""
    be_alone(rank)
    return composed_training.trained(rank, composition)


def backend(machine: Machine) -> str:
    return machine.pick("nccl", "nccl_order")


def over_nccl(rank: int, runs: list[Compared], world: int) -> list[tuple[list[float], list[State], State]]:
    """`train` of a rank on a host that NCCL takes for its own."""
    be_alone(rank)
    return train(rank, runs, world)


def be_alone(rank: int) -> None:
    """Have NCCL take this process for the only one of its host; before the process makes a group."""
    os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    nccl_order.register()


# --- memory of communicators, and a mismatch ---


def memory(machine: Machine) -> Iterator[Row]:
    """Yield how much of a GPU a rank takes outside of torch's allocator: context, libraries and communicators."""
    modalities = {"vision": Modality(module="encoder", boundary="encoder"), "language": Modality(pp_size=2)}
    for world in (3,):
        outside = run_ranks(world, _outside, machine, modalities, world, limit=shared_gpu.LIMIT_S)
        name = f"{world} NCCL ranks on one GPU, vision | language pp 2: outside of torch's allocator, of a rank"
        yield Row(name=name, value=outside[0] / 2**20, unit="MiB")


class Taken(Callback):
    """Notes how much of the GPU is taken by all, less what torch has reserved on each rank."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.nbytes = machine, 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.machine.is_dry:
            return
        free, total = torch.cuda.mem_get_info()
        reserved = torch.tensor(float(torch.cuda.memory_reserved()), device=self.machine.device)
        dist.all_reduce(reserved)
        self.nbytes = (total - free - float(reserved)) / trainer.world_size


def _outside(rank: int, machine: Machine, modalities: dict[str, Modality], world: int) -> float:
    be_alone(rank)
    taken = Taken(machine)
    strategy = MultimodalStrategy(
        modalities,
        batching={"num_microbatches": 4},
        launch={"process_group_backend": backend(machine), "timeout": TIMEOUT},
    )
    fit(Towers(SMALL), batches(SMALL, steps=2, samples=4), strategy, machine.shared, taken, devices=world)
    return taken.nbytes


def mismatch(machine: Machine) -> Iterator[Row]:
    """Yield how long two ranks take to end after one of them has made a call that the other does not make."""
    start = time.monotonic()
    title = "2 NCCL ranks on one GPU, of which one calls all_reduce alone: time until both have ended"
    try:
        run_ranks(2, _mismatched, machine, limit=WATCHDOG_S)
    except AssertionError as error:
        seconds = time.monotonic() - start
        yield Row(name=title, value=seconds, unit="s", at_most=WATCHDOG_S, note=str(error).strip().splitlines()[-1])
        return
    yield Row(name=title, status="failed", note="both ranks went on")


class CallsAlone(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 1:
            total = torch.ones(1, device=pl_module.device)
            dist.all_reduce(total)
            float(total)


def _mismatched(rank: int, machine: Machine) -> None:
    be_alone(rank)
    os.environ["NCCL_ORDER_SECONDS"] = "5"
    strategy = MultimodalStrategy(
        {"vision": Modality(module="encoder", boundary="encoder"), "language": Modality()},
        batching={"num_microbatches": 2},
        launch={"process_group_backend": backend(machine), "timeout": TIMEOUT},
    )
    fit(Towers(SMALL), batches(SMALL, steps=3, samples=2), strategy, machine.shared, CallsAlone(), devices=2)
