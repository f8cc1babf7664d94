"""A loss without a gradient is an error on every rank; one that other microbatches make up for is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from features.toys import PIPE, SHARED, TWINS, Outcome, Run, Samples, Toy, assert_same, figures, outcomes, weights
from sweeps import dealt


class DetachedLater(Toy):
    """The loss has no graph from the third step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss.detach() if self.global_step > 1 else loss


def _message(run: Run, module: Toy, **options: Any) -> Any:
    try:
        run.trainer(**options).fit(module, run.training(32))
    except (RuntimeError, ValueError) as error:
        return "require grad" in str(error), module.global_step
    return "no error", module.global_step


def detached_from_the_third_step(run: Run) -> Any:
    return _message(run, DetachedLater())


def everything_frozen(run: Run) -> Any:
    module = Toy()
    module.requires_grad_(False)
    return _message(run, module)


class Projected(Toy):
    """Only the encoder trains, and samples of label 0 have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder.requires_grad_(False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features, cut = self.encoder(batch["images"]), batch["label"] == 0
        features = features.detach() if bool(cut.all()) else torch.where(cut.unsqueeze(1), features.detach(), features)
        return self.decoder(batch["tokens"], features)


class Grouped(Samples):
    """Samples of label 0 are `first` of each `every` in the order of Lightning's sampler."""

    def __init__(self, first: int, every: int) -> None:
        super().__init__(16)
        order = torch.randperm(16, generator=torch.Generator().manual_seed(0)).tolist()
        for place, index in enumerate(order):
            self.labels[index] = 0 if place % every < first else 1


def _projected(run: Run, first: int, every: int) -> Any:
    module = Projected()
    run.trainer().fit(module, run.training(Grouped(first, every)))
    return weights(module)


def one_replica_without_a_gradient(run: Run) -> Any:
    """Of two replicas, the first; one process sees the samples of both."""
    return _projected(run, 1, 2)


def one_microbatch_without_a_gradient(run: Run) -> Any:
    """Of four in a batch, the first and the third."""
    return _projected(run, 2, 4)


class Masked(Toy):
    """A loss that is a mean over the samples with a label, and weights by their number."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch), self.labels(batch))

    @staticmethod
    def labels(batch: dict[str, Tensor]) -> Tensor:
        return torch.where(batch["label"] == 0, -100, batch["label"])

    def loss_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["label"] != 0).sum()


def microbatches_without_a_label(run: Run) -> Any:
    module = Masked()
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, run.training(), run.loader(8))
    return {"weights": weights(module), "metrics": figures(trainer)}


SCENARIOS = (
    detached_from_the_third_step,
    everything_frozen,
    one_replica_without_a_gradient,
    one_microbatch_without_a_gradient,
    microbatches_without_a_label,
)


@pytest.fixture(
    scope="module",
    params=dealt(__file__, [PIPE, TWINS, SHARED]),
    ids=["pipe", "twins", "shared"],
)
def found(request: Any) -> dict[str, Outcome]:
    return outcomes(request.param, *SCENARIOS, num_microbatches=4)


def test_a_loss_without_a_gradient_is_an_error_in_any_step_on_every_rank(found: dict[str, Outcome]) -> None:
    outcome = found["detached_from_the_third_step"]
    assert outcome.one == (True, 2)
    assert outcome.ranks == [outcome.one] * len(outcome.ranks)


def test_nothing_to_train_is_an_error_on_every_rank(found: dict[str, Outcome]) -> None:
    outcome = found["everything_frozen"]
    assert outcome.one == (True, 0)
    assert outcome.ranks == [outcome.one] * len(outcome.ranks)


def test_replicas_and_microbatches_without_a_gradient_add_none(found: dict[str, Outcome]) -> None:
    for name in ("one_replica_without_a_gradient", "one_microbatch_without_a_gradient"):
        assert_same(found[name].ranks[0], found[name].one, where=name)


def test_microbatches_without_a_label_count_nothing(found: dict[str, Outcome]) -> None:
    outcome = found["microbatches_without_a_label"]
    assert_same(outcome.ranks[0]["weights"], outcome.one["weights"])
    for rank in outcome.ranks:
        assert_same(rank["metrics"], outcome.one["metrics"])
