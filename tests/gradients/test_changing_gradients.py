"""Gradients of what is frozen at odd times, and of parameters with another memory format, are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from features.toys import LANGUAGE, SHARED, VISION, Layout, Run, Toy, assert_same, outcomes, together, weights
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError


class Decayed(Toy):
    """Shows whether a gradient is zero or missing: decay and momentum change parameters with a gradient alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class WithinAnAccumulation(Decayed):
    """Each second batch of an accumulation trains other parameters than the first one."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.encoder.patch.requires_grad_(batch_idx % 2 == 0)
        self.decoder.layers[1].requires_grad_(batch_idx % 2 == 1)


class InTheStep(Decayed):
    """The step itself freezes parameters for each second accumulation."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.encoder.patch.requires_grad_(batch_idx % 4 < 2)
        return super().training_step(batch, batch_idx)


class Kept(Toy):
    """Gradients of earlier steps are kept, so that each step follows the sum of all."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def optimizer_zero_grad(self, *_: Any) -> None:
        pass


class Transposed(Toy):
    """Weights in another memory format, and an optimizer that reads weights and gradients as flat memory."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.encoder.patch, self.decoder.layers[0].up):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, fused=True)


def _fit(run: Run, make: Callable[[], Toy], **options: Any) -> Any:
    module = make()
    run.trainer(**options).fit(module, run.training(32))
    return weights(module)


def within_an_accumulation(run: Run) -> Any:
    return _fit(run, WithinAnAccumulation, accumulate_grad_batches=2)


def in_the_step(run: Run) -> Any:
    return _fit(run, InTheStep, accumulate_grad_batches=2)


def kept(run: Run) -> Any:
    return _fit(run, Kept, accumulate_grad_batches=2)


def transposed(run: Run) -> Any:
    return _fit(run, Transposed)


ROWS = Layout(
    {
        "vision": Modality(colocate_with="language", sharding={"zero_stage": 2}, **VISION),
        "language": Modality(sharding={"zero_stage": 2}, **LANGUAGE),
    },
    2,
    2,
)
"""two replicas of everything, which share gradients: ranks 0-1"""


@pytest.mark.parametrize(("layout", "microbatches"), [(SHARED, 1), (SHARED, 2), (ROWS, 2)])
def test_weights_are_those_of_one_process(layout: Layout, microbatches: int) -> None:
    found = outcomes(layout, within_an_accumulation, transposed, kept, num_microbatches=microbatches)
    if layout is SHARED:
        found |= outcomes(layout, in_the_step, num_microbatches=microbatches)
    for scenario, outcome in found.items():
        for got in outcome.ranks:
            assert_same(got, outcome.one, where=scenario)


class Unfreezing(Toy):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.encoder.patch.requires_grad_(batch_idx % 2 == 1)
        return super().training_step(batch, batch_idx)


def unfrozen_in_the_step(run: Run) -> str:
    with pytest.raises(ConfigError) as caught:
        _fit(run, Unfreezing)
    return str(caught.value)


def test_a_parameter_that_a_step_unfreezes_is_not_trained_on_one_rank_alone() -> None:
    for message in together(SHARED, unfrozen_in_the_step, num_microbatches=2):
        assert "encoder.patch" in message
        assert "requires_grad" in message
