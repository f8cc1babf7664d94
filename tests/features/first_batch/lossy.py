"""Losses of the toy, of which some are no mean of what microbatches give, and what is then told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from features.toys import CLASSES, Toy


def _mean(module: Toy, batch: Any) -> Tensor:
    return module.loss(batch)


def _sum(module: Toy, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch), batch["label"], reduction="sum")


def _weighted(module: Toy, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch), batch["label"], weight=torch.arange(1.0, 1.0 + CLASSES).double())


def _unlabelled(module: Toy, batch: Any) -> Tensor:
    """One microbatch has no label, and a loss of NaN."""
    return F.cross_entropy(module(batch), torch.where(batch["images"][:, 0] < 9, batch["label"], -100))


def _pairs(module: Toy, batch: Any) -> Tensor:
    logits = module(batch)
    return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def _counts(module: Any, batch: Any) -> Tensor:
    module.seen = getattr(module, "seen", 0) + 1
    return module.loss(batch) * module.seen


def _noisy_sum(module: Toy, batch: Any) -> Tensor:
    images = batch["images"] + 0.1 * torch.randn_like(batch["images"])
    return F.cross_entropy(module({**batch, "images": images}), batch["label"], reduction="sum")


def _numpy_sum(module: Toy, batch: Any) -> Tensor:
    return _sum(module, batch) * np.random.rand()


def _of_four(module: Toy, batch: Any) -> Tensor:
    return _mean(module, {**batch, "images": batch["images"].view(4, -1)})


def _writes_to_the_batch(module: Toy, batch: Any) -> Tensor:
    batch["images"].mul_(0.5)
    return _mean(module, batch)


def _adapts(module: Toy, batch: Any) -> Tensor:
    """The loss after a step of the head on the first half of the samples, as in meta learning (MAML)."""
    half, weights = len(batch["label"]) // 2, dict(module.decoder.named_parameters())
    features = module.encoder(batch["images"])
    support = module.decoder(batch["tokens"][:half], features[:half])
    (slope,) = torch.autograd.grad(
        F.cross_entropy(support, batch["label"][:half]), [weights["head.weight"]], create_graph=True
    )
    weights["head.weight"] = weights["head.weight"] - 2.0 * slope
    query = functional_call(module.decoder, weights, (batch["tokens"][half:], features[half:]))
    return F.cross_entropy(query, batch["label"][half:])


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "a mean": _mean,
    "a mean with dropout": _mean,
    "a sum": _sum,
    "a sum with dropout": _sum,
    "a mean by weights of classes": _weighted,
    "a mean over labels, of which one microbatch has none": _unlabelled,
    "a loss over pairs": _pairs,
    "a loss by a counter": _counts,
    "a loss of adapted weights": _adapts,
    "a sum with noise": _noisy_sum,
    "a sum with numbers of numpy": _numpy_sum,
    "code for four samples": _of_four,
    "a step that writes to its batch": _writes_to_the_batch,
}
TOLD = {
    "a sum": "It is a sum",
    "a sum with dropout": "It is a sum",
    "a mean by weights of classes": "loss_weight=function",
    "a mean over labels, of which one microbatch has none": "loss_weight=function",
    "a loss over pairs": "set num_microbatches: 1",
    "a loss by a counter": "set num_microbatches: 1",
    "a loss of adapted weights": "set num_microbatches: 1",
}
