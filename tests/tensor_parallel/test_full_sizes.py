"""An error of torch about sizes in a module whose projections ranks share becomes one that names them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.tensor_parallel.apply import explained
from lightning_mm5d.tensor_parallel.resolve import Division

DIVISION = Division(
    roles={"layers.0.up": "column", "layers.0.down": "row"},
    groups={"layers.0.up": "language", "layers.0.down": "language"},
)


class Layer(nn.Module):
    """Has this rank's half of `up` and `down`, and code for the full width of 8."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.use = nn.Linear(8, 4), nn.Linear(4, 8), nn.LayerNorm(8), use

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.use == "view":
            return self.down(y.view(*x.shape))
        if self.use == "sum":
            return self.down(y + x)
        if self.use == "rows":
            return self.down(y.reshape(-1, 8))
        if self.use == "norm":
            return self.down(self.norm(y))
        raise RuntimeError("of the user's own")


class Model(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(use)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x).view(7, 7)


def _error(use: str) -> ConfigError | None:
    model = Model(use)
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(2, 3, 8))
    return explained(caught.value, model, DIVISION, shares=True)


@pytest.mark.parametrize("use", ["view", "sum", "rows", "norm"])
def test_code_that_takes_the_full_width_is_named_with_its_shared_projections_and_what_works(use: str) -> None:
    found = _error(use)
    assert found is not None
    for part in ("layers.0: got", "share the outputs of up,", "TensorParallelPlan", "modalities.language.tp_size to 1"):
        assert part in str(found)


def test_other_errors_and_those_around_such_a_module_stay_as_they_are() -> None:
    assert _error("raise") is None
    outside = Model("raise")
    outside.layers[0] = nn.Identity()
    with pytest.raises(RuntimeError, match="invalid for input") as caught:
        outside(torch.zeros(2, 3, 8))
    assert explained(caught.value, outside, Division(roles={"up": "row"}), shares=True) is None
