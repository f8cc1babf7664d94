"""Estimated over measured memory of each rank in a training step: 3 models x 17 layouts, in at most 3 processes.

Measured is the highest resident memory from the second batch to the last one, less what the process had before it built
the model. Before that it trains a small model of the same kind in the same layout, so that libraries are loaded and
buffers of gloo exist. Blocks of 32 KiB and more are returned to the system when they are freed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Mapping
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
    """

    world: int
    encoder: Mapping[str, Any]
    language: Mapping[str, Any]
    microbatches: int = 4
    schedule: str = "1f1b"
    frozen: bool = False


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
}


def strategy(case: Case, encoder: str) -> MultimodalStrategy:
    modalities = {encoder: Modality(**case.encoder), "language": Modality(**case.language)}
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
    plan = planned.plan(module)
    traced = trace(module, make(SAMPLES), plan.partition, plan.modalities, plan.division)
    states = OptimizerStates(module, remade)
    step = Step(module, case.schedule, case.microbatches, states, traced, bucket_bytes=planned.bucket_bytes)
    return memory_of(plan, step)


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
        fit(module, DataLoader(batches, batch_size=None), strategy(case, encoder), case.world, peak)
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


def main(models: list[str], layouts: list[str]) -> None:
    print("| model | layout | estimated / measured, MB | ratio |\n| --- | --- | --- | --- |", flush=True)
    for model in models:
        for layout in layouts:
            case = CASES[layout]
            try:
                pairs = list(zip(estimated(model, case), measured(model, case), strict=True))
            except (RuntimeError, TimeoutError) as error:
                print(f"| {model} | {layout} | {str(error).splitlines()[-1]} | |", flush=True)
                continue
            values = ", ".join(f"{rank.together / 1e6:.0f} / {peak / 1e6:.0f}" for rank, peak in pairs)
            ratios = ", ".join(f"{rank.together / peak:.3f}" for rank, peak in pairs)
            print(f"| {model} | {layout} | {values} | {ratios} |", flush=True)


if __name__ == "__main__":
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        fixed = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "32768", "MALLOC_ARENA_MAX": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | fixed)
    chosen = [arg for arg in sys.argv[1:] if arg in MODELS] or list(MODELS)
    main(chosen, [arg for arg in sys.argv[1:] if arg in CASES] or list(CASES))
