"""Split backwards give what one process gives, and the weight-gradient action computes the weight gradients.

vision: rank 0; language: ranks 1-2 (two chunks a rank under zbv), or a language model alone on ranks 0-1. The default
run holds each family with one of the schedules; `exhaustive` holds the others.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from compare import assert_equal_to_one_process
from lightning_mm5d import Modality
from lightning_mm5d.schedule import Action, Graph, Kind, Schedule, to_csv
from lightning_mm5d.schedule import build as build_schedule
from lightning_mm5d.stage.deferred import Deferred
from parity.harness import Recorder, fit, strategy
from parity.test_parity import build
from ranks import call_ranks
from sweeps import covering
from zoo import CASES

M, SAMPLES = 4, 8
FAMILIES = ("gpt2", "llama_tied", "bert", "t5", "gemma3", "qwen2_vl", "whisper", "handwritten_two")


class Adapted(nn.Module):
    """A frozen linear layer beside a trained one of low rank, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def build_module(name: str, variant: str) -> Any:
    """A zoo model; ``adapters``: all frozen but low-rank adapters of the language model's query projections."""
    if variant != "adapters":
        return build(name, variant)
    module = build(name, "none").requires_grad_(False)
    torch.manual_seed(0)
    for part in list(module.model.modules()):
        if "language" in type(part).__name__.lower() or not hasattr(part, "q_proj"):
            continue
        part.q_proj = Adapted(part.q_proj)
    return module


def batches(name: str) -> list[Any]:
    return [CASES[name].batch(SAMPLES, seed=step) for step in (1, 2)]


def layout(name: str, pp_size: int) -> tuple[dict[str, Modality], int]:
    *encoders, loss_modality = CASES[name].modalities
    paths = CASES[name].modality_paths
    fields: dict[str, dict[str, Any]] = {**{key: {} for key in encoders}, loss_modality: {"pp_size": pp_size}}
    modalities = {key: Modality(**{**paths.get(key, {}), **value}) for key, value in fields.items()}
    return modalities, len(encoders) + pp_size


Outcome = tuple[list[float], list[Any], Any, int]


def train(rank: int, name: str, variant: str, schedule: Any, options: dict[str, Any]) -> Outcome:
    """Losses, gradients of each step, parameters, and how many weight gradients were put off."""
    module, put_off = build_module(name, variant), 0
    add = Deferred.add

    def counted(self: Deferred, *args: Any) -> None:
        nonlocal put_off
        put_off += 1
        add(self, *args)

    modalities, world = layout(name, 2)
    chosen = strategy(modalities, schedule=schedule, num_microbatches=M)
    with mock.patch.object(Deferred, "add", counted):
        recorder = fit(module, batches(name), chosen, world, **options)
    return recorder.losses, recorder.gradients, module.state_dict(), put_off


@lru_cache
def reference(name: str, variant: str, options: tuple[tuple[str, Any], ...]) -> tuple[Recorder, Any]:
    module = build_module(name, variant)
    return fit(module, batches(name), **dict(options)), module.state_dict()


def assert_parity(name: str, variant: str, schedule: Any, tolerance: float = 1e-6, **options: Any) -> list[int]:
    alone, parameters = reference(name, variant, tuple(options.items()))
    found = call_ranks(layout(name, 2)[1], train, name, variant, schedule, options)
    assert_equal_to_one_process(
        found, alone, parameters, rtol=tolerance, atol=tolerance / 10, where=f"{name}, {schedule}"
    )
    return [put_off for *_, put_off in found]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "schedule"),
    covering(product(FAMILIES, ["zero_bubble", "zbv", "auto"]), (0,), (1,), kept=[("llama_tied", "zbv")]),
)
def test_families_with_all_trainable_equal_one_process(name: str, schedule: str) -> None:
    put_off = assert_parity(name, "none", schedule)
    assert any(put_off), "no weight gradient was put off"


@pytest.mark.usefixtures("float64")
def test_with_a_frozen_encoder_backwards_are_split_where_a_gradient_is_passed_on() -> None:
    *_, last = assert_parity("llava", "encoder", "zero_bubble")
    assert last > 0


def one_after_another(graph: Graph) -> Schedule:
    """All forwards, then all input gradients, then all weight gradients, last microbatch first."""
    schedule: Schedule = {}
    for rank in graph.ranks:
        actions: list[Action] = []
        for kind in (Kind.F, Kind.I, Kind.W):
            for stage in graph.stages_of(rank):
                order = graph.microbatches if kind is not Kind.W else tuple(reversed(graph.microbatches))
                actions += [Action(kind, stage, m) for m in order]
        schedule[rank] = actions
    return schedule


@pytest.mark.usefixtures("float64")
def test_a_function_of_the_users_is_run() -> None:
    put_off = assert_parity("llava", "none", one_after_another)
    assert all(put_off)


@pytest.mark.usefixtures("float64")
def test_a_table_of_the_users_is_run(tmp_path: Any) -> None:
    modalities, world = layout("llava", 2)
    plan = strategy(modalities, num_microbatches=M)
    plan.parallel_devices, plan.cluster_environment = [torch.device("cpu")] * world, LightningEnvironment()
    plan.cluster_environment.set_world_size(world)
    module = build_module("llava", "none")
    graph = plan.plan(module).graphs.full_graph("1f1b", M, module)
    table = tmp_path / "schedule.csv"
    table.write_text(to_csv(build_schedule("zero_bubble", graph), graph))
    assert any(assert_parity("llava", "none", str(table)))


@pytest.mark.usefixtures("float64")
def test_accumulation_and_clipping_work_with_split_backwards() -> None:
    assert_parity("llava", "none", "zbv", accumulate_grad_batches=2, gradient_clip_val=0.05)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_adapters_on_frozen_layers_are_put_off_alone(schedule: str) -> None:
    assert any(assert_parity("llava", "adapters", schedule))
