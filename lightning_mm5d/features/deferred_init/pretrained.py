"""Hugging Face weights without memory: the model is built by transformers, its weights stay in their files.

`from_pretrained` runs the model class's own `from_pretrained` and takes the place of one step of it: the one that
reads files. There, transformers' converter gets a `TracedTensor` for each stored tensor. All else is transformers'
own: which files are read and under which names, renamed prefixes, stacked experts, split projections, dtypes, tied
weights, the warning that lists missing and unexpected keys, and how missing ones are initialised. Then each parameter
becomes a placeholder on the meta device. `DeferredInit` notes its `Recipe`, by which a rank reads its own regions.

Pickles are refused, and so are settings that place or change weights while they are loaded.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lightning_mm5d.config.errors import (
    CheckpointCorruptError,
    CheckpointUntrustedError,
    ConfigError,
    imported,
    private,
)
from lightning_mm5d.features.deferred_init.recipe import Recipe, Stored, TracedTensor
from lightning_mm5d.storage.files import Region
from lightning_mm5d.storage.tensor_file import TensorFile

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

    @property
    def bytes_read(self) -> int:
        """How many bytes were read of the files, with their headers."""
        files = {stored.file for recipe in self._recipes.values() for stored in recipe.stored()}
        return sum(file.bytes_read for file in files)


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

    if not shown.is_progress_bar_enabled():
        yield
        return
    shown.disable_progress_bar()
    try:
        yield
    finally:
        shown.enable_progress_bar()


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
        own = {name for name, file_name in index.items() if Path(path).match(file_name)}
        if lost := sorted(own - set(file.names())):
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
