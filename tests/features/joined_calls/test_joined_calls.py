"""One call of an encoder for several microbatches gives the numbers of one process, and is one call."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from features.toys import (
    LANGUAGE,
    PAIR,
    PIPE,
    SHARED,
    TWINS,
    VISION,
    Layout,
    Run,
    Toy,
    alone,
    assert_same,
    together,
    weights,
)
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.sharded.torch_internals import in_backward

ONE = Layout({"vision": Modality(colocate_with="language.0", **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 2)
"""vision and the first stage of language: rank 0; the second: rank 1"""
SHARDED = Layout({"vision": Modality(tp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)
"""vision: ranks 0-1; language: rank 2"""
EYES = Layout({"vision": Modality(dp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)
"""two encoder replicas, which take turns with microbatches: ranks 0-1; language: rank 2"""


class Watched(Toy):
    """Notes how many images the encoder computes at a time, and in which backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[Any]()
        self.encoder.patch.register_forward_pre_hook(self._forward)
        self.encoder.patch.weight.register_hook(lambda _: self._seen().update(["backward"]))

    def _seen(self) -> Counter[Any]:
        return self.seen

    def _forward(self, _: Any, args: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self.seen[len(args[0])] += 1


class Frozen(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)


def fit(run: Run, made: Callable[[], Any] = Watched, **fields: Any) -> tuple[dict[str, Tensor], list[str]]:
    if run.layout is not None:
        modalities = run.layout.modalities
        vision = with_fields(modalities["vision"], **{"microbatches_per_call": 2, **fields})
        run = replace(run, layout=replace(run.layout, modalities={**modalities, "vision": vision}))
        run = replace(run, options={"num_microbatches": 4, **run.options})
    torch.manual_seed(5)
    module = made()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.trainer(max_epochs=2).fit(module, run.training())
    texts = [str(one.message) for one in told if "microbatches_per_call" in str(one.message)]
    return weights(module), texts


CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "pair": (PAIR, {}),
    "pipe": (PIPE, {}),
    "zero bubble": (PIPE, {"schedule": "zero_bubble"}),
    "twins": (TWINS, {"num_microbatches": 2}),
    "replicas": (SHARED, {"num_microbatches": 2}),
    "colocated": (ONE, {}),
    "colocated zbv": (ONE, {"schedule": "zbv"}),
    "sharded": (SHARDED, {}),
    "turns": (EYES, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(name: str) -> None:
    """ranks as the layout says"""
    layout, options = CASES[name]
    expected, _ = alone(fit)
    for got, told in together(layout, fit, **options):
        assert not told
        break
    assert_same(got, expected)
