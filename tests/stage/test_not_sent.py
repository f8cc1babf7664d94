"""What stands for a value that cannot cross to other ranks raises our error, also inside of functions of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_mm5d.stage.payload import NotSent
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
