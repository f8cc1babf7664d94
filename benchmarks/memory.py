"""Estimated over measured memory of each rank in a training step: 3 models x 17 layouts, and 12 others.

Measured is the highest resident memory from the second batch to the last one, less what the process had before it built
the model. Before that it trains a small model of the same kind in the same layout, so that libraries are loaded and
buffers of gloo exist. Blocks of 32 KiB and more are returned to the system when they are freed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from memory_models import MODELS, Module
from torch.utils.data import DataLoader
from turns import Side, fit, run

from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.features.refusals.feature import remade
from lightning_mm5d.tools.planner.activation_trace import trace
from lightning_mm5d.tools.planner.hollow_tensors import OptimizerStates
from lightning_mm5d.tools.planner.rank_memory import RankMemory, Step, memory_of

SAMPLES, BATCHES = 2, 3


class Case(NamedTuple):
    """A layout.

    Attributes:
        world: number of ranks.
        encoder: its modality.
        language: the language model's.
        microbatches: M.
        schedule: by name.
        frozen: whether the encoder is.
        precision: of the trainer.
        models: that have the layout; all of `USUAL` where there are none.
    """

    world: int
    encoder: Mapping[str, Any]
    language: Mapping[str, Any]
    microbatches: int = 4
    schedule: str = "1f1b"
    frozen: bool = False
    precision: str = "32-true"
    models: tuple[str, ...] = ()


USUAL = ("llava", "whisper", "qwen2-vl")
BESIDE = {"colocate_with": "language"}
CASES = {
    "one rank": Case(1, BESIDE, {}, 2),
    "encoder | language": Case(2, {}, {}),
    "encoder | language in 2 stages": Case(3, {}, {"pp_size": 2}),
    "gpipe, 2 stages": Case(2, {"colocate_with": "language.0"}, {"pp_size": 2}, 4, "gpipe"),
    "zero_bubble, 2 stages": Case(2, {"colocate_with": "language.0"}, {"pp_size": 2}, 4, "zero_bubble"),
    "language tp 2": Case(3, {}, {"tp_size": 2}),
    "2 replicas": Case(2, BESIDE, {}),
    "zero_stage 1": Case(2, BESIDE | {"sharding": {"zero_stage": 1}}, {"sharding": {"zero_stage": 1}}),
    "zero_stage 2": Case(2, BESIDE | {"sharding": {"zero_stage": 2}}, {"sharding": {"zero_stage": 2}}),
    "zero_stage 3": Case(2, BESIDE | {"sharding": {"zero_stage": 3}}, {"sharding": {"zero_stage": 3}}),
    "zero_stage 3, resharded": Case(
        2,
        BESIDE | {"sharding": {"zero_stage": 3, "reshard_after_forward": True}},
        {"sharding": {"zero_stage": 3, "reshard_after_forward": True}},
    ),
    "frozen encoder | language": Case(2, {}, {}, frozen=True),
    "recomputed": Case(
        2,
        {"memory": {"activation_checkpointing": "full"}},
        {"memory": {"activation_checkpointing": "full"}},
        4,
        "gpipe",
    ),
    "recomputed by operation": Case(
        2,
        {"memory": {"activation_checkpointing": "selective"}},
        {"memory": {"activation_checkpointing": "selective"}},
        4,
        "gpipe",
    ),
    "activations offloaded": Case(
        2, {"memory": {"offload": ["activations"]}}, {"memory": {"offload": ["activations"]}}, 4, "gpipe"
    ),
    "joined calls": Case(2, {"pipeline": {"microbatches_per_call": 4}}, {}),
    "states offloaded": Case(2, {"memory": {"offload": ["optimizer"]}}, {"memory": {"offload": ["optimizer"]}}),
    "tp 2 with sequence_parallel": Case(
        2, {}, {"tp_size": 2, "tensor": {"sequence_parallel": True}}, 2, models=("llama",)
    ),
    "cp 2": Case(2, {}, {"cp_size": 2}, 2, models=("llama",)),
    "pipelines of 2 stages and of 1": Case(
        3, {}, {"pipeline": {"pipelines": [2, 1], "speeds": [1, 1]}}, models=("llama",)
    ),
    "2 stages, zero_bubble": Case(2, {}, {"pp_size": 2}, 4, "zero_bubble", models=("llama",)),
    "ep 2": Case(2, {}, {"dp_size": 2, "ep_size": 2}, 2, models=("mixtral",)),
    "ep 2, zero_stage 2": Case(
        2, {}, {"dp_size": 2, "ep_size": 2, "sharding": {"zero_stage": 2}}, 2, models=("mixtral",)
    ),
    "encoder | language, bf16-mixed": Case(2, {}, {}, precision="bf16-mixed", models=("llava",)),
    "2 replicas in bf16-mixed, zero_stage 3": Case(
        2,
        BESIDE | {"sharding": {"zero_stage": 3}},
        {"sharding": {"zero_stage": 3}},
        precision="bf16-mixed",
        models=("internvl",),
    ),
    "encoder | language in bf16-true, recomputed": Case(
        2,
        {"memory": {"activation_checkpointing": "full"}},
        {"memory": {"activation_checkpointing": "full"}},
        precision="bf16-true",
        models=("internvl",),
    ),
    "2 replicas, zero_stage 1, states offloaded": Case(
        2,
        BESIDE | {"sharding": {"zero_stage": 1}, "memory": {"offload": ["optimizer"]}},
        {"sharding": {"zero_stage": 1}, "memory": {"offload": ["optimizer"]}},
        models=("qwen2-vl",),
    ),
    "2 stages, recomputed by operation, activations offloaded": Case(
        2,
        {"colocate_with": "language.0", "memory": {"offload": ["activations"]}},
        {"pp_size": 2, "memory": {"activation_checkpointing": "selective"}},
        4,
        "gpipe",
        models=("whisper",),
    ),
    "encoder in 2 stages | language with tp 2": Case(4, {"pp_size": 2}, {"tp_size": 2}, models=("internvl",)),
}
OTHERS = [name for name, case in CASES.items() if case.models]
"""layouts of one model each"""


def strategy(case: Case, encoder: str | None) -> MultimodalStrategy:
    modalities = {} if encoder is None else {encoder: Modality(**case.encoder)}
    modalities["language"] = Modality(**case.language)
    return MultimodalStrategy(
        modalities=modalities, batching={"num_microbatches": case.microbatches}, schedule=case.schedule
    )


def estimated(model: str, case: Case) -> list[RankMemory]:
    """What each rank should need; in a process of its own, so that the ranks begin without its memory."""
    return run(Side(1, lambda turns, rank: _estimate(model, case)))[0]


def _estimate(model: str, case: Case) -> list[RankMemory]:
    encoder, build, make = MODELS[model]
    with torch.device("meta"):
        module = Module(build(), frozen="encoder" if case.frozen and model == "whisper" else "vi" * case.frozen)
    planned = strategy(case, encoder)
    planned.parallel_devices = [torch.device("cpu")] * case.world
    planned.cluster_environment = LightningEnvironment()
    planned.cluster_environment.set_world_size(case.world)
    plan, batch, autocasts = planned.plan(module), make(SAMPLES), case.precision == "bf16-mixed"
    if case.precision == "bf16-true":
        module, batch = module.bfloat16(), {key: _halved(tensor) for key, tensor in batch.items()}
    context: Any = partial(torch.autocast, "cpu", dtype=torch.bfloat16) if autocasts else nullcontext
    traced = trace(module, batch, plan.partition, plan.modalities, plan.division, context, plan.experts)
    states = OptimizerStates(module, remade)
    step = Step(module, case.schedule, case.microbatches, states, traced, bucket_bytes=planned.bucket_bytes)
    return memory_of(plan, step)


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


class Peak(Callback):
    """The highest resident memory from the second batch on."""

    peak = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 1:
            clean()
            Path("/proc/self/clear_refs").write_text("5")

    def on_train_batch_end(self, *_: Any) -> None:
        self.peak = status("VmHWM")


def clean() -> None:
    """Return freed memory to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measured(model: str, case: Case) -> list[int]:
    """Bytes that each rank needed at most."""
    return run(Side(case.world, lambda turns, rank: _train(model, case)))


