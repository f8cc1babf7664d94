"""How a tensor of a model comes from tensors in files: read as they are, cut, joined, turned or cast.

A model's parameter is seldom one stored tensor: experts are stacked, projections are fused or split, dtypes are
cast. A `Recipe` holds these steps and no data. Its `read` takes a region of the result, one ``(start, stop)`` for
each dim, and asks every step for the region that it needs, so that a shard costs about its own bytes. Steps that mix
elements over a whole tensor (`Reshaped` in part, `Computed`) read their sources in full.

A `TracedTensor` has no data and writes down its recipe while other code cuts, joins, turns and casts it. transformers'
own loader converts checkpoints: it stacks experts, splits fused projections, permutes and casts. Given traced tensors
in place of stored ones it does all this without reading a byte, and what it puts into the model knows from which
regions of which files it comes. Operations that are no step of a `Recipe` become one `Computed` step. Refused are
operations that write in place or ask for values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_mm5d.config.errors import private
from lightning_mm5d.features.deferred_init.recorded import operator_named
from lightning_mm5d.storage.files import Region
from lightning_mm5d.storage.tensor_file import TensorFile

_aten = torch.ops.aten
_make_wrapper = private(torch.Tensor, "_make_wrapper_subclass")


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


class TracedTensor(torch.Tensor):
    """Stands for the result of a recipe: its shape and dtype, on the CPU.

    Args:
        recipe: how to read the tensor.
    """

    recipe: Recipe

    @staticmethod
    def __new__(cls, recipe: Recipe) -> TracedTensor:
        made: TracedTensor = _make_wrapper(cls, recipe.shape, dtype=recipe.dtype, device="cpu")
        made.recipe = recipe
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TracedTensor({self.recipe!r})"

    __torch_function__ = private(torch._C, "_disabled_torch_function_impl")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # All results are on the CPU, wherever the loader would have placed them.
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "device"}
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} writes into a weight that has not been read from its file")
        returned = [str(value.type) for value in func._schema.returns]
        if func not in _STEPS and not {"Tensor", "List[Tensor]"}.issuperset(returned):
            raise NotImplementedError(f"{func} asks for the value of a weight that has not been read from its file")
        step = _STEPS.get(func, _computed)
        made = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
        if isinstance(made, Tensor):
            return cls(step(func, args, kwargs, made, None))
        return [cls(step(func, args, kwargs, tensor, index)) for index, tensor in enumerate(made)]


def _as_meta(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


# Each step gets the operation, its arguments, a meta tensor in the shape of its result, and, where the operation
# returns several tensors, the index of this one.


def _computed(func: Any, args: Any, kwargs: Any, made: Tensor, output: int | None) -> Recipe:
    parts: list[Recipe] = []

    def place(value: Any) -> Any:
        if not isinstance(value, TracedTensor):
            return value
        parts.append(value.recipe)
        return _Place(len(parts) - 1)

    call = _Call(str(func), *tree_map(place, [args, kwargs]))
    return Computed(tuple(made.shape), made.dtype, tuple(parts), call, output)


@dataclass(frozen=True)
class _Place:
    """Stands among the arguments of an operation for the tensor of this part."""

    part: int


@dataclass(frozen=True)
class _Call:
    """An operation by its name, so that it can be pickled, with its arguments but for tensors."""

    operation: str
    args: Any
    kwargs: Any

    def __call__(self, read: list[Tensor]) -> Any:
        def fill(value: Any) -> Any:
            return read[value.part] if isinstance(value, _Place) else value

        return operator_named(self.operation)(*tree_map(fill, self.args), **tree_map(fill, self.kwargs))


def _cast(func: Any, args: Any, kwargs: Any, made: Tensor, output: int | None) -> Recipe:
    of: Recipe = args[0].recipe
    return of if of.dtype == made.dtype else Cast(of.shape, made.dtype, of)


def _reshaped(func: Any, args: Any, kwargs: Any, made: Tensor, output: int | None) -> Recipe:
    return Reshaped(tuple(made.shape), made.dtype, args[0].recipe)


def _permuted(func: Any, args: Any, kwargs: Any, made: Tensor, output: int | None) -> Recipe:
    # A tensor whose sizes are the numbers of its dims shows which dim went where.
    numbered = func(torch.empty([*range(made.dim())], device="meta"), *args[1:])
    return Permuted(tuple(made.shape), made.dtype, args[0].recipe, tuple(numbered.shape))


def _split(func: Any, args: Any, kwargs: Any, made: Tensor, output: int | None) -> Recipe:
    of, sizes, *rest = args
    assert output is not None
    start = output * sizes if isinstance(sizes, int) else sum(sizes[:output])
    return Cut(tuple(made.shape), made.dtype, of.recipe, rest[0] % of.dim() if rest else 0, start)


def _sliced(func: Any, args: Any, kwargs: Any, made: Tensor, output: int | None) -> Recipe:
    dim, start, _, step = (list(args[1:]) + [0, None, None, 1][len(args) - 1 :])[:4]
    if step != 1:
        return _computed(func, args, kwargs, made, output)
    start, _, _ = slice(start, None).indices(args[0].shape[dim])
    return Cut(tuple(made.shape), made.dtype, args[0].recipe, dim % made.dim(), start)


def _picked(func: Any, args: Any, kwargs: Any, made: Tensor, output: int | None) -> Recipe:
    tensor = args[0]
    dim = (args[1] if len(args) > 1 else 0) % tensor.dim()
    index = (args[2] if output is None else output) % tensor.shape[dim]
    return Picked(tuple(made.shape), made.dtype, tensor.recipe, dim, index)


def _joined(func: Any, args: Any, kwargs: Any, made: Tensor, output: int | None) -> Recipe:
    tensors = args[0]
    dtypes = {tensor.dtype for tensor in tensors}
    if not all(isinstance(tensor, TracedTensor) and tensor.dim() for tensor in tensors) or len(dtypes) > 1:
        return _computed(func, args, kwargs, made, output)
    dim = (args[1] if len(args) > 1 else 0) % made.dim()
    parts = tuple(tensor.recipe for tensor in tensors)
    return Joined(tuple(made.shape), made.dtype, parts, dim, stacked=func is _aten.stack.default)


_STEPS = {
    _aten.alias.default: _cast,
    _aten.detach.default: _cast,
    _aten.clone.default: _cast,
    _aten._to_copy.default: _cast,
    _aten.view.default: _reshaped,
    _aten._unsafe_view.default: _reshaped,
    _aten.unsqueeze.default: _reshaped,
    _aten.squeeze.default: _reshaped,
    _aten.squeeze.dim: _reshaped,
    _aten.squeeze.dims: _reshaped,
    _aten.transpose.int: _permuted,
    _aten.t.default: _permuted,
    _aten.permute.default: _permuted,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.slice.Tensor: _sliced,
    _aten.select.int: _picked,
    _aten.unbind.int: _picked,
    _aten.cat.default: _joined,
    _aten.stack.default: _joined,
}
