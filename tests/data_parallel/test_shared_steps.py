"""Optimizers that step in ways of their own step on rows as on full tensors, and compiled layers have their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data_parallel.test_sharing import shared
from features.toys import Run, Toy, assert_same, figures, outcomes, weights


class Fused(Toy):
    """Steps with a kernel that takes contiguous memory for granted."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class Bypassing(Fused):
    """Steps on the inner optimizer in one batch, and leaves the step out in the next one."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.optimizer.step(optimizer_closure)
        else:
            optimizer_closure()


class Compiled(Fused):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.compile(backend="eager")
        for layer in self.decoder.layers:
            layer.compile(backend="eager")


def _fit(run: Run, module: Any) -> Any:
    trainer = run.trainer(max_epochs=2, val_check_interval=1, gradient_clip_val=0.1)
    trainer.fit(module, run.training(24), run.loader(8))
    return {"weights": weights(module) if trainer.is_global_zero else None, "figures": figures(trainer)}


def fused(run: Run) -> Any:
    return _fit(run, Fused())


def bypassing(run: Run) -> Any:
    return _fit(run, Bypassing())


def compiled(run: Run) -> Any:
    return _fit(run, Compiled())


@pytest.mark.parametrize(("stage", "options"), [(2, {}), (3, {"reshards": True})])
def test_steps_of_users_and_compiled_layers_equal_one_process(stage: int, options: dict[str, Any]) -> None:
    """vision and language: ranks 0-1"""
    for name, found in outcomes(shared(stage, **options), fused, bypassing, compiled).items():
        assert_same(found.ranks[0], found.one, where=name)
