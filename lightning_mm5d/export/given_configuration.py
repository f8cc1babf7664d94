"""The record of a model for a checkpoint that has none, from a ``config.json`` that the user names."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_mm5d.checkpoint.huggingface_record import describe
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.export.reverse_conversion import empty_model
from lightning_mm5d.storage.source import TensorSource

_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*processor_config.json",
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
    folder, config = _config(given)
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
    if folder is not None:
        generation = folder / "generation_config.json"
        model["generation_config"] = _json(generation) if generation.exists() else model["generation_config"]
        record["processors"] = [{"path": "--config", "class": "processor", "files": dict(_files(folder))}]
    return record


def _config(given: Path) -> tuple[Path | None, dict[str, Any]]:
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        raise ConfigError("--config", str(given), "There is no such file", "Name a config.json, or a folder with one")
    return (given if given.is_dir() else None), _json(file)


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
