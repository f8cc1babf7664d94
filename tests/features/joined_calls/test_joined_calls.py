"""One call of an encoder for several microbatches gives the numbers of one process, and is one call."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

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
from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.sharded.torch_internals import in_backward

ONE = Layout({"vision": Modality(colocate_with="language.0", **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 2)
"""vision and the first stage of language: rank 0; the second: rank 1"""
SHARDED = Layout({"vision": Modality(tp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)
"""vision: ranks 0-1; language: rank 2"""
EYES = Layout({"vision": Modality(dp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)
"""two encoder replicas, which take turns with microbatches: ranks 0-1; language: rank 2"""


SEEN = Counter[Any]()


class Watched(Toy):
    """Notes how many images the encoder computes at a time, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.patch.register_forward_hook(self._note)

    def _note(self, _: Any, __: Any, hidden: Tensor) -> None:
        if hidden.requires_grad and not in_backward():
            SEEN["forward", len(hidden)] += 1
            hidden.register_hook(lambda gradient: SEEN.update([("backward", len(gradient))]))


class Frozen(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)


class Dependent(Toy):
    """Its encoder computes with all images of a call, so that calls are not joined."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.projector.register_forward_hook(lambda _, __, out: out - out.mean(0))


def fit(
    run: Run, made: Callable[[], Any] = Watched, **fields: Any
) -> tuple[dict[str, Tensor], list[str], Counter[Any]]:
    if run.layout is not None:
        modalities = run.layout.modalities
        vision = with_fields(modalities["vision"], **{"microbatches_per_call": 2, **fields})
        run = replace(run, layout=replace(run.layout, modalities={**modalities, "vision": vision}))
        run = replace(run, options={"num_microbatches": 4, **run.options})
    torch.manual_seed(5)
    SEEN.clear()
    module = made()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.trainer(max_epochs=2).fit(module, run.training())
    texts = [str(one.message) for one in told if "microbatches_per_call" in str(one.message)]
    return weights(module), texts, Counter(SEEN)


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
    """ranks as the layout says; each step has four microbatches of two images, or of fewer with replicas"""
    layout, options = CASES[name]
    expected, *_ = alone(fit)
    found = together(layout, fit, **options)
    assert_same(found[0][0], expected)
    seen = found[0][2]
    assert not [text for _, texts, _ in found for text in texts]
    calls = 4 if name in ("replicas", "turns") else 8
    # hooks in an encoder also see stand-ins of it, in another stage of its rank
    found_calls = {key: count for key, count in seen.items() if key != ("forward", 2)}
    assert found_calls == {("forward", 4): calls, ("backward", 4): calls}


def several(run: Run) -> Any:
    found = []
    for fields in (
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": {"items": 2}},
        {"zero_stage": 1},
        {"microbatches_per_call": 4},
    ):
        found.append(fit(run, **fields)[0])
    found.append(fit(run, Frozen)[0])
    return found


def dependent(run: Run) -> Any:
    return fit(run, Dependent), fit(run, Dependent, microbatches_per_call=1)


def several_dp(run: Run) -> Any:
    return [fit(run, zero_stage=stage)[0] for stage in (1, 2, 3)]


def test_other_fields_of_the_encoder() -> None:
    """vision: rank 0; language: rank 1"""
    expected = alone(several)
    assert_same(together(PAIR, several)[0], expected)


def test_shared_states() -> None:
    """two replicas of everything: ranks 0-1"""
    expected = alone(several_dp)
    assert_same(together(SHARED, several_dp, num_microbatches=2)[0], expected)


def test_calls_whose_rows_depend_on_each_other_are_made_one_by_one_with_a_warning() -> None:
    """vision: rank 0; language: rank 1"""
    (joined, told, _), (single, *_) = together(PAIR, dependent)[0]
    assert_same(joined, single)
    assert any("together" in text for text in told)
