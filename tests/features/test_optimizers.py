"""Every optimizer gives the weights of one process, or is refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from features.toys import PIPE, SHARED, Outcome, Run, Toy, assert_same, outcomes, weights
from lightning_mm5d.config.errors import ConfigError
from sweeps import dealt

BY_PARAMETER = ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


class With(Toy):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Lookahead(torch.optim.SGD):
    """Evaluates the loss again at other weights, as sharpness-aware minimization does."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 0.05 / torch.stack([p.grad.norm() for p in held]).norm()
        moved = [(p.grad * scale).clone() for p in held]
        torch._foreach_add_([p.data for p in held], moved)
        closure()
        torch._foreach_sub_([p.data for p in held], moved)
        super().step()
        return loss


class GlobalNorm(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.grad /= norm
        super().step()
        return loss


def _trained(run: Run, make: Any) -> Any:
    module = With(make)
    try:
        run.trainer().fit(module, run.training())
    except ConfigError as error:
        return str(error)
    return weights(module)


def by_parameter(run: Run) -> Any:
    return {name: _trained(run, getattr(torch.optim, name)) for name in BY_PARAMETER}


def evaluates_again(run: Run) -> Any:
    return _trained(run, lambda parameters: Lookahead(parameters, lr=0.1))


def over_all(run: Run) -> Any:
    return _trained(run, lambda parameters: GlobalNorm(parameters, lr=0.1))


def line_search(run: Run) -> Any:
    return _trained(run, lambda parameters: torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe"))


@pytest.fixture(scope="module", params=dealt(__file__, [PIPE, SHARED]), ids=["pipe", "shared"])
def found(request: Any) -> dict[str, Outcome]:
    """vision: rank 0, language: ranks 1-2 as stages; or two replicas of everything: ranks 0-1"""
    return outcomes(request.param, by_parameter, evaluates_again, over_all, line_search)


def test_optimizers_that_work_by_parameter_are_those_of_one_process(found: dict[str, Outcome]) -> None:
    outcome = found["by_parameter"]
    for name in BY_PARAMETER:
        # a first step that takes the sign of a gradient turns rounding into a step
        tolerance = 1e-6 if name in ("Adafactor", "RMSprop", "Adamax", "NAdam", "RAdam", "Adagrad") else 1e-9
        assert_same(outcome.ranks[0][name], outcome.one[name], tolerance, name)


@pytest.mark.parametrize("name", ["evaluates_again", "over_all", "line_search"])
def test_optimizers_over_all_parameters_are_refused_over_stages_alone(name: str, found: dict[str, Outcome]) -> None:
    one, ranks = found[name].one, found[name].ranks
    if len(ranks) == PIPE.world:
        assert all(rank.startswith("configure_optimizers: got") for rank in ranks), ranks
    else:
        assert_same(ranks[0], one, 1e-8, name)
