"""A loss or gradient that is not finite skips a step, or ends the run, on all ranks and before anything changes."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from features.toys import PIPE, SHARED, TWINS, Outcome, Run, Samples, Toy, assert_same, figures, outcomes, weights
from lightning_mm5d.config.errors import NonFiniteError
from lightning_mm5d.stage import is_placeholder

BAD = 5
"""position, in Lightning's order, of the sample that is not finite"""


class Spoiled(Samples):
    """One sample of 32 has label 2, which none of the others has."""

    def __init__(self) -> None:
        super().__init__(32)
        order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()
        self.labels %= 2
        self.labels[order[BAD]] = 2


class Breaks(Toy):
    """NaN in the loss, or in its gradients alone, where a batch has the spoiled sample."""

    def __init__(self, where: str, skips: bool = False) -> None:
        super().__init__()
        self.where, self.skips = where, skips

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        bad = bool((batch["label"] == 2).any())
        if self.training and bad and self.where == "loss":
            return loss * float("nan")
        return loss + (loss - loss.detach()).abs().sqrt() if self.training and bad else loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if not self.skips:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        loss = optimizer_closure()  # as one would write it on one process
        if all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.parameters()):
            optimizer.step(closure=lambda: loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _skipped(run: Run, where: str, **options: Any) -> Any:
    layout = Run(run.layout, {**run.options, "on_nonfinite": "skip"}, run.folder)
    module = Breaks(where, skips=run.layout is None)
    trainer = layout.trainer(gradient_clip_val=0.5, max_epochs=2, **options)
    trainer.fit(module, run.training(Spoiled()), run.loader(8))
    return {"weights": weights(module), "val_loss": figures(trainer)["val_loss"]}


def losses_are_skipped(run: Run) -> Any:
    return _skipped(run, "loss")


def gradients_are_skipped(run: Run) -> Any:
    return _skipped(run, "gradients")


def windows_are_skipped(run: Run) -> Any:
    """The first batch of two that are accumulated."""
    return _skipped(run, "loss", accumulate_grad_batches=2)


class Compares(L.Callback):
    """Whether local parameters and optimizer states are what they were before the batch."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.before = self.state(trainer, module)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        (held, states), (before, states_before) = self.state(trainer, module), self.before
        # after the failure no rank shows what others hold
        assert_same([held, states], [{name: before[name] for name in held}, states_before], 0.0)

    @staticmethod
    def state(trainer: L.Trainer, module: L.LightningModule) -> Any:
        held = {name: p.detach().clone() for name, p in module.named_parameters() if not is_placeholder(p)}
        return [held, copy.deepcopy([list(optimizer.state.values()) for optimizer in trainer.optimizers])]


def _raised(run: Run, where: str) -> Any:
    if run.layout is None:
        return None
    trainer = Run(run.layout, {**run.options, "on_nonfinite": "raise"}).trainer(callbacks=[Compares()], max_epochs=2)
    try:
        trainer.fit(Breaks(where), run.training(Spoiled()))
    except NonFiniteError as error:
        return str(error)
    return "no error"


def losses_raise(run: Run) -> Any:
    return _raised(run, "loss")


def gradients_raise(run: Run) -> Any:
    return _raised(run, "gradients")


def half_precision(run: Run) -> Any:
    """A scaler looks after gradients, and losses count."""
    if run.layout is None:
        return None
    from lightning.pytorch.plugins import MixedPrecision

    found = []
    for reaction in ("raise", "skip"):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40))
        layout = Run(run.layout, {**run.options, "on_nonfinite": reaction})
        module = Breaks("loss").float()
        try:
            layout.trainer(plugins=[plugin]).fit(module, run.training(Singles()))
            found.append("no error")
        except NonFiniteError as error:
            found.append(str(error))
        found.append(all(bool(p.isfinite().all()) for p in module.parameters() if not is_placeholder(p)))
    return found


class Singles(Spoiled):
    def __init__(self) -> None:
        super().__init__()
        self.images = self.images.float()


SCENARIOS = (losses_are_skipped, gradients_are_skipped, windows_are_skipped, losses_raise, gradients_raise)


@pytest.fixture(
    scope="module",
    params=[
        PIPE,
        pytest.param(TWINS, marks=pytest.mark.exhaustive),
        pytest.param(SHARED, marks=pytest.mark.exhaustive),
    ],
    ids=["pipe", "twins", "shared"],
)
def found(request: Any) -> dict[str, Outcome]:
    options = {"num_microbatches": 1} if request.param is SHARED else {}  # plain replicas
    return outcomes(request.param, *SCENARIOS, half_precision, **options)


def test_skipped_steps_are_those_of_one_process(found: dict[str, Outcome]) -> None:
    for scenario in SCENARIOS[:3]:
        outcome = found[scenario.__name__]
        assert_same(outcome.ranks[0]["weights"], outcome.one["weights"], where=scenario.__name__)
        for rank in outcome.ranks:
            assert_same(rank["val_loss"], outcome.one["val_loss"], where=scenario.__name__)


def test_every_rank_raises_and_changes_nothing(found: dict[str, Outcome]) -> None:
    for name, words in (("losses_raise", "step 0: not finite: loss nan on rank "), ("gradients_raise", "gradient of ")):
        messages = found[name].ranks
        assert len(set(messages)) == 1, messages
        assert words in messages[0]
        assert messages[0].endswith("No parameter was changed by it")


def test_a_scaler_looks_after_gradients_and_losses_count(found: dict[str, Outcome]) -> None:
    for raised, is_finite, skipped, stays_finite in found["half_precision"].ranks:
        assert "not finite: loss nan on rank" in raised
        assert skipped == "no error"
        assert is_finite
        assert stays_finite
