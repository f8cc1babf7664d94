"""A checkpoint out again: as a folder that Hugging Face loads, or as one file that plain Lightning loads.

An `OpenedCheckpoint` has its tensors and what it says about the models in it. Where it says nothing, the record of a
model comes from a ``config.json`` that the user names.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_mm5d.config.errors import CheckpointCorruptError, ConfigError, did_you_mean
from lightning_mm5d.config.tables import bytes_of
from lightning_mm5d.export.huggingface_folder import (
    ModelTensors,
    empty_model,
    write_adapter,
    write_model,
    write_processors,
)
from lightning_mm5d.export.lightning_file import (
    PlainTensors,
    check_new,
    check_new_file,
    new_folder,
    open_plain,
    write_lightning,
)
from lightning_mm5d.features.huggingface_record import COMPILED, UNKNOWN, describe, record_in
from lightning_mm5d.features.sharded_checkpoints.sharded_load import ShardedCheckpoint
from lightning_mm5d.storage.files import TensorSource
from lightning_mm5d.storage.replacement import is_checkpoint_directory

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        path: of the folder.
        name: class of the model, or what else it is.
        files: names and bytes.
        warnings: what a reader should know.
    """

    path: Path
    name: str
    files: dict[str, int]
    warnings: list[str]


def export(
    checkpoint: Path,
    folder: Path,
    *,
    format: Literal["huggingface", "lightning"] = "huggingface",
    module: str | None = None,
    config: Path | None = None,
    max_shard_size: str = "5GB",
    dtype: str | None = None,
    weights_only: bool = True,
) -> Exported:
    """Write a checkpoint in another format, tensor by tensor, into a new folder.

    Args:
        checkpoint: a sharded or a full one.
        folder: that does not exist, or is empty.
        format: ``"huggingface"``, or ``"lightning"`` for one ``.ckpt``.
        module: path of the model in the LightningModule, where there are several.
        config: a ``config.json``, or a folder with one, for a checkpoint that does not say what it holds.
        max_shard_size: most bytes of a file of weights.
        dtype: of all floating-point tensors, where it should be another one.
        weights_only: whether to refuse what needs pickle to run code.

    Raises:
        ConfigError: what was asked for does not fit the checkpoint.
        CheckpointCorruptError: the checkpoint is damaged.
        CheckpointUntrustedError: the checkpoint asks for code to be run.
    """
    if format == "lightning":
        return _lightning(checkpoint, folder, {"module": module, "config": config, "dtype": dtype}, weights_only)
    size, kind = bytes_of("--max-shard-size", max_shard_size, "5GB"), _dtype(dtype)
    check_new(folder)
    opened = open_checkpoint(checkpoint, weights_only=weights_only)
    record = record_of(config, opened.source, module) if config is not None else opened.record
    if record is None:
        rule = "It names no model of transformers: it was saved without this strategy, or of a module that has none"
        fix = "Name the model's config.json with --config, or write a file of Lightning with --format lightning"
        raise ConfigError("CHECKPOINT", str(checkpoint), rule, fix)
    try:
        return _huggingface(opened, record, folder, module if config is None else None, size, kind)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(
            f"The record of Hugging Face models in {checkpoint} is damaged: {error!r}"
        ) from error


def _huggingface(
    opened: OpenedCheckpoint,
    record: Mapping[str, Any],
    folder: Path,
    module: str | None,
    size: int,
    dtype: torch.dtype | None,
) -> Exported:
    model = chosen_model(record, module)
    if model["kind"] == UNKNOWN:
        rule = f"It could not be described when the checkpoint was saved: {model['error']}"
        raise ConfigError("CHECKPOINT", model["name"], rule, "Name its config.json with --config")
    tensors = ModelTensors.of(opened.source, record, model)
    warnings: list[str] = []
    with new_folder(folder) as draft:
        if model["kind"] == "adapter":
            for name in model["adapters"]:
                if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
                    raise CheckpointCorruptError(f"The checkpoint names an adapter that cannot be a folder: {name!r}")
                inside = draft if name == "default" else draft / name
                inside.mkdir(exist_ok=True)
                warnings += write_adapter(inside, model, name, tensors, dtype=dtype)
        else:
            warnings += write_model(draft, model, tensors, max_shard_size=size, dtype=dtype)
        warnings += write_processors(draft, record["processors"])
        files = {each.relative_to(draft).as_posix(): each.stat().st_size for each in draft.rglob("*") if each.is_file()}
    name = "adapter of PEFT" if model["kind"] == "adapter" else model["name"]
    return Exported(path=folder, name=name, files=dict(sorted(files.items())), warnings=warnings)


def _lightning(checkpoint: Path, path: Path, options: Mapping[str, Any], weights_only: bool) -> Exported:
    for name, value in options.items():
        if value is not None:
            rule = "One file of plain Lightning holds the whole checkpoint as it is"
            raise ConfigError(f"--{name}", str(value), rule, "Leave it out, or use --format huggingface")
    check_new_file(path)
    opened = open_checkpoint(checkpoint, weights_only=weights_only)
    write_lightning(path, opened.content, opened.record["same"] if opened.record is not None else ())
    return Exported(path=path, name="A full checkpoint", files={path.name: path.stat().st_size}, warnings=[])


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise ConfigError("--dtype", name, "Weights are floating-point numbers", did_you_mean(name, DTYPES))
    return DTYPES[name] if name is not None else None


@dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
    """A full checkpoint or a sharded one.

    Attributes:
        content: all but the tensors of the module.
        source: tensors of the module, by their names in the LightningModule.
        record: of the Hugging Face models in it; None where it was saved without one.
    """

    content: Mapping[str, Any]
    source: TensorSource
    record: Mapping[str, Any] | None


