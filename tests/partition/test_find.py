"""Modalities that are found by path."""

from __future__ import annotations

import pytest

from features.toys import LANGUAGE, Toy
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.partition import partition


@pytest.mark.parametrize("field", ["module", "boundary"])
def test_a_list_of_layers_is_no_module_that_is_called(field: str) -> None:
    """Nothing calls the list itself, so the modality would pass its input on without its layers."""
    modalities = {"vision": Modality(**{field: "encoder.layers"}), "language": Modality(**LANGUAGE)}
    with pytest.raises(ConfigError, match=rf"modalities.vision.{field}: got 'encoder.layers'.*Name .* 'encoder'"):
        partition(Toy(), modalities)
