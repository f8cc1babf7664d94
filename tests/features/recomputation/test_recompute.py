"""Activation checkpointing of the user's own, and Hugging Face's, under a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from features.toys import PIPE, SHARED, Layout, Run, Toy, alone, assert_same, outcomes, together, weights
from lightning_mm5d import Modality
from lightning_mm5d.config.groups import with_fields
from parity.harness import Batches
from zoo import CASES

LLAVA = Layout({"vision": Modality(), "language": Modality(pp_size=2)}, 3)


class Recomputed(Toy):
    """The whole encoder, and each layer of the decoder, are computed again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        for part in (*self.encoder.layers, *self.decoder.layers):
            inner = part.forward
            part.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=self.use_reentrant)


def fit(run: Run, module: Any) -> Any:
    run.trainer(max_epochs=2).fit(module, run.training())
    return weights(module)


def plain(run: Run) -> Any:
    return fit(run, Toy())


def recomputed(run: Run) -> Any:
    return fit(run, Recomputed(use_reentrant=False))


def recomputed_reentrant(run: Run) -> Any:
    return fit(run, Recomputed(use_reentrant=True))


def test_layers_that_are_computed_again_give_the_same_weights() -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    found = outcomes(PIPE, plain, recomputed, recomputed_reentrant)
    for outcome in found.values():
        assert_same(outcome.ranks[0], found["plain"].one)


def llava(run: Run, **options: Any) -> Any:
    case = CASES["llava"]
    module = case.build()
    if run.layout is not None:
        module.model.gradient_checkpointing_enable(**options)
    batches = [case.batch(4, seed) for seed in (1, 2)]
    trainer = run.trainer(use_distributed_sampler=False)
    trainer.fit(module, DataLoader(Batches(batches), batch_size=None))
    return weights(module)


def both_kinds(run: Run) -> Any:
    kinds = [{"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}} for reentrant in (False, True)]
    return [llava(run), *[llava(run, **kind) for kind in kinds]]


@pytest.mark.usefixtures("float64")
def test_gradient_checkpointing_of_transformers_gives_the_same_weights() -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    expected = alone(llava)
    for got in together(LLAVA, both_kinds)[0]:
        assert_same(got, expected, 1e-6)


def kinds(run: Run) -> Any:
    """Losses and weights with each kind, in the same layout, with dropout."""
    found = []
    for kind in ("none", "full", "selective", {"every": 2}, {"fraction": 0.3}, {"layers": [0]}):
        assert run.layout is not None
        chosen = {name: with_fields(one, activation_checkpointing=kind) for name, one in run.layout.modalities.items()}
        torch.manual_seed(5)
        found.append(fit(replace(run, layout=replace(run.layout, modalities=chosen)), Toy(dropout=0.2)))
    return found


@pytest.mark.parametrize(
    ("layout", "options"), [(SHARED, {"num_microbatches": 1}), (PIPE, {"schedule": "zero_bubble"})], ids=["dp", "pp"]
)
def test_every_kind_gives_the_same_bits_as_none(layout: Layout, options: dict[str, Any]) -> None:
    """Two replicas on ranks 0-1; or vision on rank 0 and language on ranks 1-2 as stages."""
    expected, *others = together(layout, kinds, **options)[0]
    for got in others:
        assert all(torch.equal(got[name], expected[name]) for name in expected)
