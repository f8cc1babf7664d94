"""Where tensors come from: a checkpoint, a folder of weights or a state dict in memory, read by name and in parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Region = Sequence[tuple[int, int]]  # one (start, stop) for each dim of the full tensor


class TensorSource(Protocol):
    """Named tensors that are read in parts."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor; raise KeyError for an unknown name."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the full tensor; raise KeyError for an unknown name."""

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return the full tensor, or its `region`; the result may share memory with the source."""


class StateDictSource:
    """The tensors of a state dict in memory; other values have no name here.

    Args:
        state: by name; read when a tensor is asked for.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def names(self) -> list[str]:
        """Return the names of all tensors, in the order of the state dict."""
        return [name for name, value in self._state.items() if isinstance(value, Tensor)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the full tensor."""
        return self._tensor(name).dtype

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return the tensor itself, detached, or a view of its `region`."""
        tensor = self._tensor(name).detach()
        if region is None:
            return tensor
        bounds = checked_region(region, tuple(tensor.shape), name)
        return tensor[tuple(slice(start, stop) for start, stop in bounds)]

    def _tensor(self, name: str) -> Tensor:
        value = self._state[name]
        if not isinstance(value, Tensor):
            raise KeyError(name)
        return value


def checked_region(region: Region | None, shape: tuple[int, ...], name: str) -> list[tuple[int, int]]:
    """Return `region` as a list, the whole tensor for None.

    Raises:
        ValueError: the region lies outside of `shape`, or has another number of dims.
    """
    if region is None:
        return [(0, length) for length in shape]
    bounds = [(int(start), int(stop)) for start, stop in region]
    inside = all(0 <= start <= stop <= length for (start, stop), length in zip(bounds, shape, strict=False))
    if len(bounds) != len(shape) or not inside:
        raise ValueError(f"the region {bounds} does not lie in the tensor {name!r} of shape {list(shape)}")
    return bounds