def _train(model: str, case: Case) -> int:
    encoder, build, make = MODELS[model]
    frozen = "encoder" if case.frozen and model == "whisper" else "vi" * case.frozen
    L.seed_everything(0, verbose=False)
    for layers in (2, 4):
        clean()
        before = status("VmRSS")
        peak = Peak()
        module = Module(build(layers), frozen=frozen)
        if layers == 2:  # as small as can be
            module = Module(_small(model), frozen=frozen)
        batches = [make(SAMPLES * case.microbatches) for _ in range(BATCHES)]
        loader = DataLoader(batches, batch_size=None)
        fit(module, loader, strategy(case, encoder), case.world, peak, precision=case.precision)
        del module
    return peak.peak - before


def _small(model: str) -> Any:
    import memory_models

    width, text = memory_models.WIDTH, memory_models.TEXT
    memory_models.WIDTH = 64
    memory_models.TEXT = text | {"hidden_size": 64, "intermediate_size": 64}
    try:
        return MODELS[model][1](2)
    finally:
        memory_models.WIDTH, memory_models.TEXT = width, text


class Row(NamedTuple):
    """A layout: bytes of each rank, estimated and measured."""

    model: str
    layout: str
    pairs: list[tuple[int, int]]

    def __str__(self) -> str:
        values = ", ".join(f"{estimate / 1e6:.0f} / {peak / 1e6:.0f}" for estimate, peak in self.pairs)
        ratios = ", ".join(f"{estimate / peak:.3f}" for estimate, peak in self.pairs)
        return f"| {self.model} | {self.layout} | {values} | {ratios} |"


def rows(models: list[str], layouts: list[str]) -> Iterator[Row]:
    """Print and yield the layouts of these models; one that fails is printed."""
    for model in models:
        for layout in (name for name in layouts if model in (CASES[name].models or USUAL)):
            case = CASES[layout]
            try:
                both = zip(estimated(model, case), measured(model, case), strict=True)
                row = Row(model, layout, [(rank.together or 0, peak) for rank, peak in both])
            except (RuntimeError, TimeoutError) as error:
                print(f"| {model} | {layout} | {str(error).splitlines()[-1]} | |", flush=True)
                continue
            print(row, flush=True)
            yield row


def main(models: list[str], layouts: list[str]) -> None:
    print("| model | layout | estimated / measured, MB | ratio |\n| --- | --- | --- | --- |", flush=True)
    ratios = [estimate / peak for row in rows(models, layouts) for estimate, peak in row.pairs]
    near, wider = (sum(abs(ratio - 1) <= limit for ratio in ratios) for limit in (0.05, 0.1))
    print(f"memory of {len(ratios)} ranks: {near} estimates within 5 %, {wider} within 10 %")


if __name__ == "__main__":
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        fixed = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "32768", "MALLOC_ARENA_MAX": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | fixed)
    chosen = OTHERS if "others" in sys.argv[1:] else [arg for arg in sys.argv[1:] if arg in CASES]
    main([arg for arg in sys.argv[1:] if arg in MODELS] or list(MODELS), chosen or list(CASES))
