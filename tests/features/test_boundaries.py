"""Encoders whose results are used in several places.

vision: rank 0; language: ranks 1-2 as stages.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from features.toys import PIPE, VISION, Layout, Run, Toy, assert_same, outcomes, weights
from lightning_mm5d import Modality


class Twice(Toy):
    """The encoder is called before the layers, and again after them; the first stage ends between the two."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss + self.encoder(2 * batch["images"]).pow(2).mean()


def twice(run: Run) -> Any:
    module = Twice()
    run.trainer(max_epochs=1).fit(module, run.training(16), run.loader(8))
    return {"weights": weights(module)}


@pytest.mark.parametrize("feeds", ["all", [0, 1]])
def test_a_result_may_be_used_in_a_later_stage_only(feeds: Any) -> None:
    layout = Layout({**PIPE.modalities, "vision": Modality(feeds=feeds, **VISION)}, 3)
    found = outcomes(layout, twice)["twice"]
    assert_same(found.ranks[0]["weights"], found.one["weights"])
