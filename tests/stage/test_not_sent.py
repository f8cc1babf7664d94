"""What stands for a value that cannot cross to other ranks raises our error, also inside of functions of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_mm5d.stage.payload import NotSent, Packer, with_sendable_fields
from lightning_mm5d.stage.view import StageError


@pytest.mark.parametrize(
    "use",
    [
        lambda value: torch.cat([torch.zeros(1), value]),
        lambda value: torch.stack((value,)),
        lambda value: torch.zeros(1) + value,
        lambda value: torch.nn.functional.softmax(input=value, dim=0),
        float,
    ],
)
def test_any_use_names_the_value(use: Callable[[Any], Any]) -> None:
    with pytest.raises(StageError, match=r"self\.features cannot be sent to other ranks"):
        use(NotSent("self.features"))


class DynamicCache:
    """Stands for one of transformers."""


def test_the_error_names_the_field_and_what_to_do() -> None:
    tree = [None, {"outputs": [{"logits": torch.zeros(1), "past_key_values": DynamicCache()}]}]
    with pytest.raises(ValueError, match=r"DynamicCache in 'outputs\.past_key_values' cannot.*with use_cache=False"):
        Packer().describe(tree)
    with pytest.raises(ValueError, match="a value of type object cannot be sent to other ranks; tensors") as caught:
        Packer().describe(object())
    assert "use_cache" not in str(caught.value)


def test_of_a_result_only_fields_that_cannot_cross_are_replaced() -> None:
    whole = {"logits": torch.zeros(1)}
    assert with_sendable_fields("model", whole) is whole
    sent = with_sendable_fields("model", {**whole, "past_key_values": DynamicCache()})
    assert sent["logits"] is whole["logits"]
    with pytest.raises(StageError, match=r"model\(\)\.past_key_values, of type DynamicCache, cannot be sent"):
        sent["past_key_values"].get_seq_length()
