"""Losses of logits of which each rank holds some tokens are those of one process.

The layout of all tests is that of `sequence_cases`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import run_ranks
from sharded.sequence_cases import LAYOUTS, TARGET, WORLD, B, Function, Ranks, S, W, on, random, run

CLASSES = W


def shifted(x: Tensor, **options: Any) -> Tensor:
    """The loss of a causal language model."""
    return F.cross_entropy(x[..., :-1, :].contiguous().view(-1, CLASSES), TARGET[:, 1:].reshape(-1), **options)


@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning")
def test_cross_entropies_are_those_of_one_process() -> None:
    weight = random(CLASSES, seed=9)
    chances = random(B * S, CLASSES, seed=4).softmax(-1)
    target = TARGET.flatten()
    plain = target.clamp(min=0)
    everything: list[dict[str, Any]] = [
        {},
        {"ignore_index": 3},
        {"weight": weight},
        {"weight": weight, "ignore_index": 1},
        {"label_smoothing": 0.1},
        {"weight": weight, "label_smoothing": 0.2},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"reduction": "sum", "weight": weight, "ignore_index": 0},
        {"reduction": "none", "weight": weight, "label_smoothing": 0.1},
        {"size_average": False},
        {"reduce": False},
    ]
    cases = []
    for options in everything:
        given = plain if options.get("ignore_index", -100) >= 0 else target
        cases += on(None, partial(of_targets, target=given, **options))
    of_chances: list[dict[str, Any]] = [{}, {"weight": weight}, {"label_smoothing": 0.1}, {"reduction": "sum"}]
    for options in (*of_chances, {"reduction": "none", "weight": weight}):
        cases += on(None, partial(of_targets, target=chances, **options))
    functions: list[Function] = [
        shifted,
        partial(shifted, label_smoothing=0.1),
        partial(shifted, reduction="sum"),
        lambda x: shifted(x, reduction="none").view(B, S - 1).sum(1),
        lambda x: F.cross_entropy(x.transpose(1, 2), TARGET),
        lambda x: F.cross_entropy(x.mT[..., :-1], TARGET[:, 1:], reduction="none"),
        lambda x: F.cross_entropy(input=x.view(-1, CLASSES), target=target),
        lambda x: nn.CrossEntropyLoss(weight=weight)(x.view(-1, CLASSES), target),
        lambda x: F.nll_loss(x.log_softmax(-1).view(-1, CLASSES), target),
        lambda x: F.cross_entropy(x[0], TARGET[0]),
        lambda x: shifted(x) + shifted(x * 2, reduction="sum") / 7,
    ]
    run(*cases, *on(None, *functions))


def test_the_loss_of_full_logits_is_never_gathered() -> None:
    run(*on(True, lambda x: shifted(x, reduction="none")))

    def counted(rank: int) -> None:
        ranks = Ranks()
        for layout in LAYOUTS.values():
            sequence = ranks.share(layout)
            local = sequence.local_of(random(B, S, W), -2, sequence.lengths).clone().requires_grad_()
            group, before = sequence.holders.ranks, sequence.holders.ranks.moved
            shifted(sequence.wrapped(local, -2)).backward()
            assert group.moved - before == 2 * 8 * (group.size - 1) / group.size, "one number was summed"

    run_ranks(WORLD, counted)


def test_a_loss_of_no_target_is_what_it_is_on_one_process() -> None:
    """NaN for a mean, zero for a sum, without a gradient."""
    none = torch.full((B * S,), -100)
    weight = random(CLASSES, seed=9)
    everything: list[dict[str, Any]] = [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"weight": weight}]
    run(*on(None, *(partial(of_targets, target=none, **options) for options in everything)))


def of_targets(x: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(x.view(-1, CLASSES), target, **options)


def test_targets_that_are_no_classes_are_refused_on_every_rank() -> None:
    def refused(rank: int) -> list[str]:
        ranks, found = Ranks(), []
        for layout in LAYOUTS.values():
            sequence = ranks.share(layout)
            x = sequence.wrapped(sequence.local_of(random(B, S, W), -2, sequence.lengths), -2)
            target = TARGET.clone()
            target[1, 5] = CLASSES  # of one rank alone
            with pytest.raises(IndexError, match="out of bounds"):
                F.cross_entropy(x.view(-1, CLASSES), target.flatten())
            with pytest.raises(ValueError, match="reduction"):
                F.cross_entropy(x.view(-1, CLASSES), TARGET.flatten(), reduction="average")
            with pytest.raises(ValueError, match="batch_size"):
                F.cross_entropy(x.view(-1, CLASSES), TARGET.flatten()[1:])
            found.append("refused")
        return found

    assert run_ranks(WORLD, refused) == [["refused"] * len(LAYOUTS)] * WORLD


def test_losses_in_other_words_are_those_of_one_process() -> None:
    labels = TARGET.clamp(min=0)
    counts = (TARGET != -100).double()
    teacher = random(B, S, CLASSES, seed=5).softmax(-1)
    functions: list[Function] = [
        lambda x: -(F.one_hot(labels, CLASSES) * x.log_softmax(-1)).sum(-1).mul(counts).sum() / counts.sum(),
        lambda x: F.kl_div(x.log_softmax(-1), teacher, reduction="batchmean"),
        lambda x: F.kl_div(x[:, 1:].log_softmax(-1), teacher[:, 1:], reduction="none").sum(-1)[counts[:, 1:] > 0],
        lambda x: (x.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1) * counts).sum(-1),
        lambda x: -((1 - x.softmax(-1)).pow(2) * x.log_softmax(-1)).gather(-1, labels[..., None]).mean(),
        lambda x: F.mse_loss(x, teacher) + F.l1_loss(x[..., 0], counts) + F.smooth_l1_loss(x, teacher, reduction="sum"),
        lambda x: F.binary_cross_entropy_with_logits(x[..., 0], counts, weight=counts + 1),
        lambda x: x.logsumexp(-1).square().mean() + (x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
        lambda x: F.cosine_similarity(x[:, 0], x[:, 1], dim=-1) + F.cosine_similarity(x, teacher, dim=-1).sum(1),
        lambda x: F.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 2]),
        lambda x: F.cross_entropy(F.normalize(x.mean(1), dim=-1) @ F.normalize(x[:, 0], dim=-1).T, torch.arange(B)),
    ]
    run(*on(None, *functions))
