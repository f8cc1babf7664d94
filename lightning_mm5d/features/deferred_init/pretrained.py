"""Hugging Face weights without memory: the model is built by transformers, its weights stay in their files.

`from_pretrained` runs the model class's own `from_pretrained` and takes the place of one step of it: the one that
reads files. There, transformers' converter gets a `TracedTensor` for each stored tensor. All else is transformers'
own: which files are read and under which names, renamed prefixes, stacked experts, split projections, dtypes, tied
weights, the warning that lists missing and unexpected keys, and how missing ones are initialised. Then each parameter
becomes a placeholder on the meta device. `DeferredInit` notes its `Recipe`, by which a rank reads its own regions.

Pickles are refused, and so are settings that place or change weights while they are loaded.

How a tensor of a model comes from tensors in files: read as they are, cut, joined, turned or cast.

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

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from lightning_mm5d.config.errors import (
    CheckpointCorruptError,
    CheckpointUntrustedError,
    ConfigError,
    imported,
    private,
)
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


@dataclass(frozen=True, eq=False)
class Stored(Recipe):
    """A tensor as it lies in a file."""

    file: TensorFile
    name: str

    def _read(self, region: list[tuple[int, int]]) -> Tensor:
        return self.file.read(self.name, region)


@dataclass(frozen=True, eq=False)
class _OfOne(Recipe):
    of: Recipe


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

    def _read(self, region: list[tuple[int, int]]) -> Tensor:
        out = torch.empty([stop - start for start, stop in region], dtype=self.dtype, device="cpu")
        start, stop = region[self.dim]
        at = 0
        for part in self.parts:
            size = 1 if self.stacked else part.shape[self.dim]
            low, high = max(start, at), min(stop, at + size)
            if low < high:
                along_dim = [] if self.stacked else [(low - at, high - at)]
                read = part.read([*region[: self.dim], *along_dim, *region[self.dim + 1 :]])
                into = out.narrow(self.dim, low - start, high - low)
                into.copy_(read.unsqueeze(self.dim) if self.stacked else read)
            at += size
        return out


@dataclass(frozen=True, eq=False)
class Computed(Recipe):
    """What an operation makes of tensors that are read in full; `output` is its index where it returns several.

    Args:
        operation: its name, so that it can be pickled.
        args: its arguments, with recipes in place of tensors in files.
        kwargs: its keywords.
    """

    operation: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int | None

    def _read(self, region: list[tuple[int, int]]) -> Tensor:
        args, kwargs = tree_map_only(Recipe, Recipe.read, (self.args, self.kwargs))
        result = operator_named(self.operation)(*args, **kwargs)
        return _cut(result if self.output is None else result[self.output], 0, region)


class TracedTensor(torch.Tensor):
    """Stands for the result of a recipe: its shape and dtype, on the CPU.

    Args:
        recipe: how to read the tensor.
    """

    recipe: Recipe

    @staticmethod
    def __new__(cls, recipe: Recipe) -> TracedTensor:
        traced: TracedTensor = _make_wrapper(cls, recipe.shape, dtype=recipe.dtype, device="cpu")
        traced.recipe = recipe
        return traced

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
        meta = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
        if isinstance(meta, Tensor):
            return cls(step(func, args, kwargs, meta, None))
        return [cls(step(func, args, kwargs, tensor, index)) for index, tensor in enumerate(meta)]


def _as_meta(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


# Each step gets the operation, its arguments, a meta tensor in the shape of its result, and, where the operation
# returns several tensors, the index of this one.


def _computed(func: Any, args: Any, kwargs: Any, meta: Tensor, output: int | None) -> Recipe:
    args, kwargs = tree_map_only(TracedTensor, attrgetter("recipe"), (args, kwargs))
    return Computed(tuple(meta.shape), meta.dtype, str(func), args, kwargs, output)


def _cast(func: Any, args: Any, kwargs: Any, meta: Tensor, output: int | None) -> Recipe:
    of: Recipe = args[0].recipe
    return of if of.dtype == meta.dtype else Cast(of.shape, meta.dtype, of)


def _reshaped(func: Any, args: Any, kwargs: Any, meta: Tensor, output: int | None) -> Recipe:
    return Reshaped(tuple(meta.shape), meta.dtype, args[0].recipe)


def _permuted(func: Any, args: Any, kwargs: Any, meta: Tensor, output: int | None) -> Recipe:
    # A tensor whose sizes are the numbers of its dims shows which dim went where.
    numbered = func(torch.empty([*range(meta.dim())], device="meta"), *args[1:])
    return Permuted(tuple(meta.shape), meta.dtype, args[0].recipe, tuple(numbered.shape))


def _split(func: Any, args: Any, kwargs: Any, meta: Tensor, output: int | None) -> Recipe:
    of, sizes, *rest = args
    assert output is not None
    start = output * sizes if isinstance(sizes, int) else sum(sizes[:output])
    return Cut(tuple(meta.shape), meta.dtype, of.recipe, rest[0] % of.dim() if rest else 0, start)


def _sliced(func: Any, args: Any, kwargs: Any, meta: Tensor, output: int | None) -> Recipe:
    dim, start, _, step = (list(args[1:]) + [0, None, None, 1][len(args) - 1 :])[:4]
    if step != 1:
        return _computed(func, args, kwargs, meta, output)
    start, _, _ = slice(start, None).indices(args[0].shape[dim])
    return Cut(tuple(meta.shape), meta.dtype, args[0].recipe, dim % meta.dim(), start)


def _picked(func: Any, args: Any, kwargs: Any, meta: Tensor, output: int | None) -> Recipe:
    tensor = args[0]
    dim = (args[1] if len(args) > 1 else 0) % tensor.dim()
    index = (args[2] if output is None else output) % tensor.shape[dim]
    return Picked(tuple(meta.shape), meta.dtype, tensor.recipe, dim, index)


def _joined(func: Any, args: Any, kwargs: Any, meta: Tensor, output: int | None) -> Recipe:
    tensors = args[0]
    dtypes = {tensor.dtype for tensor in tensors}
    if not all(isinstance(tensor, TracedTensor) and tensor.dim() for tensor in tensors) or len(dtypes) > 1:
        return _computed(func, args, kwargs, meta, output)
    dim = (args[1] if len(args) > 1 else 0) % meta.dim()
    parts = tuple(tensor.recipe for tensor in tensors)
    return Joined(tuple(meta.shape), meta.dtype, parts, dim, stacked=func is _aten.stack.default)


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


_log = logging.getLogger(__name__)
_Model = TypeVar("_Model")
_LOADER = "_load_pretrained_model"
_MODELS = "transformers.modeling_utils"
_COMPARED_ROWS_BYTES = 64 * 2**20

# Arguments of from_pretrained that say where weights are placed or what they become; a layout says that here.
_REFUSED = {
    "device_map": "The strategy places the weights",
    "distributed_config": "The strategy shards the weights",
    "gguf_file": "Only safetensors files can be read in parts",
    "load_in_4bit": "Quantized weights cannot be sharded",
    "load_in_8bit": "Quantized weights cannot be sharded",
    "max_memory": "The strategy places the weights",
    "offload_folder": "The strategy places the weights",
    "quantization_config": "Quantized weights cannot be sharded",
    "state_dict": "Its tensors are in memory already",
    "tp_plan": "The strategy shards the weights",
    "tp_size": "The strategy shards the weights",
    "device_mesh": "The strategy shards the weights",
}


def from_pretrained(cls: type[_Model], path: str | Path, *args: Any, **kwargs: Any) -> _Model:
    """Return ``cls.from_pretrained(path, ...)`` whose weights are read later, by each rank its own.

    That happens in `configure_model` and under ``trainer.init_module(empty_init=True)`` with this package's
    strategy. Anywhere else it is the plain call, so that a module works with all strategies.

    Args:
        cls: a model class of transformers, also an ``AutoModel...``.
        path: a folder with safetensors files, or a name on the hub.
        args: further arguments of ``cls.from_pretrained``.
        kwargs: its keywords, for instance ``dtype`` and ``attn_implementation``.

    Raises:
        ConfigError: a keyword that places, shards or quantizes weights.
        CheckpointUntrustedError: the weights are a pickle.
        CheckpointCorruptError: a file is missing or damaged.
    """
    make: Callable[..., _Model] = cls.from_pretrained  # type: ignore[attr-defined]
    if is_streaming():
        for name, why in _REFUSED.items():
            if kwargs.get(name):
                raise _refused(name, kwargs[name], why)
        try:
            return make(path, *args, **kwargs)
        except (JSONDecodeError, SafetensorError) as error:
            raise CheckpointCorruptError(f"{path}: its index or a file of weights is damaged: {error}") from error
    return make(path, *args, **kwargs)


class Streaming:
    """A context in which every ``from_pretrained`` of transformers leaves the weights in their files.

    It imports nothing: call `look` where transformers may have been imported since.

    Args:
        note: called with each tensor that a model gets in place of stored weights, on the meta device, and with what
            its values are.
    """

    def __init__(self, note: Callable[[Tensor, Recipe], None]) -> None:
        self._note = note
        self._model: Any = None

    def __enter__(self) -> None:
        self.look()

    def look(self) -> None:
        """Take the place of the step of transformers that reads files, once there is one."""
        if self._model is None and (model := imported(_MODELS, "PreTrainedModel")) is not None:
            self._model, self._before = model, private(model, _LOADER)
            original = self._before.original if isinstance(self._before, _Loader) else self._before
            setattr(model, _LOADER, staticmethod(_Loader(original, self._note)))

    def __exit__(self, *_: object) -> None:
        if self._model is not None:
            setattr(self._model, _LOADER, staticmethod(self._before))
            self._model = None


def is_streaming() -> bool:
    """Whether ``from_pretrained`` leaves the weights in their files now."""
    torch.empty(0)  # a recorder looks for transformers at each operator
    model = imported(_MODELS, "PreTrainedModel")
    return model is not None and isinstance(private(model, _LOADER), _Loader)


class PretrainedSource:
    """Tensors whose values lie in files of pretrained weights, a `TensorSource`.

    Args:
        recipes: by name in the module, whatever the files call the tensors.
    """

    def __init__(self, recipes: Mapping[str, Recipe]) -> None:
        self._recipes = recipes

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._recipes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full tensor; raise KeyError for an unknown name."""
        return self._recipes[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of what `read` returns; raise KeyError for an unknown name."""
        return self._recipes[name].dtype

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a full tensor, or its `region`, read from the files.

        Raises:
            KeyError: the name is unknown.
            CheckpointCorruptError: a file has changed, or ends too early.
        """
        return self._recipes[name].read(region)


class _Loader:
    """Stands for the step of transformers that reads files into a model.

    Args:
        original: that step.
        note: called with each placeholder and its recipe.
    """

    def __init__(self, original: Callable[..., tuple[Any, Any]], note: Callable[[Tensor, Recipe], None]) -> None:
        self.original, self._note = original, note

    def __call__(
        self,
        model: Any,
        state_dict: Any,
        checkpoint_files: list[str] | None,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        if state_dict is not None:
            raise _refused("state_dict", type(state_dict), "Its tensors are in memory already")
        if load_config.is_quantized:
            raise _refused("quantization_config", type(model).__name__, "Quantized weights cannot be sharded")
        devices = {str(device) for device in (load_config.device_map or {}).values()}
        if len(devices) > 1 or "disk" in devices:
            raise _refused("device_map", load_config.device_map, "The strategy places the weights")
        traced = _traced(checkpoint_files or [], (load_config.sharded_metadata or {}).get("weight_map", {}))
        on_cpu = dataclasses.replace(load_config, device_map=None)
        with _without_progress_bar():  # nothing is read yet
            info, offloaded = self.original(model, traced, checkpoint_files, on_cpu, *args, **kwargs)
        recipes: dict[int, Recipe] = {}
        for path, module in model.named_modules():
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                full_name = f"{path}.{name}" if path else name
                if isinstance(tensor, TracedTensor):
                    placeholder = _empty_on(tensor, device="meta")
                    self._note(placeholder, tensor.recipe)
                    # so that transformers does not initialise it
                    placeholder._is_hf_initialized = True  # type: ignore[attr-defined]
                    recipes[id(placeholder)] = tensor.recipe
                    setattr(module, name, placeholder)
                elif tensor.is_meta and full_name not in model.all_tied_weights_keys:
                    setattr(module, name, _empty_on(tensor, device="cpu"))  # transformers initialises it
        _settle_ties(model, info, recipes)
        return info, offloaded


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    from transformers.utils import logging as shown

    with ExitStack() as stack:
        if shown.is_progress_bar_enabled():
            shown.disable_progress_bar()
            stack.callback(shown.enable_progress_bar)
        yield


def _refused(name: str, got: object, why: str) -> ConfigError:
    return ConfigError(f"from_pretrained.{name}", got, why, f"Leave {name} out, or load the model in __init__")


def _traced(paths: list[str], index: Mapping[str, str]) -> dict[str, TracedTensor]:
    """One traced tensor for each tensor in the files.

    Args:
        paths: of the files.
        index: for each tensor the name of its file, as far as an index says so.
    """
    for path in [*paths, *index.values()]:
        if Path(path).suffix != ".safetensors":
            raise CheckpointUntrustedError(
                f"{path}: weights in this format are a pickle, which can run any code when it is read. Write them as "
                "safetensors: load them once with from_pretrained, then call save_pretrained"
            )
    for file_name in set(index.values()):
        if Path(file_name).is_absolute() or ".." in Path(file_name).parts:
            raise CheckpointUntrustedError(f"The index of {paths[0]} names {file_name!r}, which lies in another folder")
    traced: dict[str, TracedTensor] = {}
    for path in paths:
        file = TensorFile(path)
        indexed = {name for name, file_name in index.items() if Path(path).match(file_name)}
        if lost := sorted(indexed - set(file.names())):
            raise CheckpointCorruptError(f"{path}: the index says that it holds {lost[0]!r}, and it does not")
        for name in file.names():
            traced[name] = TracedTensor(Stored(file.shape(name), file.dtype(name), file, name))
    return traced


def _empty_on(tensor: Tensor, device: str) -> Tensor:
    """An empty parameter or buffer of the same shape and dtype."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _settle_ties(model: Any, info: Any, recipes: Mapping[int, Recipe]) -> None:
    """Tie parameters that should be tied and are stored twice, where their values are equal.

    transformers compares them in memory, and leaves tensors on the meta device untied.
    """
    for target, source in [*model.all_tied_weights_keys.items()]:
        first, second = (recipes.get(id(model.get_parameter_or_buffer(name))) for name in (source, target))
        if first is None or second is None:
            continue
        with ThreadPoolExecutor(1) as apart:  # what is recorded in this thread is not recorded there
            equal = apart.submit(_equal, first, second).result()
        if equal:
            info.missing_keys.add(target)  # so that transformers ties it
        else:
            del model.all_tied_weights_keys[target]
            _log.warning(
                "%s and %s of %s should be tied by its config, but their values in the files differ, so they are not "
                "tied. Set tie_word_embeddings=False in the config to silence this warning.",
                source, target, type(model).__name__,
            )  # fmt: skip


def _equal(first: Recipe, second: Recipe) -> bool:
    if first.shape != second.shape:
        return False
    row = first.dtype.itemsize * max(1, torch.Size(first.shape[1:]).numel())
    step = max(1, _COMPARED_ROWS_BYTES // row)
    rest = [(0, size) for size in first.shape[1:]]
    for begin in range(0, first.shape[0], step):
        rows = [(begin, min(begin + step, first.shape[0])), *rest]
        if not torch.equal(first.read(rows), second.read(rows)):
            return False
    return True
