"""Batches and folders that do not fit a composed model are refused, also where all numbers add up by chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mm5d import CheckpointUntrustedError, ConfigError, MultimodalConfig, MultimodalModel
from models.composed import IDS, batch, build


def test_features_of_an_item_never_come_to_another_sample() -> None:
    model = build("two").model
    given = batch(model, {"vision": [2, 0, 1], "audio": [0, 1, 1]})
    moved = given["input_ids"].clone()
    moved[1, (moved[1] == IDS["audio"]).nonzero()[0, 0]] = 9
    moved[0, 30] = IDS["audio"]  # as many placeholders as before
    wrong: dict[str, dict[str, Any]] = {
        r"sample 0.*vision_items says \[1, 1, 1\]": {"vision_items": torch.tensor([1, 1, 1])},
        r"vision_items says \[2, 0\]": {"vision_items": torch.tensor([2, 0])},
        r"1 tokens of id 2 in sample 0.*audio_items says \[0, 1, 1\]": {"input_ids": moved},
        r"items have \[3, 3\] features, so some of an item": {"input_ids": moved, "audio_items": None},
    }
    for message, change in wrong.items():
        with pytest.raises(ConfigError, match=message):
            model(**{**given, **change})
    model(**{**given, "audio_items": None, "vision_items": None})
    model.encoders["vision"].after = lambda items: [item * item.sum().item() for item in items]  # needs its data
    model(**given)


def test_placeholders_without_items_are_no_text_for_generation() -> None:
    model = build("clip mlp").model.eval()
    given = {key: value for key, value in batch(model, {"vision": [1, 0]}).items() if key != "labels"}
    with pytest.raises(ConfigError, match="Pass the inputs of the vision encoder"):
        model.generate(**{**given, "pixel_values": None}, max_new_tokens=1)
    text = {key: given[key][1:] for key in ("input_ids", "attention_mask")}
    assert model.generate(**text, max_new_tokens=2).shape[1] > text["input_ids"].shape[1]


def test_inputs_take_the_dtype_of_their_encoder() -> None:
    model = build("two").model.eval().bfloat16()
    given = batch(model, {"vision": [1], "audio": [1]})
    floats = [key for key in given if given[key].is_floating_point()]
    rounded = {key: given[key].bfloat16() if key in floats else given[key] for key in given}
    assert torch.equal(model(**given).logits, model(**rounded).logits)


def _hostile(model: MultimodalModel, where: str, path: Any) -> None:
    fields = model.config.to_dict()
    if where == "language_model_class":
        fields[where] = path
    elif where == "projector":
        fields["encoders"]["vision"][where] = {"class": path, "config": {}}
    else:
        fields["encoders"]["vision"][where] = path
    MultimodalModel(MultimodalConfig.from_dict(fields))


HOSTILE = {
    "a class that is no model": ("model_class", "lightning.pytorch.trainer.trainer:Trainer", "no PreTrainedModel"),
    "a function that acts": ("model_class", "torch.hub:load", "no PreTrainedModel"),
    "a module that is no language model": ("language_model_class", "torch.nn.modules.linear:Linear", "no PreTrained"),
    "a projector that is no module": ("projector", "lightning.pytorch.trainer.trainer:Trainer", "no Module"),
    "a callback that is a class": ("after", "lightning.pytorch.trainer.trainer:Trainer", "no function"),
    "a path outside of packages": ("after", "..evil:run", "no import path"),
    "a path that is no text": ("model_class", ["os"], "no import path"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_folder_builds_nothing_but_models_and_modules(case: str) -> None:
    where, path, message = HOSTILE[case]
    with pytest.raises(CheckpointUntrustedError, match=message):
        _hostile(build("clip mlp").model, where, path)
