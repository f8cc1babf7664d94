"""What recomputation costs, where its layers lie after a cut, and what it refuses of a model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from features.toys import LANGUAGE, VISION, Toy
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.partition import partition


def cut(said: Any, **sizes: Any) -> Any:
    return partition(
        Toy(),
        {
            "vision": Modality(**VISION),
            "language": Modality(memory={"activation_checkpointing": said}, **sizes, **LANGUAGE),
        },
    )


def shares(said: Any, **sizes: Any) -> list[float]:
    rows = cut(said, **sizes).units
    return [unit.recomputed for key, row in rows.items() if key.modality == "language" for unit in row][1:-1]


def test_a_layer_that_runs_again_costs_a_forward_more() -> None:
    assert shares("none") == [0.0] * 4
    assert shares("full") == [1.0] * 4
    assert shares({"every": 2}) == [0, 1, 0, 1]
    assert shares({"selective": ["aten.bmm"]}) == [1.0] * 4
    assert all(0 < share < 0.5 for share in shares("selective"))


def test_stages_say_for_themselves_what_they_compute_again() -> None:
    found = cut({"per_stage": ["full", "none"]}, pp_size=2)
    first = found.stages["language"][0].last
    assert [one is not None for one in found.kept_operations["language"]] == [True] * first + [False] * (4 - first)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ({"layers": [4]}, "The nearest to 4 is 3"),
        ({"every": 5}, "Use at most 4"),
        ({"selective": ["aten.mmm"]}, "Did you mean 'aten.mm'"),
    ],
)
def test_what_the_model_does_not_have_is_refused(said: Any, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cut(said)
    assert advice in str(caught.value)


def test_a_modality_without_layers_is_refused_by_name() -> None:
    root = nn.Module()
    root.head = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"modalities\.language\.memory\.activation_checkpointing.*no list of layers"):
        partition(root, {"language": Modality(memory={"activation_checkpointing": "full"})})
