"""A checkpoint out again: as a folder that Hugging Face loads, or as one file that plain Lightning loads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_mm5d.checkpoint.huggingface_record import UNKNOWN
from lightning_mm5d.config.errors import CheckpointCorruptError, ConfigError, did_you_mean
from lightning_mm5d.export.given_configuration import record_of
from lightning_mm5d.export.huggingface_folder import write_adapter, write_model, write_processors
from lightning_mm5d.export.lightning_file import write_lightning
from lightning_mm5d.export.model_tensors import ModelTensors
from lightning_mm5d.export.new_folder import check_new, check_new_file, new_folder
from lightning_mm5d.export.opened_checkpoint import OpenedCheckpoint, chosen_model, open_checkpoint

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


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
    size, kind = parsed_size(max_shard_size), _dtype(dtype)
    check_new(folder)
    opened = open_checkpoint(checkpoint, weights_only=weights_only)
    record = record_of(config, opened.source, module) if config is not None else opened.record
    if record is None:
        rule = "It does not say which model it holds, because it was saved without this strategy"
        raise ConfigError("CHECKPOINT", str(checkpoint), rule, "Name the model's config.json with --config")
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
    with new_folder(folder) as made:
        if model["kind"] == "adapter":
            for name in model["adapters"]:
                inside = made if name == "default" else made / _folder_name(name)
                inside.mkdir(exist_ok=True)
                warnings += write_adapter(inside, model, name, tensors, dtype=dtype)
        else:
            warnings += write_model(made, model, tensors, max_shard_size=size, dtype=dtype)
        warnings += write_processors(made, record["processors"])
        files = {each.relative_to(made).as_posix(): each.stat().st_size for each in made.rglob("*") if each.is_file()}
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


def parsed_size(text: str) -> int:
    """Return ``"5GB"`` as bytes.

    Raises:
        ConfigError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", text.strip().upper())
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if size < 1:
        rule = "It is a number of bytes with KB, MB, GB or TB, of which a KB is 1000"
        raise ConfigError("--max-shard-size", text, rule, "Write for instance 5GB")
    return size


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise ConfigError("--dtype", name, "Weights are floating-point numbers", did_you_mean(name, DTYPES))
    return DTYPES[name] if name is not None else None


def _folder_name(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise CheckpointCorruptError(f"The checkpoint names an adapter that cannot be a folder: {name!r}")
    return name
