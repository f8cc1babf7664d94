"""What code touches between the members of a list that it calls in a loop."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from lightning_mm5d.source.order import accessed_between


class Body(nn.Module):
    """The modules that all loops here use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(2) for _ in range(2))
        self.mixes = nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
        self.norm, self.head = nn.LayerNorm(2), nn.Linear(2, 2)
        self.gate = nn.Parameter(nn.Linear(2, 2).weight.detach())


class Zips(Body):
    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(norm(x))
        return self.head(self.norm(x))


class Enumerates(Body):
    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, layer in enumerate(self.layers):
            if index:
                x = x + self.mixes[str(index)](x)
            x = layer(x)
            kept.append(self.norm(x))
        return self.head(kept[-1])


class Counts(Body):
    def forward(self, x: Tensor) -> Tensor:
        for index in range(len(self.layers)):
            before = x * self.gate[index]
            x = self.layers[index](before)
            states = self.norm(x)
        return self.head(states)


class Helps(Body):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.mixed(layer(x), x)
        return self.head(self.norm(x))

    def mixed(self, new: Tensor, old: Tensor) -> Tensor:
        return old + new @ self.gate


class Writes(Body):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.add_(self.norm(x))
        for norm in self.norms:
            x = norm(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("module", "between"),
    [
        (Zips, {"norms", "layers"}),
        (Enumerates, {"mixes", "layers"}),
        (Counts, {"gate", "layers"}),
        (Helps, {"gate", "mixed", "layers"}),
        (Writes, {"norm", "layers"}),
        (Body, set()),
    ],
)
def test_what_makes_the_inputs_of_layers_in_a_loop_is_told_from_what_only_uses_their_results(
    module: type[Body], between: set[str]
) -> None:
    assert accessed_between(module(), "forward", "layers") == between


def test_a_loop_over_other_modules_tells_nothing() -> None:
    assert accessed_between(Zips(), "forward", "mixes") == set()
