"""What a modality whose layers are in blocks on a grid is told beside its shards: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_mm5d.tensor_parallel.grid.grid_norms import Norm
from lightning_mm5d.tensor_parallel.grid.grid_shape import GridShape, Kind


@dataclass(frozen=True)
class GridPlan:
    """The layers of one modality on a grid.

    Attributes:
        shape: the grid.
        layers: their paths.
        norms: modules that norm the hidden state, by path: how, or None where they are computed on the full width.
        adapters: the first matrices of low-rank adapters, by path, with what the layer beside them is: ``column`` or
            ``row``.
    """

    shape: GridShape
    layers: tuple[str, ...]
    norms: Mapping[str, Norm | None] = field(default_factory=dict)
    adapters: Mapping[str, Kind] = field(default_factory=dict)

    def holds(self, path: str) -> bool:
        """Whether `path` is in one of the layers."""
        return any(path == layer or path.startswith(f"{layer}.") for layer in self.layers)
