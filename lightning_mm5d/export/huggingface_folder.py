"""Writes a folder that `from_pretrained` reads: weights tensor by tensor, configuration, generation, processors.

Phases: names, shapes and dtypes of all tensors are computed on the meta device; from them follows which file holds
which tensor; then each group of tensors is read, converted and written. Never more than one group is in memory.

transformers renames, splits and merges tensors while it loads a model, and reverts that when it saves. The fused
experts of Mixtral, for instance, are one tensor for each expert and projection in a file. `revert_weight_conversion` of
transformers does it for a whole state dict in memory. `ReverseConversion` does the same for each group of tensors that
belong together, and reads them when their turn comes. The model that transformers asks for is built on the meta device.
Its class comes from transformers by name, or is this package's composed model of such classes; no other class is
imported.

A tied tensor may stand in the checkpoint under any of its names. A tensor that is missing, or left over, is refused: a
folder that lacks it would load with random numbers in its place.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import transformers
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from lightning_mm5d.config.errors import CheckpointCorruptError, ConfigError
from lightning_mm5d.features.huggingface_record import conversion_key, unpacked
from lightning_mm5d.models.multimodal_config import without_own_code
from lightning_mm5d.storage.files import TensorSource
from lightning_mm5d.storage.tensor_file import TensorFileWriter

try:
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        WeightTransform,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )
except ImportError as error:
    rule = "Folders of Hugging Face are written with transformers 5.23 or newer"
    fix = "Install 'transformers>=5.23'"
    raise ImportError(f"{rule}, and {transformers.__version__} is installed: {fix}") from error

Read = Callable[[str], Tensor]
_CLASS = re.compile(r"(transformers\.models\.\w+\.modeling_\w+|lightning_mm5d\.models\.multimodal_model)\.(\w+)")


def empty_model(dotted: str, config: Mapping[str, Any], field: str) -> PreTrainedModel:
    """Return a model of transformers on the meta device.

    Args:
        dotted: module and name of the class.
        config: the content of ``config.json``.
        field: where both come from, for the error.

    Raises:
        ConfigError: transformers has no such class, or the configuration is not one of it.
    """
    match = _CLASS.fullmatch(dotted)
    try:
        cls = getattr(importlib.import_module(match[1]), match[2]) if match else None
    except (ImportError, AttributeError):
        cls = None
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.config_class is not None):
        rule = "Classes come from transformers by name, never from a checkpoint, and the installed one has none of it"
        raise ConfigError(field, dotted, rule, "Install the version of transformers that the model was trained with")
    try:
        fields = without_own_code(config) if cls.__module__.startswith("lightning_mm5d.") else deepcopy(dict(config))
        if fields is None:
            raise ValueError("it names classes that are not of transformers")
        parsed = cls.config_class.from_dict(fields)
        with torch.device("meta"):
            return cls(parsed)
    except Exception as error:  # a configuration can be wrong in any way
        rule = f"{cls.__name__} cannot be made from this configuration: {error}"
        raise ConfigError(field, config.get("model_type"), rule, "Give its own with --config") from error


class ReverseConversion:
    """Takes tensors under their names in a model, and gives them as a file of transformers has them.

    Args:
        model: on the meta device; None for a class that transformers does not know, whose tensors stay as they are.
        used: the conversions with which the model was loaded, by `conversion_key`; None where it was not loaded.
        field: where they come from, for the error.

    Raises:
        ConfigError: the installed transformers has another conversion, or none.
    """

    def __init__(self, model: PreTrainedModel | None, used: Sequence[Any] | None, field: str) -> None:
        self._model = model
        self._transforms = _transforms(model, used, field) if model is not None else []
        self._sorted = used is not None or bool(self._transforms)  # transformers sorts where it may convert

    def tensors(self, names: Sequence[str], read: Read) -> Iterator[tuple[str, Tensor]]:
        """Yield names in a file and tensors, one group after the other.

        Args:
            names: of all tensors of the model, without those that tied ones stand for.
            read: returns a tensor by its name in the model; called for the tensors of one group at a time.
        """
        if not self._sorted:
            yield from ((name, read(name)) for name in names)
            return
        assert self._model is not None or not self._transforms
        reverse = [each.reverse_transform() for each in reversed(self._transforms)]
        renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
        for first, group in self._grouped(names, read, reverse, renamings).items():
            yield from self._converted(first, group, renamings)

    def _converted(self, first: str, group: Any, renamings: list[WeightRenaming]) -> Iterator[tuple[str, Tensor]]:
        config = self._model.config if self._model is not None else None
        tensors = group.convert(first, model=self._model, config=config)
        while tensors:  # each is given away before the next one is asked for
            name = next(iter(tensors))
            value = tensors.pop(name)
            name = apply_renamings(name, renamings) if isinstance(group, WeightConverter) else name
            yield name, value.pop() if isinstance(value, list) else value
            del value

    def _grouped(
        self, names: Sequence[str], read: Read, reverse: Sequence[WeightTransform], renamings: list[WeightRenaming]
    ) -> dict[str, Any]:
        """For each conversion the names that it takes together, as in transformers' `revert_weight_conversion`."""
        converters = [each for each in reverse if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        groups: dict[str, Any] = {}
        for name in sorted(names, key=dot_natural_key):
            renamed, pattern = apply_converters(name, converters)
            if pattern is not None:
                group = groups.setdefault(renamed, deepcopy(by_pattern[pattern]))
            else:
                renamed, pattern = apply_renamings(name, renamings), name
                group = groups.setdefault(renamed, WeightRenaming(name, renamed))
            group.add_tensor(renamed, name, pattern, partial(read, name))  # called when it is converted
        return groups


def _transforms(model: PreTrainedModel, used: Sequence[Any] | None, field: str) -> list[WeightTransform]:
    known = get_model_conversion_mapping(model, add_legacy=used is not None)
    if used is None:  # whether a prefix was there is not known, so transformers adds none
        return [each for each in known if not isinstance(each, PrefixChange)]
    by_key = {json.dumps(conversion_key(each)): each for each in known}
    return [by_key.get(json.dumps(key)) or _own_renaming(key, field) for key in used]


def _own_renaming(key: Any, field: str) -> WeightRenaming:
    """A renaming that the user gave to `from_pretrained` as ``key_mapping``."""
    try:
        kind, sources, targets, *_ = key
        if kind == "WeightRenaming":
            return WeightRenaming(list(sources), list(targets))
    except (TypeError, ValueError, re.error):
        pass
    rule = "The installed transformers does not convert tensors in this way"
    raise ConfigError(field, key, rule, "Install the version of transformers that the model was trained with")


class ModelTensors:
    """Reads a model's tensors from the tensors of the module around it.

    Args:
        source: tensors by their names in the LightningModule.
        path: of the model in the LightningModule.
        same: names of the LightningModule that stand for one tensor, group by group.
    """

    def __init__(self, source: TensorSource, path: str, same: Iterable[Sequence[str]] = ()) -> None:
        self._source, self._prefix = source, f"{path}." if path else ""
        self._known = set(source.names())
        self._same = {name: group for group in same for name in group}

    @classmethod
    def of(cls, source: TensorSource, record: Mapping[str, Any], model: Mapping[str, Any]) -> ModelTensors:
        """Return those of a model in the record of a checkpoint."""
        return cls(source, model["path"], record["same"])

    def read(self, name: str) -> Tensor:
        """Return a tensor of the model."""
        return self._source.read(self._stored_name(name))

    def empty(self, name: str) -> Tensor:
        """Return a tensor of the same shape and dtype on the meta device."""
        stored_name = self._stored_name(name)
        return torch.empty(self._source.shape(stored_name), dtype=self._source.dtype(stored_name), device="meta")

    def check(self, names: Sequence[str], others: Iterable[str] | None = None) -> None:
        """Compare the names in the checkpoint with those of the model.

        Args:
            names: of the tensors that are needed.
            others: names that the checkpoint may have besides; None where it may have any.

        Raises:
            ConfigError: tensors are missing, or are left over.
        """
        missing = [name for name in names if not self._names(name)]
        if missing:
            rule = f"The checkpoint lacks {_some(missing)}"
            raise ConfigError("CHECKPOINT", self._prefix or "the module", rule, "Save the whole module")
        if others is None:
            return
        known = {*names, *others}
        own_names = (name.removeprefix(self._prefix) for name in self._known if name.startswith(self._prefix))
        more = sorted(name for name in own_names if name not in known)
        if more:
            rule = f"The model that the checkpoint describes has no {_some(more)}"
            raise ConfigError("CHECKPOINT", self._prefix or "the module", rule, "Give the model's own --config")

    def _names(self, name: str) -> list[str]:
        """The names under which the checkpoint has the tensor."""
        full = self._prefix + name
        return [each for each in (full, *self._same.get(full, ())) if each in self._known]

    def _stored_name(self, name: str) -> str:
        return self._names(name)[0]


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:3])
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more"


