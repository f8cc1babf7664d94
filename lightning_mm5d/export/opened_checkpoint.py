"""A checkpoint that is open for export: its tensors, and what it says about the models in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_mm5d.checkpoint.huggingface_record import COMPILED, record_in
from lightning_mm5d.checkpoint.sharded_load import ShardedCheckpoint
from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.export.plain_file import PlainTensors, open_plain
from lightning_mm5d.storage.directory import is_checkpoint_directory
from lightning_mm5d.storage.source import TensorSource


@dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
    """A full checkpoint or a sharded one.

    Attributes:
        path: of the file or the folder.
        content: all but the tensors of the module.
        source: tensors of the module, by their names in the LightningModule.
        record: of the Hugging Face models in it; None where it was saved without one.
    """

    path: Path
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
        return OpenedCheckpoint(path=path, content=sharded.state, source=sharded, record=record_in(sharded.state))
    content = open_plain(path, weights_only)
    source = PlainTensors(path, content, content["state_dict"])
    return OpenedCheckpoint(path=path, content=content, source=source, record=record_in(content))


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
    found = models.get(_plain(path if path != "." else ""))
    if found is None:
        fix = did_you_mean(path, [where or "." for where in models])
        raise ConfigError("--module", path, f"The checkpoint has these models: {listed}", fix)
    return found


def _plain(path: str) -> str:
    """The path without torch.compile's part."""
    return ".".join(part for part in path.split(".") if part != COMPILED)


def _nearby(path: Path) -> str:
    folder = path.parent
    names = sorted(each.name for each in folder.iterdir() if each.suffix == ".ckpt") if folder.is_dir() else []
    return (
        did_you_mean(path.name, names) if names else "Name a checkpoint that ModelCheckpoint or save_checkpoint wrote"
    )
