"""Between batches gradients of shared parameters can be dropped, zeroed and replaced; other uses raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from features.toys import Layout, Run, Samples, Toy, alone, assert_same, weights
from lightning_mm5d import ConfigError, Modality
from ranks import run_ranks


class Changing(Toy):
    """Does something to its gradients after the first of two batches that an accumulation has."""

    def __init__(self, change: Callable[[Toy], Any]) -> None:
        super().__init__()
        self.change = change

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.change(self)


def set_to_none(module: Toy) -> None:
    module.zero_grad()


def zero(module: Toy) -> None:
    module.zero_grad(set_to_none=False)


def zero_at_once(module: Toy) -> None:
    torch._foreach_zero_([parameter.grad for parameter in module.parameters()])


def replace(module: Toy) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.linspace(-0.1, 0.1, parameter.numel(), dtype=parameter.dtype).view_as(parameter)


def scale(module: Toy) -> None:
    module.decoder.head.weight.grad.mul_(0.5)


def sizes(module: Toy) -> None:
    norms = torch._foreach_norm([parameter.grad for parameter in module.parameters()])
    assert norms


def norm(module: Toy) -> Tensor:
    return module.trainer.strategy.gradient_norm()


def trained(run: Run, change: Callable[[Toy], Any]) -> Any:
    module = Changing(change)
    run.trainer(accumulate_grad_batches=2, val_check_interval=1).fit(module, run.training(Samples(32)), run.loader(8))
    assert all(parameter.grad is None for parameter in module.parameters()) or run.layout is None
    return weights(module)


CHANGES = (set_to_none, zero, zero_at_once, replace)


def test_gradients_change_between_batches_of_an_accumulation_as_on_one_process() -> None:
    """two replicas of the whole model: ranks 0-1; one with two microbatches"""
    expected = alone(lambda run: [trained(run, change) for change in CHANGES])

    def on_rank(rank: int) -> Any:
        found = []
        for stage in (1, 2):
            run = Run(Layout({"model": Modality(dp_size=2, zero_stage=stage)}, 2, 2), {"num_microbatches": stage})
            found.append([trained(run, change) for change in CHANGES])
            for change in (scale, sizes, norm):
                with pytest.raises(ConfigError, match=r"\.grad: .*a use between batches"):
                    trained(run, change)
        return found

    for got in run_ranks(2, on_rank):
        for one in got:
            assert_same(one, expected)