WEIGHTS = "model{suffix}.safetensors"
ADAPTER = "adapter_model{suffix}.safetensors"


def write_model(
    folder: Path, model: Mapping[str, Any], tensors: ModelTensors, *, max_shard_size: int, dtype: torch.dtype | None
) -> list[str]:
    """Write weights and configuration of a model; return warnings.

    Args:
        folder: an empty one.
        model: what the checkpoint's record says about the model.
        tensors: of the model.
        max_shard_size: bytes of tensors in a file, where no single tensor has more.
        dtype: for all floating-point tensors; None keeps each as it is.

    Raises:
        ConfigError: the checkpoint and its record do not fit each other, or transformers does not know the class.
    """
    if model["quantized"]:
        rule = "The model is quantized, and its tensors mean nothing without the library that did it"
        raise ConfigError("CHECKPOINT", model["name"], rule, "Use save_pretrained on the model after training")
    tensors.check(model["names"], (*model["tied"], *model["ignored"]))
    empty = None if model["class"] is None else empty_model(model["class"], model["config"], "CHECKPOINT")
    if empty is not None:
        _check_shapes(empty, model["names"], tensors)
        _check_complete(empty, model)
    conversion = ReverseConversion(empty, model["conversions"], "CHECKPOINT")
    specs = {name: _cast(value, dtype) for name, value in conversion.tensors(model["names"], tensors.empty)}
    values = map(partial(_cast_item, dtype), conversion.tensors(model["names"], tensors.read))
    write_weights(folder, WEIGHTS, specs, values, max_shard_size)
    dtype_name = model["dtype"] if dtype is None else str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", _with_dtype(model["config"], dtype_name) if dtype else model["config"])
    if model["generation_config"] is not None:
        _write_json(folder / "generation_config.json", model["generation_config"])
    return list(_warnings(model, specs, dtype_name))


