"""How a tensor of a model comes from tensors in files: read as they are, cut, joined, turned or cast.

A model's parameter is seldom one stored tensor: experts are stacked, projections are fused or split, dtypes are
cast. A `Recipe` holds these steps and no data. Its `read` takes a region of the result, one ``(start, stop)`` for
each dim, and asks every step for the region that it needs, so that a shard costs about its own bytes. Steps that mix
elements over a whole tensor (`Reshaped` in part, `Computed`) read their sources in full.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.storage.source import Region
from lightning_mm5d.storage.tensor_file import TensorFile


@dataclass(frozen=True, eq=False)
class Recipe(ABC):
    """A tensor that can be read in part.

    Args:
        shape: the full shape.
        dtype: the dtype of what `read` returns.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, region: Region | None = None) -> Tensor:
        """Return the elements in `region` as a contiguous tensor, or all elements."""
        whole = [(0, size) for size in self.shape]
        return self._read(whole if region is None else [*region]).contiguous()

    @abstractmethod
    def _read(self, region: list[tuple[int, int]]) -> Tensor: ...

    @property
    @abstractmethod
    def sources(self) -> tuple[Recipe, ...]:
        """The recipes that this one reads."""

    def stored(self) -> Iterator[Stored]:
        """All tensors in files that take part."""
        for source in self.sources:
            yield from source.stored()


@dataclass(frozen=True, eq=False)
class Stored(Recipe):
    """A tensor as it lies in a file."""

    file: TensorFile
    name: str

    @property
    def sources(self) -> tuple[Recipe, ...]:
        return ()

    def _read(self, region: list[tuple[int, int]]) -> Tensor:
        return self.file.read(self.name, region)

    def stored(self) -> Iterator[Stored]:
        yield self


@dataclass(frozen=True, eq=False)
class _OfOne(Recipe):
    of: Recipe

    @property
    def sources(self) -> tuple[Recipe, ...]:
        return (self.of,)


@dataclass(frozen=True, eq=False)
class Cast(_OfOne):
    """Another tensor in this dtype."""

    def _read(self, region: list[tuple[int, int]]) -> Tensor:
        return self.of.read(region).to(self.dtype)


@dataclass(frozen=True, eq=False)
class Cut(_OfOne):
    """The elements from `start` on along `dim`; how many, the shape says."""

    dim: int
    start: int

    def _read(self, region: list[tuple[int, int]]) -> Tensor:
        start, stop = region[self.dim]
        return self.of.read([*region[: self.dim], (start + self.start, stop + self.start), *region[self.dim + 1 :]])


@dataclass(frozen=True, eq=False)
class Picked(_OfOne):
    """Entry `index` of `dim`, without that dim."""

    dim: int
    index: int

    def _read(self, region: list[tuple[int, int]]) -> Tensor:
        inner = [*region[: self.dim], (self.index, self.index + 1), *region[self.dim :]]
        return self.of.read(inner).squeeze(self.dim)


@dataclass(frozen=True, eq=False)
class Permuted(_OfOne):
    """Dim ``dims[i]`` of another tensor as dim i."""

    dims: tuple[int, ...]

    def _read(self, region: list[tuple[int, int]]) -> Tensor:
        return self.of.read([region[self.dims.index(dim)] for dim in range(len(self.dims))]).permute(self.dims)


@dataclass(frozen=True, eq=False)
class Reshaped(_OfOne):
    """The same elements, row by row, in another shape.

    Leading dims of equal size are read in part, and so are all dims where only dims of size 1 come or go.
    """

    def _read(self, region: list[tuple[int, int]]) -> Tensor:
        lengths = [stop - start for start, stop in region]
        if _without_ones(self.shape) == _without_ones(self.of.shape) and 0 not in lengths:
            bounds = iter([bound for bound, size in zip(region, self.shape, strict=True) if size != 1])
            return self.of.read([(0, 1) if size == 1 else next(bounds) for size in self.of.shape]).reshape(lengths)
        equal = 0
        while equal < min(len(self.shape), len(self.of.shape)) and self.shape[equal] == self.of.shape[equal]:
            equal += 1
        read = self.of.read([*region[:equal], *((0, size) for size in self.of.shape[equal:])])
        return _cut(read.reshape([*lengths[:equal], *self.shape[equal:]]), equal, region)


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _cut(tensor: Tensor, first: int, region: list[tuple[int, int]]) -> Tensor:
    """The region of a tensor that was cut along the dims before `first` already."""
    for dim in range(first, tensor.dim()):
        start, stop = region[dim]
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


@dataclass(frozen=True, eq=False)
class Joined(Recipe):
    """Tensors one after the other along `dim`, or stacked along a new one where `stacked`."""

    parts: tuple[Recipe, ...]
    dim: int
    stacked: bool

    @property
    def sources(self) -> tuple[Recipe, ...]:
        return self.parts

    def _read(self, region: list[tuple[int, int]]) -> Tensor:
        out = torch.empty([stop - start for start, stop in region], dtype=self.dtype, device="cpu")
        start, stop = region[self.dim]
        at = 0
        for part in self.parts:
            size = 1 if self.stacked else part.shape[self.dim]
            low, high = max(start, at), min(stop, at + size)
            if low < high:
                own = [] if self.stacked else [(low - at, high - at)]
                read = part.read([*region[: self.dim], *own, *region[self.dim + 1 :]])
                into = out.narrow(self.dim, low - start, high - low)
                into.copy_(read.unsqueeze(self.dim) if self.stacked else read)
            at += size
        return out


@dataclass(frozen=True, eq=False)
class Computed(Recipe):
    """What a function makes of tensors that are read in full; `output` is its index where it returns several.

    Args:
        function: a function of ``[full tensors of parts]``.
    """

    parts: tuple[Recipe, ...]
    function: Callable[[list[Tensor]], Any]
    output: int | None

    @property
    def sources(self) -> tuple[Recipe, ...]:
        return self.parts

    def _read(self, region: list[tuple[int, int]]) -> Tensor:
        result = self.function([part.read() for part in self.parts])
        return _cut(result if self.output is None else result[self.output], 0, region)
