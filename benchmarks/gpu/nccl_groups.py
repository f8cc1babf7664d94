"""A world of one NCCL rank: every kind of group, collective and dtype that the package uses, and a training on it.

What passes between ranks needs two GPUs (`several_gpus.py`). `tests/gpu` compares `COLLECTIVES` with what the package
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import Row
from benchmarks.gpu.towers import SMALL, TIMEOUT, Towers, batches, fit
from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.engine.run_groups import Groups
from lightning_mm5d.sharded import torch_internals

TAGS = ("ascending", "descending", "replica 0", "loss", "gradients", "gathers", "layers")
NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    outputs = [torch.empty_like(x)]
    dist.all_gather(outputs, x, group=group)
    return outputs[0]


def _into(collective: str) -> Collective:
    def call(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        output = torch.empty_like(x)
        work = getattr(torch_internals if hasattr(torch_internals, collective) else dist, collective)(
            output, x, group=group, async_op=True
        )
        work.wait()
        return output

    return call


def _in_place(collective: str, *arguments: object) -> Collective:
    def call(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        getattr(dist, collective)(x, *arguments, group=group)
        return x

    return call


COLLECTIVES: dict[str, list[Collective]] = {
    "all_reduce": [_in_place("all_reduce", op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)],
    "broadcast": [_in_place("broadcast", 0)],
    "reduce": [_in_place("reduce", 0)],
    "all_gather": [_all_gather],
    "all_gather_single": [_into("all_gather_single")],
    "reduce_scatter_single": [_into("reduce_scatter_single")],
    "all_to_all_single": [_into("all_to_all_single")],
}
"""By name; on one rank each returns what it was given."""


def collectives(machine: Machine) -> Iterator[Row]:
    """Yield for each backend and collective how many dtypes came back as they were, in every group."""
    for backend in (machine.backend, machine.pick("cpu:gloo,cuda:nccl", "cpu:gloo")):
        dist.init_process_group(
            backend,
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=TIMEOUT,
            device_id=None if machine.is_dry else machine.device,
        )
        groups = Groups(TIMEOUT, device=machine.device)
        process_groups = [groups.get([0], tag) for tag in TAGS]
        groups.verify("one rank")
        for name, calls in COLLECTIVES.items():
            wrong = [str(dtype) for dtype in NUMBERS if not _returns(name, calls, dtype, process_groups, machine)]
            right = len(NUMBERS) - len(wrong)
            note = f"wrong or refused: {', '.join(wrong)}" if wrong else ""
            yield Row(name=f"{backend}: {name}, dtypes", value=right, at_least=len(NUMBERS), note=note)
        dist.barrier(device_ids=None if machine.is_dry else [machine.device.index])
        groups.destroy()
        dist.destroy_process_group()


def _returns(
    name: str,
    calls: list[Collective],
    dtype: torch.dtype,
    groups: list[dist.ProcessGroup | None],
    machine: Machine,
) -> bool:
    """Return whether each call gives back what it was given, on every group."""
    x = torch.arange(64, device=machine.device).to(dtype)
    try:
        return all(torch.equal(call(x, group), x) for call in calls for group in groups if group is not None)
    except (RuntimeError, TypeError) as error:
        print(f"{name}, {dtype}: {error}", flush=True)
        return False


def training(machine: Machine) -> Iterator[Row]:
    """Yield how far the losses of one rank under the strategy are from plain Lightning's."""
    together = {
        "vision": Modality(module="encoder", boundary="encoder", colocate_with="language"),
        "language": Modality(),
    }
    data = batches(SMALL, steps=3, samples=4)
    plain = fit(Towers(SMALL), data, "auto", machine.accelerator)
    for backend in (machine.backend, machine.pick("cpu:gloo,cuda:nccl", "cpu:gloo")):
        strategy = MultimodalStrategy(
            together, batching={"num_microbatches": 4}, launch={"process_group_backend": backend, "timeout": TIMEOUT}
        )
        losses = fit(Towers(SMALL), data, strategy, machine.accelerator)
        off = max(abs(loss - expected) / abs(expected) for loss, expected in zip(losses, plain, strict=True))
        yield Row(name=f"{backend}: losses, strategy and plain Lightning: relative difference", value=off, at_most=1e-5)
