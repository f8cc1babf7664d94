"""Losses that a user writes over the logits give what they give on one process, whatever is sharded."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mm5d import vocabulary_shard
from tensor_parallel.layouts import Compared, check_all

TP = {"tp_size": 2}


def preference(logits: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    """A log-likelihood, a penalty of the normaliser, and a distillation from shifted logits."""
    likely = (logits * scale).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    other = F.softmax(logits.detach().roll(1, 1), dim=-1)
    distance = (other * (other.clamp(min=1e-9).log() - F.log_softmax(logits, dim=-1))).sum(-1)
    return distance.mean() - F.logsigmoid(likely).mean() + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def over_shards(logits: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    """A cross entropy with a trained scale."""
    shard = vocabulary_shard(logits)
    local = shard.logits * shard.copy(scale)
    top = shard.max(local.amax(-1))
    normaliser = shard.sum((local - top.unsqueeze(-1)).exp().sum(-1)).log() + top
    held = (labels >= shard.start) & (labels < shard.stop)
    places = (labels - shard.start).clamp(0, shard.stop - shard.start - 1)
    likely = torch.where(held, local.gather(-1, places.unsqueeze(-1)).squeeze(-1), 0.0)
    return (normaliser - shard.sum(likely)).mean()


class _Scored:
    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch["input_ids"]
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return self.loss(self.model(**inputs, **self.fixed).logits, labels, self.scale)


def scored(module: L.LightningModule, loss: Any) -> None:
    module.scale = nn.Parameter(torch.tensor(1.2))
    module.loss = loss
    cls = type(module)
    module.__class__ = type(cls.__name__, (_Scored, cls), {})


def by_preference(module: L.LightningModule) -> None:
    scored(module, preference)


def by_shards(module: L.LightningModule) -> None:
    scored(module, over_shards)


WAYS: dict[str, dict[str, Any]] = {
    "tp": TP,
    "sequence shards": {**TP, "sequence_parallel": True},
    "fused head": {**TP, "fused_linear_cross_entropy": True},
    "cp": {"cp_size": 2},
    "pp": {"pp_size": 2},
}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_more_losses_of_ones_own_equal_one_process() -> None:
    """language: ranks 0-1; then ranks 0-3, tensor parallel and with half of the tokens each."""
    pairs = [(by_preference, TP), (by_shards, {**TP, "sequence_parallel": True}), (by_shards, {"pp_size": 2})]
    check_all(2, *(Compared(name="llama", fields={"language": one}, prepare=prepare) for prepare, one in pairs))
    check_all(4, Compared(name="llama", fields={"language": {**TP, "cp_size": 2}}, prepare=by_preference))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("prepare", "way"),
    [
        (by_preference, "sequence shards"),
        pytest.param(by_preference, "fused head", marks=pytest.mark.exhaustive),
        pytest.param(by_preference, "cp", marks=pytest.mark.exhaustive),
        (by_preference, "pp"),
        pytest.param(by_shards, "tp", marks=pytest.mark.exhaustive),
        (by_shards, "fused head"),
        (by_shards, "cp"),
    ],
)
def test_losses_of_ones_own_equal_one_process(prepare: Any, way: str) -> None:
    """language: ranks 0-1, in tensor parallel shards of uneven vocabularies, as stages, or sharing tokens."""
    check_all(2, Compared(name="llama", fields={"language": WAYS[way]}, prepare=prepare))


@pytest.mark.usefixtures("float64")
def test_losses_of_ones_own_over_three_shards_equal_one_process() -> None:
    """language: ranks 0-2."""
    check_all(3, Compared(name="llama", fields={"language": {"tp_size": 3}}, prepare=by_preference))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_losses_of_ones_own_over_shared_tokens_equal_one_process() -> None:
    """language: ranks 0-3, two shards for each half of the tokens."""
    fields = {"language": {**TP, "cp_size": 2}}
    check_all(4, Compared(name="llama", fields=fields, prepare=by_shards))