def open_checkpoint(path: Path, *, weights_only: bool = True) -> OpenedCheckpoint:
    """Open a checkpoint without keeping tensors of the module.

    Of a full checkpoint all checksums are compared, of a sharded one those of what is read, when it is read.

    Args:
        path: of a file or a folder.
        weights_only: whether to refuse what needs pickle to run code.

    Raises:
        ConfigError: there is no checkpoint.
        CheckpointCorruptError: it is damaged.
        CheckpointUntrustedError: it asks for code to be run.
    """
    if not (path.exists() or is_checkpoint_directory(path)):
        raise ConfigError("CHECKPOINT", str(path), "There is no such file or folder", _nearby(path))
    if is_checkpoint_directory(path):
        sharded = ShardedCheckpoint(path, weights_only=weights_only)
        return OpenedCheckpoint(content=sharded.state, source=sharded, record=record_in(sharded.state))
    content = open_plain(path, weights_only)
    source = PlainTensors(path, content, content["state_dict"])
    return OpenedCheckpoint(content=content, source=source, record=record_in(content))


def chosen_model(record: Mapping[str, Any], path: str | None) -> Mapping[str, Any]:
    """Return one model of a record: the one at `path`, or the only one.

    Raises:
        ConfigError: there is none at the path, or several and no path.
    """
    models = {_plain(model["path"]): model for model in record["models"]}
    listed = ", ".join(f"{where or '.'} ({model['name']})" for where, model in models.items())
    if not models:
        rule = "It has no model of transformers or PEFT"
        raise ConfigError("CHECKPOINT", "its record", rule, "Export it with --format lightning")
    if path is None:
        if len(models) > 1:
            raise ConfigError("--module", None, f"The checkpoint has several models: {listed}", "Choose one")
        return next(iter(models.values()))
    model = models.get(_plain(path if path != "." else ""))
    if model is None:
        fix = did_you_mean(path, [where or "." for where in models])
        raise ConfigError("--module", path, f"The checkpoint has these models: {listed}", fix)
    return model


def _plain(path: str) -> str:
    """The path without torch.compile's part."""
    return ".".join(part for part in path.split(".") if part != COMPILED)


def _nearby(path: Path) -> str:
    folder = path.parent
    names = sorted(each.name for each in folder.iterdir() if each.suffix == ".ckpt") if folder.is_dir() else []
    return (
        did_you_mean(path.name, names) if names else "Name a checkpoint that ModelCheckpoint or save_checkpoint wrote"
    )


_COMPANIONS = (
    *("tokenizer*", "vocab*", "merges.txt", "*.model", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*processor_config.json"),
)


def record_of(given: Path, source: TensorSource, path: str | None) -> dict[str, Any]:
    """Return the record of the model that a configuration describes.

    Args:
        given: ``config.json``, or a folder with one; the folder's processors and tokenizers come along.
        source: tensors of the checkpoint.
        path: of the model in the LightningModule; None where its tensors show it.

    Raises:
        ConfigError: there is no such file, transformers has no such class, or the checkpoint no such tensors.
    """
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        raise ConfigError("--config", str(given), "There is no such file", "Name a config.json, or a folder with one")
    config = _json(file)
    import transformers

    architectures = config.get("architectures") or [None]
    cls = getattr(transformers, architectures[0], None) if isinstance(architectures[0], str) else None
    if cls is None:
        rule = "Its architectures name the class, and transformers has none of that name"
        raise ConfigError("--config", architectures[0], rule, "Add for instance architectures: ['LlamaForCausalLM']")
    empty = empty_model(f"{cls.__module__}.{cls.__qualname__}", config, "--config")
    record = describe(empty)
    (model,) = record["models"]
    model["path"] = path if path is not None else _path(model, source)
    prefix = f"{model['path']}." if model["path"] else ""
    record["same"] = [[prefix + name for name in names] for names in record["same"]]
    dtypes = (source.dtype(name) for name in source.names() if name.startswith(prefix))
    dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
    if dtype is not None:
        model["dtype"] = model["config"]["dtype"] = str(dtype).removeprefix("torch.")
    if given.is_dir():
        generation = given / "generation_config.json"
        model["generation_config"] = _json(generation) if generation.exists() else model["generation_config"]
        record["processors"] = [{"path": "--config", "class": "processor", "files": dict(_files(given))}]
    return record


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--config", str(file), f"It is not JSON: {error}", "Name a config.json") from error
    if not isinstance(content, dict):
        raise ConfigError("--config", str(file), "It is not a mapping", "Name a config.json")
    return content


def _path(model: Mapping[str, Any], source: TensorSource) -> str:
    """The only path under which the checkpoint has the model's tensors."""
    names = set(source.names())
    first, *others = model["names"]
    starts = [name.removesuffix(first) for name in names if name == first or name.endswith("." + first)]
    fitting = [start for start in starts if all(start + name in names for name in others)]
    if len(fitting) == 1:
        return fitting[0].removesuffix(".")
    where = ", ".join(repr(start.removesuffix(".")) for start in sorted(fitting))
    rule = f"The checkpoint has these tensors at {where}" if fitting else "The checkpoint does not have its tensors"
    fix = "Choose one with --module" if fitting else "Name the configuration of the model that was trained"
    raise ConfigError("--config", model["name"], rule, fix)


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    for pattern in _COMPANIONS:
        for file in sorted(folder.glob(pattern)):
            if file.is_file():
                yield file.name, base64.b64encode(zlib.compress(file.read_bytes())).decode("ascii")
