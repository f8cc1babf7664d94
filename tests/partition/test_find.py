"""Modalities that are found by path."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from features.toys import LANGUAGE, Toy
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.partition import partition


@pytest.mark.parametrize(
    ("container", "fix"),
    [
        (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), r"all its members, \['encoder.a', 'encoder.b'\]"),
        (nn.ParameterList([torch.ones(2)]), "Move the code that uses them into the forward of a module"),
    ],
)
def test_a_container_without_a_module_around_it_is_told_what_would_work(container: nn.Module, fix: str) -> None:
    module = Toy()
    module.encoder = container
    with pytest.raises(ConfigError, match=rf"modalities.vision.module: got 'encoder'.*{fix}"):
        partition(module, {"vision": Modality(module="encoder"), "language": Modality(**LANGUAGE)})


@pytest.mark.parametrize("field", ["module", "boundary"])
def test_a_list_of_layers_is_no_module_that_is_called(field: str) -> None:
    """Nothing calls the list itself, so the modality would pass its input on without its layers."""
    modalities = {"vision": Modality(**{field: "encoder.layers"}), "language": Modality(**LANGUAGE)}
    with pytest.raises(ConfigError, match=rf"modalities.vision.{field}: got 'encoder.layers'.*Name .* 'encoder'"):
        partition(Toy(), modalities)
