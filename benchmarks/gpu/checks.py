"""The list of checks, in the order in which they run: short proofs first, kernels last, which take the time left."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Row


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Args:
        name: ``"group.check"``; a user names a group or one check of it.
        title: what it proves, for the report.
        function: ``"module:function"`` in this package; only the check's own process imports it.
        limit_s: wall-clock limit.
    """

    name: str
    title: str
    function: str
    limit_s: int


CHECKS = (
    Check(
        name="transport.collectives",
        title="A world of one NCCL rank: groups, collectives and dtypes",
        function="nccl_groups:collectives",
        limit_s=90,
    ),
    Check(
        name="transport.training",
        title="A world of one NCCL rank: training",
        function="nccl_groups:training",
        limit_s=90,
    ),
    Check(
        name="transport.waits",
        title="The host does not wait for the GPU inside a schedule",
        function="shared_gpu:waits",
        limit_s=150,
    ),
    Check(
        name="transport.parity",
        title="Ranks that share one GPU equal one process",
        function="shared_gpu:parity",
        limit_s=420,
    ),
    Check(
        name="nccl.parity",
        title="NCCL ranks that share one GPU equal one process",
        function="shared_nccl:parity",
        limit_s=540,
    ),
    Check(
        name="nccl.memory",
        title="NCCL ranks that share one GPU: memory of communicators",
        function="shared_nccl:memory",
        limit_s=120,
    ),
    Check(
        name="nccl.mismatch",
        title="NCCL ranks that share one GPU: a call that one rank makes alone",
        function="shared_nccl:mismatch",
        limit_s=240,
    ),
    Check(
        name="several.parity",
        title="Ranks with a GPU each equal one process",
        function="several_gpus:parity",
        limit_s=240,
    ),
    Check(
        name="several.pipeline",
        title="1F1B beside torch.distributed.pipelining",
        function="several_gpus:one_f_one_b",
        limit_s=150,
    ),
    Check(
        name="several.tensor",
        title="Tensor parallelism beside torch's DTensor plan",
        function="several_gpus:tensor",
        limit_s=150,
    ),
    Check(
        name="several.bubbles",
        title="Idle shares beside simulated ones",
        function="several_gpus:bubbles",
        limit_s=120,
    ),
    Check(
        name="flex.tests",
        title="Tests that need a GPU: FlexAttention and flash attention of tiles",
        function="gpu_tests:run",
        limit_s=300,
    ),
    Check(
        name="memory.sums",
        title="Peak memory: sums of gradients",
        function="peak_memory:sums",
        limit_s=90,
    ),
    Check(
        name="memory.casts",
        title="Peak memory: precision",
        function="peak_memory:casts",
        limit_s=120,
    ),
    Check(
        name="memory.ends",
        title="Peak memory: checkpoints and the end of a run",
        function="peak_memory:ends",
        limit_s=90,
    ),
    Check(
        name="speed.one",
        title="One process, a model of the shape of Qwen2-VL 2B",
        function="one_process:run",
        limit_s=240,
    ),
    Check(
        name="speed.llama",
        title="One process, a Llama of 1B, beside plain Lightning and FSDP2",
        function="llama_1b:run",
        limit_s=400,
    ),
    Check(
        name="compile.layers",
        title="Compiled layers",
        function="compiled_layers:compiled",
        limit_s=120,
    ),
    Check(
        name="compile.head",
        title="A head that is fused with its loss",
        function="compiled_layers:fused_head",
        limit_s=90,
    ),
    Check(
        name="offload.bandwidth",
        title="Copies between host and GPU",
        function="offloaded:bandwidth",
        limit_s=60,
    ),
    Check(
        name="offload.steps",
        title="Offloaded activations and states: time, memory and overlap of copies",
        function="offloaded:steps",
        limit_s=150,
    ),
    Check(
        name="kernels.128",
        title="Attention by tiles: head width 128",
        function="kernel_times:width_128",
        limit_s=300,
    ),
    Check(
        name="kernels.64",
        title="Attention by tiles: head width 64",
        function="kernel_times:width_64",
        limit_s=200,
    ),
    Check(
        name="kernels.72",
        title="Attention by tiles: head width 72",
        function="kernel_times:width_72",
        limit_s=200,
    ),
    Check(
        name="kernels.80",
        title="Attention by tiles: head width 80",
        function="kernel_times:width_80",
        limit_s=200,
    ),
    Check(
        name="kernels.256",
        title="Attention by tiles: head width 256",
        function="kernel_times:width_256",
        limit_s=200,
    ),
)


def load(function: str) -> Callable[[Machine], Iterator[Row]]:
    """Return the function of a check by its ``"module:function"``."""
    module, _, name = function.partition(":")
    return getattr(import_module(f"benchmarks.gpu.{module}"), name)


def chosen(names: list[str]) -> list[Check]:
    """Return the checks that `names` name, groups or single ones; all for none.

    Raises:
        SystemExit: a name is neither.
    """
    known = {check.name for check in CHECKS} | {check.name.partition(".")[0] for check in CHECKS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no check is named {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    return [check for check in CHECKS if not names or {check.name, check.name.partition(".")[0]} & set(names)]
