"""All modalities on all ranks: what a script for DDP does works as there, and manual optimization too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from features.toys import (
    SHARED,
    TWINS,
    Layout,
    Run,
    Samples,
    Toy,
    assert_same,
    figures,
    outcomes,
    together,
    weights,
)
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError


class Contrast(Toy):
    """The loss of a sample depends on the samples of all replicas."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        images = self.encoder(batch["images"])
        texts = self.decoder.embedding(batch["tokens"]).mean(1)
        everything = self.all_gather(texts, sync_grads=True)
        replicas = len(everything) if everything.dim() == 3 else 1
        logits = images @ everything.reshape(-1, texts.shape[-1]).T
        pairs = torch.arange(len(texts)) + (self.global_rank * len(texts) if replicas > 1 else 0)
        loss = F.cross_entropy(logits, pairs)
        self.log("loss", loss, sync_dist=True)
        self.log("gathered", float(everything.numel()), sync_dist=True)
        return loss


def contrast(run: Run) -> Any:
    module = Contrast()
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, run.training())
    return {"weights": weights(module), "metrics": figures(trainer)}


def contrast_in_microbatches(run: Run) -> Any:
    """Samples are compared within a microbatch; on one process batches of half the size are accumulated."""
    module = Contrast()
    alone = run.layout is None
    trainer = run.trainer(max_epochs=2, accumulate_grad_batches=2 if alone else 1)
    trainer.fit(module, run.training(batch_size=4 if alone else 8))
    return weights(module)


@pytest.mark.parametrize(("scenario", "microbatches"), [(contrast, 1), (contrast_in_microbatches, 2)])
def test_all_gather_with_gradients_gives_the_loss_over_all_replicas(scenario: Any, microbatches: int) -> None:
    """two replicas of everything: ranks 0-1"""
    outcome = outcomes(SHARED, scenario, num_microbatches=microbatches)[scenario.__name__]
    assert_same(outcome.ranks[0], outcome.one)


class Manual(Toy):
    """Two optimizers that take turns, accumulation, clipping and a scheduler, all by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        self.untoggle_optimizer(first)
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            second.step()
            second.zero_grad()
            self.lr_schedulers().step()
        self.log("train_loss", loss, sync_dist=True)
        self.accuracy(self(batch), batch["label"])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.encoder.parameters(), lr=0.1)
        second = torch.optim.Adam(self.decoder.parameters(), lr=0.01)
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 1, 0.5)]


def manual(run: Run) -> Any:
    module = Manual()
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, run.training(32))
    return {"weights": weights(module), "metrics": figures(trainer), "steps": trainer.global_step}


def automatic(run: Run) -> Any:
    module = Toy()
    trainer = run.trainer(max_epochs=2, gradient_clip_val=0.1, accumulate_grad_batches=2)
    trainer.fit(module, run.training(24), run.loader(8))
    return {"weights": weights(module), "metrics": figures(trainer), "steps": trainer.global_step}


def test_plain_replicas_train_like_one_process_by_hand_or_not() -> None:
    """two replicas of everything: ranks 0-1"""
    for outcome in outcomes(SHARED, manual, automatic, num_microbatches=1).values():
        assert_same(outcome.ranks[0]["weights"], outcome.one["weights"])
        for rank in outcome.ranks:
            assert_same(rank["metrics"], outcome.one["metrics"])
            assert rank["steps"] == outcome.one["steps"]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_rank_under_the_strategy_trains_like_one_process(microbatches: int) -> None:
    """everything: rank 0"""
    alone_under_it = Layout({"model": Modality()}, 1)
    outcome = outcomes(alone_under_it, automatic, num_microbatches=microbatches)["automatic"]
    assert_same(outcome.ranks[0], outcome.one)


def test_manual_optimization_is_refused_where_a_rank_works_for_several_replicas() -> None:
    trainer = Run(TWINS).trainer()
    with pytest.raises(ConfigError, match="automatic_optimization"):
        trainer.fit(Manual(), Run().loader(16))
    assert not torch.distributed.is_initialized()


class FrozenDecoder(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.requires_grad_(False)


def numbers_reduced(run: Run) -> list[int]:
    """Elements of every float64 tensor that is summed over ranks."""
    module, sizes, original = FrozenDecoder(), [], torch.distributed.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float64 and tensor.dim() == 1:
            sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counted
    run.trainer().fit(module, run.training(8))
    return sizes


def test_frozen_parameters_are_not_sent() -> None:
    """two replicas of everything: ranks 0-1"""
    trained = list(Toy().encoder.parameters())
    labels, loss = 2, 4  # the step's labels and samples; its loss, and how many microbatches gave one
    for sizes in together(SHARED, numbers_reduced, num_microbatches=1):
        assert sum(sizes) == sum(p.numel() for p in trained) + labels + loss


class OfTokens(Toy):
    """Trains by a mean over samples, and is evaluated by a mean over the labels that count."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = (self(batch) ** 2).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch), batch["label"]), sync_dist=True)


class Unlabelled(Samples):
    """Has labels in some samples, of which most are in one replica."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        return item | {"label": torch.where(torch.tensor(index % 8 in (1, 3, 4, 5)), item["label"], -100)}


def of_tokens(run: Run) -> Any:
    trainer = run.trainer()
    module = OfTokens()
    trainer.fit(module, run.training(), run.loader(Unlabelled(16)))
    return figures(trainer), weights(module)


def test_plain_replicas_weigh_an_evaluation_by_the_labels_that_count() -> None:
    """two replicas of everything: ranks 0-1"""
    outcome = outcomes(SHARED, of_tokens, num_microbatches=1)["of_tokens"]
    for found in outcome.ranks:
        assert_same(found, outcome.one)
