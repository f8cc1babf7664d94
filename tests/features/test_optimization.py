"""Optimizers, schedulers, freezing, clipping and accumulation give the weights of one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from features.toys import PAIR, PIPE, TWINS, Layout, Outcome, Run, Toy, assert_same, figures, outcomes, weights
from sweeps import dealt


class Grouped(Toy):
    """Parameter groups with and without decay, and one for the encoder alone."""

    def configure_optimizers(self) -> Any:
        encoder = list(self.encoder.parameters())
        decay = [p for p in self.decoder.parameters() if p.dim() > 1]
        rest = [p for p in self.decoder.parameters() if p.dim() < 2]
        groups = [
            {"params": decay, "weight_decay": 0.1},
            {"params": rest, "weight_decay": 0.0},
            {"params": encoder, "lr": 0.03, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class EncoderOnly(Toy):
    """An optimizer that some ranks have nothing for, with a scheduler per epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.encoder.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Plateau(Toy):
    """A scheduler that follows a metric which only the last stage computes."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class HalfFrozen(Toy):
    """Frozen at several depths: a layer of each tower and the embedding."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.encoder.layers[0], self.decoder.layers[2], self.decoder.embedding):
            part.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class LooksBack(Toy):
    """Counts how often the hook before zeroing sees the gradients of the step before."""

    seen = 0

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen += any(parameter.grad is not None for parameter in self.parameters())


class Normed(Toy):
    """Logs the norm of all gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = getattr(self.trainer.strategy, "gradient_norm", None)
        here = [p.grad.pow(2).sum() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(here).sum().sqrt() if norm is None else norm())


def train(run: Run, module: L.LightningModule, samples: int = 16, **options: Any) -> dict[str, Any]:
    trainer = run.trainer(max_epochs=2, **options)
    trainer.fit(module, run.training(samples), run.loader(8))
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return {"weights": weights(module), "rates": rates, "metrics": figures(trainer), "steps": trainer.global_step}


def parameter_groups(run: Run) -> Any:
    return train(run, Grouped())


def only_the_encoder(run: Run) -> Any:
    return train(run, EncoderOnly())


def plateau(run: Run) -> Any:
    return train(run, Plateau())


def half_frozen(run: Run) -> Any:
    return train(run, HalfFrozen())


def looks_back(run: Run) -> Any:
    module = LooksBack()
    return {**train(run, module), "rates": [module.seen]}


def normed(run: Run) -> Any:
    return train(run, Normed())


def clipped_by_norm(run: Run) -> Any:
    return train(run, Toy(lr=1.0), gradient_clip_val=0.05)


def clipped_by_value(run: Run) -> Any:
    return train(run, Toy(lr=1.0), gradient_clip_val=0.01, gradient_clip_algorithm="value")


class FrozenEncoder(Toy):
    """The encoder's rank has no gradient to clip."""

    def __init__(self) -> None:
        super().__init__(lr=1.0)
        self.encoder.requires_grad_(False)


def clipped_by_value_without_gradients(run: Run) -> Any:
    return train(run, FrozenEncoder(), gradient_clip_val=0.01, gradient_clip_algorithm="value")


def accumulated(run: Run) -> Any:
    """Three batches an epoch: the second window of each is incomplete."""
    return train(run, Toy(lr=0.5), samples=24, accumulate_grad_batches=2, gradient_clip_val=0.1)


SCENARIOS = (
    parameter_groups,
    only_the_encoder,
    plateau,
    half_frozen,
    looks_back,
    normed,
    clipped_by_norm,
    clipped_by_value,
    clipped_by_value_without_gradients,
    accumulated,
)


@pytest.fixture(
    scope="module",
    params=dealt(__file__, [PAIR, PIPE, TWINS]),
    ids=["pair", "pipe", "twins"],
)
def found(request: Any) -> dict[str, Outcome]:
    layout: Layout = request.param
    return outcomes(layout, *SCENARIOS)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_weights_rates_and_metrics_are_those_of_one_process(found: dict[str, Outcome], name: str) -> None:
    """vision: rank 0; language: rank 1 | language: ranks 1-2 as stages | as replicas."""
    one, ranks = found[name].one, found[name].ranks
    assert_same(ranks[0]["weights"], one["weights"])
    for rank in ranks:
        assert rank["rates"] == pytest.approx(one["rates"])
        assert rank["steps"] == one["steps"]
        for key in {"val_loss", "norm"} & set(one["metrics"]):
            assert rank["metrics"][key] == pytest.approx(one["metrics"][key], rel=1e-9)


def test_the_scenarios_do_what_their_names_say(found: dict[str, Outcome]) -> None:
    initial = weights(Toy())
    assert found["plateau"].one["rates"][0] < 0.3
    assert found["accumulated"].one["steps"] == 4
    moved = found["only_the_encoder"].one["weights"]
    assert_same(moved["decoder.head.weight"], initial["decoder.head.weight"])
    assert not torch.equal(moved["encoder.patch.weight"], initial["encoder.patch.weight"])
    frozen = found["half_frozen"].ranks[0]["weights"]
    assert_same(frozen["decoder.layers.2.up.weight"], initial["decoder.layers.2.up.weight"])
    assert not torch.equal(frozen["encoder.layers.1.up.weight"], initial["encoder.layers.1.up.weight"])
