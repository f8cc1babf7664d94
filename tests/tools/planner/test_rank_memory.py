"""What each rank is estimated to keep between steps is what its tensors take after a step."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from features.toys import LANGUAGE, VISION, Layout, Run, Samples, Toy
from lightning_mm5d import Modality
from lightning_mm5d.features.refusals.feature import remade
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.tools.planner.activation_trace import trace
from lightning_mm5d.tools.planner.hollow_tensors import OptimizerStates
from lightning_mm5d.tools.planner.rank_memory import Step, memory_of
from parity.harness import strategy
from ranks import run_ranks


class Adam(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Counted(Callback):
    """Bytes of gradients when the optimizer steps, and of all after it."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.found["gradients"] = _size(p.grad for p in module.parameters() if p.grad is not None)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.found["optimizer"] = _size(value for value in states if isinstance(value, Tensor))
        self.found["parameters"] = _size(p for p in module.parameters() if not is_remote(p))

    # callbacks of the package see what this rank holds
    on_before_optimizer_step.__module__ = on_train_batch_end.__module__ = "lightning_mm5d.tests"


def _size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def shared(stage: int) -> Layout:
    encoder = Modality(colocate_with="language", sharding={"zero_stage": stage}, **VISION)
    return Layout({"vision": encoder, "language": Modality(sharding={"zero_stage": stage}, **LANGUAGE)}, 2, 2)


LAYOUTS = {
    "stages": Layout({"vision": Modality(**VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 3),
    **{f"zero_stage {stage}": shared(stage) for stage in (1, 2, 3)},
}


def counted(rank: int, layout: Layout, main_params: str | None) -> dict[str, int]:
    warnings.simplefilter("ignore")
    counts, run = Counted(), Run(layout, {"main_params": main_params})
    precision: Any = "64-true" if main_params is None else "bf16-true"
    run.trainer(max_epochs=1, callbacks=[counts], precision=precision).fit(Adam(), run.training())
    return counts.found


@pytest.mark.parametrize(
    ("name", "main_params"), [*((name, None) for name in LAYOUTS), ("stages", "float32"), ("zero_stage 1", "float32")]
)
def test_estimates_are_the_bytes_of_the_tensors_after_a_step(name: str, main_params: Any) -> None:
    layout, module = LAYOUTS[name], Adam()
    planned = strategy(layout.modalities, num_microbatches=2, main_params=main_params)
    planned.parallel_devices = [torch.device("cpu")] * layout.world
    planned.cluster_environment = LightningEnvironment()
    planned.cluster_environment.set_world_size(layout.world)
    plan = planned.plan(module)
    samples = Samples(4)
    if main_params is not None:
        module, samples.images = module.bfloat16(), samples.images.bfloat16()
    batch = {"images": samples.images, "tokens": samples.tokens, "label": samples.labels}
    found = trace(module, batch, plan.partition, plan.modalities, plan.division)
    memory = memory_of(plan, Step(module, "1f1b", 2, OptimizerStates(module, remade), found))
    measured = run_ranks(layout.world, counted, layout, main_params)
    for estimate, real in zip(memory, measured, strict=True):
        assert {key: getattr(estimate, key) for key in real} == real
