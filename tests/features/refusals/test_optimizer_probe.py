"""What an optimizer's update depends on shows in a few steps, whatever its class is called."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.refusals.feature import Dependence, check_optimizers, dependence

NOTHING, ELEMENTS, ALL = Dependence(False, False), Dependence(False, True), Dependence(True, True)


class _Own(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for p, scale in zip(held, self.scales(group, held), strict=True):
                p.data.add_(p.grad * scale, alpha=-group["lr"])

    def scales(self, group: Any, held: list[Any]) -> list[Any]:
        return [1.0] * len(held)


class ByGlobalNorm(_Own):
    def scales(self, group: Any, held: list[Any]) -> list[Any]:
        return [1 / torch.stack([p.grad.norm() for p in held]).norm()] * len(held)


class ByOwnNorm(_Own):
    def scales(self, group: Any, held: list[Any]) -> list[Any]:
        return [p.norm() / p.grad.norm() for p in held]


class ClipsAll(_Own):
    """Only large gradients of other parameters change anything."""

    def scales(self, group: Any, held: list[Any]) -> list[Any]:
        return [1 / max(1.0, float(sum(p.grad.norm() for p in held)) / 100)] * len(held)


class Noisy(_Own):
    def scales(self, group: Any, held: list[Any]) -> list[Any]:
        return [torch.rand_like(p) for p in held]


class Flagged(ByGlobalNorm):
    """A setting of the group chooses."""

    def scales(self, group: Any, held: list[Any]) -> list[Any]:
        return super().scales(group, held) if group["by_norm"] else [1.0] * len(held)


class NeedsMore(ByGlobalNorm):
    """Cannot be made from parameters and settings."""

    def __init__(self, model: torch.nn.Module, *, steps: int) -> None:
        super().__init__(model.parameters())
        self.left = [steps]

    def step(self, closure: Any = None) -> Any:
        self.left[0] -= 1
        random.random(), np.random.rand()
        return super().step(closure)


class Keeps(NeedsMore):
    """Holds the model, so that a copy would step on it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, steps=1)
        self.model = model


class Around(_Own):
    """Steps another optimizer, as lookahead and averaging do."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups)
        self.base = base

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class InTrainMode(_Own):
    is_training = False

    def train(self) -> None:
        self.is_training = True

    def step(self, closure: Any = None) -> Any:
        assert self.is_training
        return super().step(closure)


class InBlocks(_Own):
    """Scales large tensors by blocks, as states of 8 bits are."""

    def scales(self, group: Any, held: list[Any]) -> list[Any]:
        return [1 / p.grad.norm() if p.numel() >= 4096 else 1.0 for p in held]


MODEL = torch.nn.Linear(3, 2)
OURS = MODEL.parameters
SCHEDULED = NeedsMore(MODEL, steps=7)
torch.optim.lr_scheduler.StepLR(SCHEDULED, 1)  # puts a `step` in front
CASES = [
    *[(getattr(torch.optim, name)(OURS(), lr=0.0), NOTHING) for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam")],
    *[(getattr(torch.optim, name)(OURS()), NOTHING) for name in ("Adadelta", "Adagrad", "Adamax", "RMSprop", "Rprop")],
    (torch.optim.ASGD(OURS()), NOTHING),
    (torch.optim.Adam(OURS(), lr=torch.tensor(0.1), capturable=True), NOTHING),
    (torch.optim.Adafactor(OURS()), ELEMENTS),
    (torch.optim.Muon([MODEL.weight]), ELEMENTS),
    (torch.optim.LBFGS(OURS()), None),
    (_Own(OURS()), NOTHING),
    (Noisy(OURS()), NOTHING),
    (ByOwnNorm(OURS()), ELEMENTS),
    (ByGlobalNorm(OURS()), ALL),
    (ClipsAll(OURS()), ALL),
    (Flagged([{"params": [MODEL.weight], "by_norm": False}, {"params": [MODEL.bias], "by_norm": True}]), ALL),
    (Flagged(OURS(), by_norm=False), NOTHING),
    (SCHEDULED, ALL),
    (Keeps(MODEL), None),
    (Around(torch.optim.AdamW(OURS())), None),
    (Around(ByGlobalNorm(OURS())), ALL),
    (InTrainMode(OURS()), NOTHING),
    (InBlocks(OURS()), ELEMENTS),
]


@pytest.mark.parametrize(("optimizer", "expected"), CASES, ids=[type(case[0]).__name__ for case in CASES])
def test_what_an_update_depends_on(optimizer: Optimizer, expected: Dependence | None) -> None:
    before = [p.detach().clone() for p in MODEL.parameters()]
    state, kept = torch.get_rng_state(), len(optimizer.state)
    others = random.getstate(), np.random.get_state()[2]
    assert dependence(optimizer) == expected
    assert all(torch.equal(p, old) for p, old in zip(MODEL.parameters(), before, strict=True))
    assert len(optimizer.state) == kept
    assert torch.equal(torch.get_rng_state(), state)
    assert (random.getstate(), np.random.get_state()[2]) == others
    assert SCHEDULED.left == [7]


class Ascends(_Own):
    """Sharpness-aware: manual steps call `first_step`."""

    def first_step(self) -> None:
        scale = self._scale()
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=scale)

    def _scale(self) -> float:
        return 0.05 / float(torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm())


class Ahead(Optimizer):
    """Keeps slow weights beside its state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state, self.defaults = optimizer.state, optimizer.defaults
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]


def _running(optimizer: Optimizer, *, edges: bool = False, shared: bool = False, is_manual: bool = False) -> Any:
    rows = [SimpleNamespace(parameter=p, shape=tuple(p.shape)) for p in optimizer.param_groups[0]["params"]]
    return SimpleNamespace(
        plan=SimpleNamespace(topology=SimpleNamespace(edges=[1] * edges), division=SimpleNamespace(shards={})),
        trainer=SimpleNamespace(optimizers=[optimizer]),
        module=SimpleNamespace(automatic_optimization=not is_manual),
        shared=SimpleNamespace(all=rows * shared),
    )


def test_a_manual_step_that_takes_a_norm_is_refused_where_ranks_hold_parts() -> None:
    optimizer = Ascends([nn.Parameter(torch.ones(4, 2))])
    check_optimizers(_running(optimizer, edges=True))
    check_optimizers(_running(optimizer, is_manual=True))
    with pytest.raises(ConfigError, match=r"Ascends\.first_step: got 'norm\(\) of \.grad'"):
        check_optimizers(_running(optimizer, edges=True, is_manual=True))


def test_copies_of_parameters_beside_the_state_are_refused_where_ranks_step_on_rows() -> None:
    optimizer = Ahead(torch.optim.SGD([nn.Parameter(torch.ones(4, 2))], lr=0.1))
    check_optimizers(_running(optimizer))
    with pytest.raises(ConfigError, match=r"Ahead\.slow: got 'a tensor of shape \(4, 2\)'.*self\.state"):
        check_optimizers(_running(optimizer, shared=True))
