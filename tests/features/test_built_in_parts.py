"""Modules built in `configure_model` are those of one process, on all layouts, from the first weight on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from features.built_in_parts import Copied, Late, Mixed, trained
from features.toys import PAIR, PIPE, SHARED, TWINS, Outcome, assert_same, outcomes

LAYOUTS = {"pair": PAIR, "pipe": PIPE, "twins": TWINS, "shared": SHARED}
KINDS = (Late, Mixed, Copied)


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    scenarios: list[Any] = [partial(trained, kind=kind) for kind in KINDS]
    for kind, scenario in zip(KINDS, scenarios, strict=True):
        scenario.__name__ = kind.__name__
    return outcomes(LAYOUTS[request.param], *scenarios)


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_each_rank_begins_with_its_part_of_the_weights_of_one_process_bit_by_bit(
    found: dict[str, Outcome], kind: str
) -> None:
    one, held = found[kind].one["start"], set[str]()
    for rank in found[kind].ranks:
        for name, value in rank["start"].items():
            if not bool(value.isnan().all()):
                assert torch.equal(value, one[name]), name
                held.add(name)
    assert held == one.keys()


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_training_gives_the_weights_of_one_process(found: dict[str, Outcome], kind: str) -> None:
    assert_same(found[kind].ranks[0]["end"], found[kind].one["end"])


def test_random_numbers_go_on_as_in_one_process(found: dict[str, Outcome]) -> None:
    for kind in KINDS:
        for rank in found[kind.__name__].ranks:
            assert torch.equal(rank["state"], found[kind.__name__].one["state"])