def write_adapter(
    folder: Path, model: Mapping[str, Any], name: str, tensors: ModelTensors, *, dtype: torch.dtype | None
) -> list[str]:
    """Write the adapter `name` of a model as PEFT has it; return warnings.

    Raises:
        ConfigError: the adapter's file would hold what the checkpoint does not, or tensors are missing.
    """
    adapter = model["adapters"][name]
    if adapter["tensors"] is None:
        rule = (
            f"PEFT computes what it saves of a {adapter['config'].get('peft_type')} adapter, and needs the model for it"
        )
        raise ConfigError("CHECKPOINT", name, rule, "Use save_pretrained on the model after training")
    tensors.check(list(adapter["tensors"].values()))
    stored = adapter["tensors"].items()
    specs = {file_name: _cast(tensors.empty(inner), dtype) for file_name, inner in stored}
    values = ((file_name, _cast(tensors.read(inner), dtype)) for file_name, inner in stored)
    write_weights(folder, ADAPTER, specs, values, max_shard_size=2**63)  # PEFT reads one file
    _write_json(folder / "adapter_config.json", adapter["config"])
    left = adapter["trained_outside"]
    if not left:
        return []
    return [f"{len(left)} trained tensors lie outside of the adapter and are left out, for instance {left[0]}"]


