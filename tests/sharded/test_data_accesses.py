"""Weights that are set through `data` count, or are refused where a step cannot tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from features.toys import Layout, Run, Toy, alone, assert_same, weights
from lightning_mm5d import ConfigError, Modality
from ranks import run_ranks


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
