"""What the strategy costs one GPU beside plain Lightning and FSDP2: a Llama of 1.2 billion parameters, random weights.

bf16, AdamW, rows of text without padding, so that `sdpa` takes flash attention, and compiled layers. All sides train in
turns in one process, FSDP2 (Lightning's `ModelParallelStrategy`) with one rank. FLOP and MFU as in `one_process`. The
memory that the strategy's plan estimates is compared with what torch's allocator saw without compiled layers.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.one_process import NEEDED_BYTES, WARMUP, flop_of, in_turns, rates
from benchmarks.gpu.rows import LackingError, Row
from benchmarks.gpu.towers import TIMEOUT
from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.features.refusals.feature import remade
from lightning_mm5d.tools.planner.activation_trace import trace
from lightning_mm5d.tools.planner.hollow_tensors import OptimizerStates
from lightning_mm5d.tools.planner.rank_memory import Step, memory_of

CONFIG: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SMALL = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


class Llama(L.LightningModule):
    """The ordinary module around an ordinary Hugging Face model; the same weights each time.

    Args:
        machine: to train on.
        device: of the weights; None for the machine's.
        backend: of `torch.compile`, for each layer; None where the strategy compiles them, or nobody does.
        fsdp: whether FSDP2 shares layers.
    """

    def __init__(
        self, machine: Machine, device: torch.device | None = None, backend: str | None = None, fsdp: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        with device or machine.device:  # drawn where they stay: a CPU would take long
            self.model = LlamaForCausalLM(LlamaConfig(**machine.pick(CONFIG, SMALL))).to(torch.bfloat16)
        self.backend, self.fsdp, self.is_ready = backend, fsdp, False

    def configure_model(self) -> None:
        """Compile and share layers, once."""
        layers = self.model.model.layers
        if self.backend is not None and not self.is_ready:
            for layer in layers:
                layer.compile(backend=self.backend)
        if self.fsdp and not self.is_ready:
            mesh = self.device_mesh["data_parallel"]
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.is_ready = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def run(machine: Machine) -> Iterator[Row]:
    """Yield tokens per second and MFU of all sides, ratios of the strategy to the others, and estimated memory."""
    if machine.gpu_bytes < NEEDED_BYTES and not machine.is_dry:
        raise LackingError(f"needs a GPU with {NEEDED_BYTES // 2**30} GiB")
    backend = machine.pick("inductor", "eager")
    rows = torch.randint(256, machine.pick((4, 4096), (2, 32)), generator=torch.Generator().manual_seed(0))
    flop = flop_of(machine, partial(Llama, machine), rows)
    sides = in_turns(
        machine,
        [rows] * (WARMUP + machine.pick(12, 2)),
        {
            "strategy": lambda: (Llama(machine), strategy(backend)),
            "strategy, layers not compiled": lambda: (Llama(machine), strategy(False)),
            "plain Lightning": lambda: (Llama(machine, backend=backend), "auto"),
            "FSDP2, one rank": lambda: (Llama(machine, backend=backend, fsdp=True), ModelParallelStrategy(1, 1)),
        },
    )
    ours, uncompiled, plain, fsdp = sides.values()
    yield from rates(machine, sides, rows.numel(), flop, aim=0.45)
    yield Row(name="tokens per second, strategy / plain Lightning", value=plain.seconds / ours.seconds, at_least=0.98)
    yield Row(name="tokens per second, strategy / FSDP2, one rank", value=fsdp.seconds / ours.seconds)
    guess = estimate(machine, rows)
    note = f"{guess / 2**30:.2f} / {uncompiled.peak_bytes / 2**30:.2f} GiB, layers not compiled"
    ratio = guess / uncompiled.peak_bytes
    yield Row(name="peak memory, estimate / allocator", value=ratio, at_least=0.95, at_most=1.05, note=note)


def strategy(backend: str | bool) -> MultimodalStrategy:
    """One modality, of which each layer is compiled by a backend, or none is."""
    return MultimodalStrategy({"language": Modality(compute={"compile": backend})}, launch={"timeout": TIMEOUT})


def estimate(machine: Machine, rows: Tensor) -> int:
    """Return the bytes that `mm5d inspect` would tell for the rank."""
    module = Llama(machine, torch.device("meta"))
    planned = strategy(False)
    planned.parallel_devices = [torch.device("cpu")]
    planned.cluster_environment = LightningEnvironment()
    plan = planned.plan(module)
    traced = trace(module, rows, plan.partition, plan.modalities, plan.division)
    step = Step(module, "1f1b", 1, OptimizerStates(module, remade), traced, bucket_bytes=planned.bucket_bytes)
    return memory_of(plan, step)[0].peak
