"""What data parallel ranks share gives the losses, gradients and parameters of one process.

The default run holds each stage, blocks of ranks, stages of a pipeline and an encoder apart once; `exhaustive` holds
more of their pairs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from features.toys import LANGUAGE, VISION, Layout, Run, Toy, assert_same, figures, outcomes, weights
from lightning_mm5d import Modality
from sweeps import swept


class Trained(Toy):
    """AdamW in two groups with options of their own."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.encoder.parameters(), "lr": 0.02, "weight_decay": 0.1},
            {"params": self.decoder.parameters(), "betas": (0.8, 0.9)},
        ]
        return torch.optim.AdamW(groups, lr=0.01)


def clipped(run: Run) -> Any:
    module = Trained()
    trainer = run.trainer(max_epochs=2, gradient_clip_val=0.05)
    trainer.fit(module, run.training(), run.loader(8))
    return {"weights": weights(module), "figures": figures(trainer)}


def accumulated(run: Run) -> Any:
    module = Trained()
    trainer = run.trainer(max_epochs=2, accumulate_grad_batches=2, check_val_every_n_epoch=1)
    trainer.fit(module, run.training(dataset=24, batch_size=8), run.loader(8))
    return {"weights": weights(module), "figures": figures(trainer)}


class Adagrad(Toy):
    """An optimizer that makes its state when it is constructed."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


class Replaces(torch.optim.Optimizer):
    """A user's own, which replaces the data of parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - 0.1 * parameter.grad
        return loss


class Replaced(Toy):
    def configure_optimizers(self) -> Any:
        return Replaces(self.parameters())


def replaced(run: Run) -> Any:
    module = Replaced()
    run.trainer(max_epochs=2).fit(module, run.training())
    return weights(module)


def made_before(run: Run) -> Any:
    module = Adagrad()
    run.trainer(max_epochs=2).fit(module, run.training())
    return weights(module)


def shared(stage: int, size: int | None = None, world: int = 2, **language: Any) -> Layout:
    """All modalities on all ranks, or the language model's stages with the encoder beside its first."""
    reshards = language.pop("reshards", False)
    sharing = {"zero_stage": stage, "dp_shard_size": size, "reshard_after_forward": reshards}
    pp = language.get("pp_size", 1)
    encoder = Modality(colocate_with="language", **sharing, **VISION)
    return Layout({"vision": encoder, "language": Modality(**sharing, **language, **LANGUAGE)}, world, world // pp)


LAYOUTS = {
    "stage 1, 2 ranks": shared(1),
    "stage 2, 2 ranks": shared(2),
    "stage 3, 2 ranks": shared(3),
    "stage 3, 2 of 4 ranks": shared(3, 2, 4),
    "stage 1, 2 of 4 ranks": shared(1, 2, 4),
    "stage 3, language pp 2": shared(3, None, 4, pp_size=2),
    "gathered by layer, 2 ranks": shared(3, reshards=True),
    "gathered by layer, language pp 2": shared(3, None, 4, pp_size=2, reshards=True),
    "stage 2, 4 ranks": shared(2, None, 4),
    "vision | language gathered by layer, dp 2": Layout(
        {
            "vision": Modality(dp_size=1, **VISION),  # whose rank shares nothing
            "language": Modality(dp_size=2, sharding={"zero_stage": 3, "reshard_after_forward": True}, **LANGUAGE),
        },
        3,
        2,
    ),
}


PAIRS = (
    *("stage 3, 2 ranks", "stage 1, 2 of 4 ranks", "stage 3, language pp 2"),
    *("gathered by layer, 2 ranks", "stage 2, 4 ranks"),
)


@pytest.mark.parametrize("name", swept(LAYOUTS, *PAIRS))
def test_shared_parameters_are_trained_as_on_one_process(name: str) -> None:
    found = outcomes(LAYOUTS[name], clipped, accumulated, made_before, replaced)
    for scenario, outcome in found.items():
        assert_same(outcome.ranks[0], outcome.one, where=scenario)
