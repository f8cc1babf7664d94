"""A step's own gradient of a parameter that works on parts of sequences is refused; one of hidden states is whole.

Ranks 0-1 share each sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from context_parallel.runs import Stream, steps
from features.toys import Layout, Run, assert_same, outcomes
from lightning_mm5d import Modality
from zoo.handwritten import Layer, OwnLayers

LAYOUT = Layout({"language": Modality(cp_size=2, module=["embedding", "layers", "head"])}, 2)


class AsksOfAWeight(OwnLayers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        (gradient,) = torch.autograd.grad(loss, next(self.layers[1].parameters()), retain_graph=True)
        return loss * (1.0 + gradient.norm().detach())


class AsksOfEmbeddings(OwnLayers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        (gradient,) = torch.autograd.grad(self.loss(ids, embedded := self.embedding(ids)), embedded, retain_graph=True)
        return self.loss(ids, embedded + 0.1 * gradient.sign())

    def loss(self, ids: Tensor, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def weight(run: Run) -> str:
    try:
        steps(run, AsksOfAWeight(partial(Layer, causal=True)), Stream((16, 12)))
    except Exception as error:
        return str(error)
    return ""


def embeddings(run: Run) -> Any:
    return steps(run, AsksOfEmbeddings(partial(Layer, causal=True)), Stream((16, 12)))["losses"]


@pytest.mark.usefixtures("float64")
def test_a_gradient_of_a_weight_within_a_step_is_refused_by_its_name() -> None:
    outcome = outcomes(LAYOUT, weight)["weight"]
    assert not outcome.one
    for said in outcome.ranks:
        assert "torch.autograd.grad(..., layers.1." in said
        assert "each has the gradient of its own part" in said


@pytest.mark.usefixtures("float64")
def test_a_gradient_of_embeddings_within_a_step_is_whole() -> None:
    outcome = outcomes(LAYOUT, embeddings)["embeddings"]
    for losses in outcome.ranks:
        assert_same(losses, outcome.one, 1e-9, "losses")
