"""A `training_step` that returns None skips its batch, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from features.toys import PIPE, SHARED, TWINS, Run, Toy, assert_same, outcomes, together, weights


class Skipping(Toy):
    """Skips the batches of odd numbers: before the model, or after it has run."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early, self.ran = early, list[int]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if self.early and batch_idx % 2:
            return None
        loss = self.loss(batch)
        if batch_idx % 2:
            return None
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ran.append(batch_idx)


def skipping(run: Run) -> Any:
    found = []
    for early in (True, False):
        for accumulated in (1, 2):
            module, trainer = Skipping(early), run.trainer(max_epochs=2, accumulate_grad_batches=accumulated)
            trainer.fit(module, run.training(32))
            found.append((weights(module), module.ran, trainer.global_step))
    return found


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [(PIPE, 2), (TWINS, 2), (SHARED, 1), (SHARED, 2)],
    ids=["pipe", "twins", "plain", "shared"],
)
def test_a_batch_is_skipped_on_all_ranks(layout: Any, microbatches: int) -> None:
    found = outcomes(layout, skipping, num_microbatches=microbatches)["skipping"]
    for rank, got in enumerate(found.ranks):
        assert [one[1:] for one in got] == [one[1:] for one in found.one]
        if rank == 0:
            assert_same([one[0] for one in got], [one[0] for one in found.one])


class Partly(Toy):
    """Skips microbatches by what they hold."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.calls = getattr(self, "calls", 0) + 1
        return None if self.calls == 2 and self.global_rank == 2 else loss


def partly(run: Run) -> None:
    run.trainer().fit(Partly(), run.training())


def test_a_batch_that_is_skipped_in_part_is_refused() -> None:
    with pytest.raises(AssertionError, match="None for 1 microbatches and a loss for 1"):
        together(PIPE, partly)


class SkippedByOne(Toy):
    """Skips the second batch on the second rank alone, and notes what hooks around the backward find."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[Any]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return None if batch_idx == 1 and self.global_rank == 1 else self.loss(batch)

    def on_after_backward(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        self.found.append([self.trainer.fit_loop.batch_idx, *(gradient.clone() for gradient in gradients)])
        for parameter in self.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.01)


def skipped_by_one(run: Run) -> Any:
    module, trainer = SkippedByOne(), run.trainer()
    trainer.fit(module, run.training(32))
    return module.found, weights(module), trainer.global_step


def test_hooks_run_on_a_replica_that_skips_a_batch_for_which_another_gives_gradients() -> None:
    """two plain replicas: ranks 0-1"""
    first, second = together(SHARED, skipped_by_one, num_microbatches=1, loss_weight="samples")
    assert [found[0] for found in first[0]] == [0, 1, 2, 3]
    assert all(float(gradient.abs().sum()) > 0 for gradient in first[0][1][1:])
    assert_same(second, first)
