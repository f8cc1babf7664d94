"""What the name of a model stands for: a configuration of Hugging Face, or an import path. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_mm5d.config.errors import ConfigError

FIELD = "--model"
FIX = "Give the import path of a class, a config.json, or a folder with one"


def configuration_file(name: str) -> Path | None:
    """Return the ``config.json`` that a name stands for; None for an import path.

    Raises:
        ConfigError: it is neither.
    """
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return path / "config.json" if path.is_dir() else path
    if path.exists() or "/" in name:
        rule = "It is no folder, and no config.json" if path.exists() else "There is no such file or folder"
        raise ConfigError(FIELD, name, rule, FIX)
    if "." not in name or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(FIELD, name, "It is neither a file nor an import path such as package.module.Class", FIX)
    return None


def read_fields(path: Path) -> dict[str, Any]:
    """Return what a ``config.json`` says, ``model_type`` at least.

    Raises:
        ConfigError: it cannot be read, or says no family.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        inside = sorted(one.name for one in path.parent.iterdir())[:8] if path.parent.is_dir() else []
        rule = f"It cannot be read ({error.strerror})" + (
            f"; beside it there are {', '.join(inside)}" if inside else ""
        )
        raise ConfigError(FIELD, str(path), rule, FIX) from error
    except ValueError as error:
        raise ConfigError(FIELD, str(path), f"It is no JSON: {error}", FIX) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(FIELD, str(path), "It has no model_type, which says what family the model is of", FIX)
    return fields
