"""Weights that are set through `data` count, or are refused where a step cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from features.toys import Layout, Run, Toy, alone, assert_same, weights
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.sharded.data_accesses import accesses, refused_writes
from lightning_mm5d.sharded.remote_value import Guard, Origin, make_placeholder
from ranks import run_ranks


def _shows_other_data(weight: nn.Parameter) -> None:
    before, weight.data = weight.data, weight.data * 2
    weight.data = before


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda weight: weight.mul_(0.5),
    "of a part": lambda weight: weight.detach()[1:].mul_(0.5),
    "of several": lambda weight: torch._foreach_mul_([weight], 0.5),
    "through data": lambda weight: weight.data.clamp_(-1, 1),
    "through a part of data": lambda weight: weight.data[0].fill_(0.5),
    "other data": lambda weight: setattr(weight, "data", weight.data.clamp(-1, 1)),
}
READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "a sum": lambda weight: weight.sum(),
    "a sum of data": lambda weight: weight.data.sum(),
    "a copy": lambda weight: weight.data.clone().mul_(2),
    "other data for a time": _shows_other_data,
}


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("name", [*WRITES, *READS])
def test_a_step_that_runs_several_times_writes_to_no_weight_here_or_elsewhere(name: str, is_here: bool) -> None:
    weight, other = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    if not is_here:
        make_placeholder(weight, weight.shape, Origin("weight", Guard(lambda _: "rank 1")))
    named = [("weight", weight), ("other", other)]
    step = refused_writes(named, shows_copies=False, once={"weight"})
    if name in READS:
        with torch.no_grad(), step:
            READS[name](weight)
        return
    with pytest.raises(ConfigError, match="a write to 'weight'"), torch.no_grad(), step:
        WRITES[name](weight)
    with torch.no_grad(), refused_writes(named, shows_copies=False, once={"other"}):
        WRITES[name](weight)


def test_a_write_that_fails_the_backward_of_an_earlier_microbatch_is_named() -> None:
    weight = nn.Parameter(torch.ones(3))
    loss = (weight**2).sum()
    step = refused_writes([("weight", weight)], shows_copies=False, once={"weight"})
    with pytest.raises(ConfigError, match="a write to 'weight'"), step:
        weight.detach().mul_(0.5)
        loss.backward()


def test_of_several_that_notice_accesses_each_does() -> None:
    weight, seen = nn.Parameter(torch.ones(3)), list[str]()
    with accesses(lambda *_: seen.append("outer")), accesses(lambda *_: seen.append("inner")):
        weight.data = weight.data * 2
    assert sorted(seen) == ["inner", "inner", "outer", "outer"]
    assert "data" not in vars(nn.Parameter)


class Clamped(Toy):
    """Sets other data, in the step or before it; or shows them for a time and reads them."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def clamp(self, when: str) -> None:
        for parameter in self.parameters() if when == self.when else ():
            parameter.data = parameter.data.clamp(-0.1, 0.1)

    def on_train_batch_start(self, *_: Any) -> None:
        self.clamp("before")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clamp("in")
        weight = self.decoder.head.weight
        own, weight.data = weight.data, weight.data.clone()
        loss = self.loss(batch)
        weight.data = own
        return loss + 0.0 * own.sum()


def trained(run: Run, when: str) -> Any:
    module = Clamped(when)
    run.trainer(limit_val_batches=0).fit(module, run.training(), run.loader(8))
    return weights(module)


def shared(stage: int, **options: Any) -> Run:
    return Run(
        Layout({"model": Modality(dp_size=2, sharding={"zero_stage": stage})}, 2, 2), {"num_microbatches": 1, **options}
    )


def test_data_that_are_set_count_or_are_refused() -> None:
    """two replicas of the whole model: ranks 0-1"""
    expected = alone(lambda run: [trained(run, "before"), trained(run, "in")])

    def on_rank(rank: int) -> Any:
        with pytest.raises(ConfigError, match=r"\.data: .*a write in training_step"):
            trained(shared(3), "in")
        return [trained(shared(1), "before"), trained(shared(1), "in")], trained(shared(3), "before")

    whole, rows = run_ranks(2, on_rank)[0]
    assert_same(whole, expected)
    assert_same(rows, expected[0])
    assert "data" not in vars(torch.nn.Parameter)
