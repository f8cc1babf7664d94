"""Where the language model is cut off from what runs after it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from features.speaking import Drawing, Speaking
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.partition import partition

VISION = Modality(module="model.thinker.visual")


def test_a_talker_is_found_and_the_language_model_is_cut_at_the_call_of_the_step() -> None:
    found = partition(Speaking(), {"vision": VISION, "language": Modality(), "talker": Modality()})
    assert found.loss_modality == "talker"
    assert [cut.name for cut in found.encoders["language"].boundaries] == ["model.thinker"]
    assert found.layers["language"] == "model.thinker.layers"
    owners = {name: [str(key) for key in keys] for name, keys in found.owners.items()}
    assert owners["model.thinker.lm_head.weight"] == ["language.0"]
    assert owners["model.thinker.visual.patch.weight"] == ["vision.0"]
    assert owners["bridge.weight"] == owners["model.talker.codec_head.weight"] == ["talker.0"]


def test_what_the_step_computes_between_two_of_them_is_held_by_each_that_may_need_it() -> None:
    painter = Modality(module="model.painter", feeds_from="language")
    both = {"vision": VISION, "language": Modality(), "painter": painter, "talker": Modality()}
    owners = {name: [str(key) for key in keys] for name, keys in partition(Drawing(), both).owners.items()}
    assert owners["time.weight"] == ["painter.0", "talker.0"]


class Early(Speaking):
    """Calls its talker before the language model."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        codes = self.model.talker(self.bridge(self.model.thinker.embedding(batch["tokens"])))
        out = self.model.thinker(batch["tokens"], batch["images"], batch["label"])
        return out["loss"] + codes.sum()


class Silent(Speaking):
    """Has a talker that no code uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = self.model.talker
        del self.model.talker


@pytest.mark.parametrize(
    ("module", "talker", "error"),
    [
        (Early(), {}, r"modalities.talker.feeds_from: got 'language'.*uses model.talker before model.thinker alone"),
        (Silent(), {"module": "spare", "feeds_from": "language"}, r"modalities.talker.module: got 'spare'.*Nothing"),
        (Silent(), {}, r"modalities.talker: got 'talker'.*No such modality"),
    ],
)
def test_a_talker_that_cannot_feed_from_the_language_model_is_refused(
    module: Any, talker: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        partition(module, {"vision": VISION, "language": Modality(), "talker": Modality(**talker)})
