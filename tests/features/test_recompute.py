"""Activation checkpointing of the user's own, and Hugging Face's, under a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from features.toys import PIPE, Layout, Run, Toy, alone, assert_same, outcomes, together, weights
from lightning_mm5d import Modality
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
