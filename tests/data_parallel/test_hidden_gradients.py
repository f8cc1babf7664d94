"""Between batches gradients of shared parameters can be read, dropped, zeroed and replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from features.toys import LANGUAGE, VISION, Layout, Run, Samples, Toy, alone, assert_same, outcomes, weights
from lightning_mm5d import Modality
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


def trained(run: Run, change: Callable[[Toy], Any]) -> Any:
    module = Changing(change)
    run.trainer(accumulate_grad_batches=2, val_check_interval=1).fit(module, run.training(Samples(32)), run.loader(8))
    assert all(parameter.grad is None for parameter in module.parameters()) or run.layout is None
    return weights(module)


CHANGES = (set_to_none, zero, zero_at_once, replace, scale, sizes)


def test_gradients_change_between_batches_of_an_accumulation_as_on_one_process() -> None:
    """two replicas of the whole model: ranks 0-1; one with two microbatches"""
    expected = alone(lambda run: [trained(run, change) for change in CHANGES])

    def on_rank(rank: int) -> Any:
        found = []
        for stage in (1, 2):
            run = Run(
                Layout({"model": Modality(dp_size=2, sharding={"zero_stage": stage})}, 2, 2),
                {"num_microbatches": stage},
            )
            found.append([trained(run, change) for change in CHANGES])
        return found

    for got in run_ranks(2, on_rank):
        for one in got:
            assert_same(one, expected)


class Adding(Toy):
    """Changes gradients in the hook right after each backward of an accumulation."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.9).add_(0.001)


def added(run: Run) -> Any:
    module = Adding()
    run.trainer(accumulate_grad_batches=3, max_epochs=2).fit(module, run.training(Samples(32)))
    return weights(module)


ALL = {"colocate_with": "language", **VISION}
ADDING = {
    "replicas": (Layout(None, 2, 2), {}),
    "rows": (Layout({"model": Modality(sharding={"zero_stage": 3})}, 2, 2), {}),
    "encoder on both stages": (
        Layout(
            {"vision": Modality(colocate_with="language", **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 2
        ),
        {"num_microbatches": 2},
    ),
}


@pytest.mark.parametrize("name", ADDING)
def test_what_a_hook_adds_to_gradients_of_an_accumulation_counts_once(name: str) -> None:
    """two replicas | two replicas with rows of parameters | vision and two stages of language: ranks 0-1"""
    layout, options = ADDING[name]
    found = outcomes(layout, added, **options)["added"]
    assert_same(found.ranks[0], found.one)
