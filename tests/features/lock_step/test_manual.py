"""Manual optimization where layers of several ranks run again in the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from features.toys import LANGUAGE, VISION, Layout, Run, Toy, assert_same, outcomes, weights
from lightning_mm5d import Modality

AGAIN = {"memory": {"activation_checkpointing": "full"}}
BESIDE = Layout(
    {
        "vision": Modality(colocate_with="language.0", **AGAIN, **VISION),
        "language": Modality(pp_size=2, **AGAIN, **LANGUAGE),
    },
    2,
)
APART = Layout({"vision": Modality(**AGAIN, **VISION), "language": Modality(**AGAIN, **LANGUAGE)}, 2)


class InTurns(Toy):
    """Steps the optimizers of encoder and decoder in turns, each after a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.encoder, self.decoder)]


def in_turns(run: Run) -> Any:
    module = InTurns()
    run.trainer().fit(module, run.training(24))
    return weights(module)


@pytest.mark.parametrize("layout", [BESIDE, APART], ids=["beside", "apart"])
def test_layers_that_run_again_are_answered_by_nobody_else(layout: Layout) -> None:
    found = outcomes(layout, in_turns)["in_turns"]
    assert_same(found.ranks[0], found.one)
