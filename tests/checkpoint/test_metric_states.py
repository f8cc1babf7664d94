"""States of metrics in checkpoints: the rank that computes the loss has them, also where another one saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric

from features.toys import PIPE, Run, Toy, alone, assert_same, together


class Measured(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.losses = MeanMetric(), CatMetric()
        for metric in (self.mean, self.losses):
            metric.persistent(True)
            metric.set_dtype(torch.float64)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.losses.update(loss.detach())
        return loss


def saved_and_resumed(run: Run) -> dict[str, Any]:
    """Return the mean loss of four steps, of which a second run did the last two, from a checkpoint of the first."""
    path = Path(run.folder) / "two.ckpt"
    trainer = run.trainer(max_steps=2)
    trainer.fit(Measured(), run.training())
    trainer.save_checkpoint(path)
    module = Measured()
    trainer = run.trainer(max_steps=4)
    trainer.fit(module, run.training(), ckpt_path=path)
    return {"mean": module.mean.compute().item(), "mean of all": module.losses.compute().mean().item()}


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_states_of_metrics_are_saved_from_the_rank_that_has_them(kind: str, tmp_path: Path) -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    expected = alone(saved_and_resumed, tmp_path)
    (tmp_path / kind).mkdir()
    got = together(PIPE, saved_and_resumed, tmp_path / kind, checkpoint=kind)
    assert_same(got[-1], expected, 1e-6)  # of metrics in float32