def write_weights(
    folder: Path, pattern: str, specs: Mapping[str, Tensor], values: Iterable[tuple[str, Tensor]], max_shard_size: int
) -> None:
    """Write tensors into one file, or into several with an index, as transformers divides them.

    Args:
        folder: for the files.
        pattern: of the files' names.
        specs: tensors on the meta device in the order of `values`, by name.
        values: names and tensors.
        max_shard_size: bytes of tensors in a file.
    """
    split = split_state_dict_into_shards_factory(
        dict(specs), get_storage_size=attrgetter("nbytes"), filename_pattern=pattern, max_shard_size=max_shard_size
    )
    waiting = {file: set(names) for file, names in split.filename_to_tensors.items()}
    writers: dict[str, TensorFileWriter] = {}
    ends: dict[str, ExitStack] = {}
    with ExitStack() as stack:
        for name, value in values:
            file = split.tensor_to_filename[name]
            if file not in writers:
                inside = {
                    each: (specs[each].dtype, tuple(specs[each].shape)) for each in split.filename_to_tensors[file]
                }
                ends[file] = stack.enter_context(ExitStack())
                writers[file] = ends[file].enter_context(TensorFileWriter(folder / file, inside, {"format": "pt"}))
            writers[file].write(name, value)
            del value  # before the next one is read
            waiting[file].discard(name)
            if not waiting[file]:
                ends[file].close()
    if split.is_sharded:
        total = {"total_parameters": sum(each.numel() for each in specs.values()), **split.metadata}
        index = {"metadata": total, "weight_map": split.tensor_to_filename}
        _write_json(folder / (pattern.format(suffix="") + ".index.json"), index)


def write_processors(folder: Path, processors: Iterable[Mapping[str, Any]]) -> list[str]:
    """Write the files of processors and tokenizers; return warnings.

    Raises:
        CheckpointCorruptError: a file has a path that leads out of the folder, or cannot be decoded.
    """
    warnings: list[str] = []
    for each in processors:
        if not each["files"]:
            warnings.append(f"{each['path']}, a {each['class']}, could not be saved and is missing")
        for name, text in each["files"].items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
                raise CheckpointCorruptError(
                    f"The checkpoint names a file of {each['path']} that leads elsewhere: {name!r}"
                )
            if (folder / path).exists():
                warnings.append(f"{name} of {each['path']} is left out: there is one already")
                continue
            try:
                content = unpacked(text)
            except ValueError as error:
                raise CheckpointCorruptError(f"The checkpoint's file {name} of {each['path']}: {error}") from error
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    return warnings


def _check_shapes(empty: torch.nn.Module, names: Iterable[str], tensors: ModelTensors) -> None:
    """Refuse what `from_pretrained` would refuse, for instance a vocabulary that the configuration does not know of."""
    expected = empty.state_dict()
    for name in names:
        if name in expected and expected[name].shape != (shape := tensors.empty(name).shape):
            rule = f"The configuration makes it {list(expected[name].shape)}, so from_pretrained could not load it"
            raise ConfigError(f"CHECKPOINT {name}", list(shape), rule, "Give the model's own --config")


def _check_complete(empty: torch.nn.Module, model: Mapping[str, Any]) -> None:
    """Refuse what `from_pretrained` would draw anew, for instance a head that was replaced by one of other names."""
    known = {*model["names"], *model["tied"], *model["ignored"]}
    lost = [name for name in empty.state_dict() if name not in known]
    if lost and type(empty).__name__ == model["name"]:
        rule = f"A {model['name']} of this configuration has {lost[0]!r}, which from_pretrained would draw anew"
        raise ConfigError("CHECKPOINT", "a model without it", rule, "Give the model's own --config, or save its parts")


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _cast_item(dtype: torch.dtype | None, item: tuple[str, Tensor]) -> tuple[str, Tensor]:
    return item[0], _cast(item[1], dtype)  # a function, since a generator would keep its last tensor alive


def _with_dtype(config: Any, dtype: str) -> Any:
    """The configuration with another dtype, also in its parts."""
    if not isinstance(config, dict):
        return config
    changed = {key: _with_dtype(value, dtype) for key, value in config.items()}
    return changed | {key: dtype for key in ("dtype",) if isinstance(changed.get(key), str)}


def _warnings(model: Mapping[str, Any], specs: Mapping[str, Tensor], dtype: str) -> Iterator[str]:
    if model["class"] is None:
        yield f"{model['name']} is no class of transformers: it loads with its own code, under its own names"
    others = {str(each.dtype).removeprefix("torch.") for each in specs.values() if each.is_floating_point()} - {dtype}
    if others:
        yield f"tensors are {', '.join(sorted(others))} besides {dtype}, to which from_pretrained casts all of them"


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
