"""What two replicas that share send in a step, and keep between steps, is a share of the parameters."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from features.toys import Layout, Run, together
from lightning_mm5d import Modality

WIDTH, BATCHES = 64, 2


class Square(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.kept, self.ended = 0, False
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = batch["images"].repeat(1, 11)[:, :WIDTH]
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return Noted(self)

    def on_train_end(self) -> None:
        self.ended = True


class Noted(torch.optim.AdamW):
    """Notes what lies in memory after a step, where hooks would be shown full states."""

    def __init__(self, module: Square) -> None:
        super().__init__(module.parameters())
        self.module = module

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        self.module.kept = sum(value.nbytes for row in self.state.values() for value in row.values() if value.dim())
        return result


def counted(run: Run) -> tuple[int, int]:
    """Bytes that this rank sends in all steps, of messages above 1 KB; and bytes of its optimizer's state."""
    module, sent = Square(), 0

    def count(name: str) -> Any:
        original = getattr(dist, name)

        def call(output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            own = given.nbytes if name == "all_gather_single" else given.nbytes // 2
            sent += own if own > 1024 and not module.ended else 0  # weights are gathered once more after training
            return original(output, given, *args, **kwargs)

        return mock.patch.object(dist, name, call)

    with count("all_gather_single"), count("all_to_all_single"):
        trainer = run.trainer(limit_train_batches=BATCHES)
        trainer.fit(module, run.training(16, 8))
    return sent, module.kept


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_sends_each_parameter_and_each_gradient_once(stage: int) -> None:
    layout = Layout({"language": Modality(sharding={"zero_stage": stage}, module="layers")}, 2, 2)
    whole = sum(parameter.nbytes for parameter in Square().parameters())
    for sent, state in together(layout, counted, num_microbatches=1):
        theory = BATCHES * 2 * whole / 2  # gradients are scattered and rows gathered, each (n - 1) / n of all
        assert sent <= 1.01 * theory
        assert sent >= 0.99 * theory
        assert state <= 1.05 * 2 * whole / 2  # two moments
