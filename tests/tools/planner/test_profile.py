"""Measured times go to the units that take them, and the module is left as it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.features.refusals.feature import remade
from lightning_mm5d.partition.costs import units
from lightning_mm5d.partition.find import find
from lightning_mm5d.tools.planner.hollow_tensors import OptimizerStates
from lightning_mm5d.tools.planner.profile import measure, measure_update, medians
from zoo import CASES

MODALITIES = {"vision": Modality(module="vision", boundary="vision"), "language": Modality()}


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x * self.weight


class Tower(nn.Module):
    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(Sleeper(one)) for one in seconds])
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        for layer in self.layers:
            x = layer(x)
        time.sleep(0.02)
        return self.head(x)


class Sleepers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.language = Tower(0.01, 0.03), Tower(0.02, 0.04)
        self.skips = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", 0.0)
        return self.language(batch if self.skips else self.vision(batch)).sum()


def rows_of(module: nn.Module, modalities: dict[str, Modality]) -> tuple[Any, Any]:
    found = find(module, modalities)
    return found, units(module, found)


def test_each_unit_gets_the_time_that_it_takes() -> None:
    module = Sleepers()
    found, rows = rows_of(module, MODALITIES)
    seconds = {
        name: [one.forward for one in row] for name, row in measure(module, torch.ones(1, 2), found, rows).items()
    }
    # sleeping takes at least as long as it was told to
    for name, expected in (("vision", [0.01, 0.01, 0.03, 0.02]), ("language", [0.01, 0.02, 0.04, 0.02])):
        assert all(got >= told for got, told in zip(seconds[name], expected, strict=True)), seconds
        assert seconds[name][0] < 0.07  # before the layers, and without the encoder


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient[0], None


class BackwardSleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight, self.seconds)


def test_each_unit_gets_the_time_of_its_backward_also_where_nothing_before_it_is_trained() -> None:
    module = Sleepers()
    module.vision.layers = nn.ModuleList([nn.Sequential(BackwardSleeper(one)) for one in (0.01, 0.03)])
    module.language.layers = nn.ModuleList([nn.Sequential(BackwardSleeper(one)) for one in (0.02, 0.04)])
    module.vision.layers.requires_grad_(False)
    found, rows = rows_of(module, MODALITIES)
    kept = module.language.head.weight.grad = torch.ones(2, 2)
    seconds = measure(module, torch.ones(1, 2), found, rows)
    backwards = {name: [one.backward for one in row] for name, row in seconds.items()}
    assert module.language.head.weight.grad is kept
    assert backwards["vision"][1:3] == [0.0, 0.0]
    assert 0.02 <= backwards["language"][1] < 0.04 <= backwards["language"][2]
    assert backwards["language"][3] < 0.02


def test_nothing_stays_in_front_of_the_modules_callables() -> None:
    module = Sleepers()
    found, rows = rows_of(module, MODALITIES)
    measure(module, torch.ones(1, 2), found, rows)
    assert not any("forward" in vars(part) for part in module.modules())


def test_a_modality_that_does_not_run_is_refused() -> None:
    module = Sleepers()
    module.skips = True
    found, rows = rows_of(module, MODALITIES)
    with pytest.raises(ConfigError, match=r"modalities.vision: .*does not run"):
        measure(module, torch.ones(1, 2), found, rows)


def test_boundaries_of_a_hugging_face_model_are_found() -> None:
    case = CASES["llava"]
    module = case.build()
    found, rows = rows_of(module, {"vision": Modality(), "language": Modality()})
    seconds = measure(module, case.batch(2, seed=0), found, rows)
    assert {name: len(row) for name, row in seconds.items()} == {name: len(row) for name, row in rows.items()}
    assert all(one.forward > 0 for row in seconds.values() for one in row[1:-1])
    assert all(one.backward > 0 for one in seconds["language"][1:])
    assert seconds["vision"][-2].backward == 0.0  # features are those of the layer before the last


def test_the_median_of_the_runs_counts() -> None:
    runs = ({"vision": [0.001, 0.002]}, {"vision": [0.003, 0.003]}, {"vision": [0.001, 0.003]})
    assert medians(runs) == {"vision": [0.001, 0.003]}


class SleepingSGD(torch.optim.SGD):
    stepped: ClassVar[list[tuple[float, int]]] = []  # learning rates and numbers of parameters

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        self.stepped.append((group["lr"], len(group["params"])))
        time.sleep(0.01)
        super().step(closure)


class BrokenSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("It steps on a friday only")


class Optimized(Sleepers):
    def __init__(self, kind: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind
        self.vision.requires_grad_(False)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        head = self.language.head
        return [self.kind(self.language.layers.parameters(), lr=0.5), self.kind(head.parameters(), lr=0.25)]


def updated(kind: Callable[..., torch.optim.Optimizer]) -> tuple[Optimized, float]:
    module = Optimized(kind)
    parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
    return module, measure_update(OptimizerStates(module, remade), parameters)


def test_all_optimizers_step_on_copies_of_their_parameters() -> None:
    module, seconds = updated(SleepingSGD)
    assert seconds >= 2 * 0.01
    assert set(SleepingSGD.stepped) == {(0.5, 2), (0.25, 2)}
    assert all(torch.equal(layer[0].weight, torch.ones(2)) for layer in module.language.layers)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_an_optimizer_that_cannot_be_tried_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match="on a friday only"):
        updated(BrokenSGD)
    assert measure_update(OptimizerStates(Optimized(SleepingSGD), remade), {}) == 0.0
