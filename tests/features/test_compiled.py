"""Compiled modules under layouts: equal to one process, or refused before the run.

The backend is "eager": dynamo traces and guards, and no compiler is needed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from features.toys import LANGUAGE, PIPE, VISION, Layout, Run, Toy, assert_same, outcomes, weights
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.layout import Layout as Ranks
from lightning_mm5d.partition.compiled import is_compiled
from lightning_mm5d.plan.plan import Plan


def wrapped(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def in_place(module: Any) -> Any:
    module.compile(backend="eager")
    return module


def _fit(run: Run, compiled: Any) -> Any:
    """Compile layers in the decoder, the encoder as a whole, and a function; train and evaluate."""
    module = Toy()
    for index, layer in enumerate(module.decoder.layers):
        module.decoder.layers[index] = compiled(layer)
    module.encoder = compiled(module.encoder)
    module.helper = torch.compile(F.cross_entropy, backend="eager")
    module.loss = lambda batch: module.helper(module(batch), batch["label"])  # type: ignore[method-assign]
    run.trainer(limit_val_batches=1).fit(module, run.training(16), run.loader(8))
    return weights(module)


def layers_in_wrappers(run: Run) -> Any:
    return _fit(run, wrapped)


def layers_in_place(run: Run) -> Any:
    return _fit(run, in_place)


def test_compiled_layers_and_encoders_equal_one_process() -> None:
    """vision: rank 0; language: ranks 1-2 as stages, with split backwards"""
    for name, found in outcomes(PIPE, layers_in_wrappers, layers_in_place, schedule="zero_bubble").items():
        assert_same(found.ranks[0], found.one, where=name)


class Decorated(Toy):
    @torch.compile(backend="eager")
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch)


def whole(module: Toy) -> Toy:
    module.decoder = wrapped(module.decoder)
    return module


REFUSED = {
    "the language model": (lambda: whole(Toy()), PIPE, "decoder", "Compile the layers"),
    "the module itself": (lambda: in_place(Toy()), PIPE, "model", "'encoder.layers.0'"),
    "its forward": (Decorated, PIPE, "model", "'encoder.layers.0'"),
    "sharded layers": (
        lambda: whole(Toy()),
        Layout({"vision": Modality(**VISION), "language": Modality(tp_size=2, **LANGUAGE)}, 3),
        "decoder",
        "modalities.language.tp_size to 1",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_compiled_over_a_cut_is_refused_before_the_run(what: str) -> None:
    build, layout, field, fix = REFUSED[what]
    ranks = Ranks.build(layout.modalities, world_size=layout.world, loss_modality="language")
    with pytest.raises(ConfigError) as caught:
        Plan.of(build(), ranks, layout.modalities)
    assert caught.value.field == field
    assert fix in caught.value.fix


def test_compilation_is_seen_by_the_names_that_torch_leaves() -> None:
    module = Toy()
    assert not any(is_compiled(part) for part in module.modules())
    assert is_compiled(wrapped(module.encoder))
    assert is_compiled(in_place(module.decoder))
    assert is_compiled(Decorated())
