"""Prints pages: tables that fit a terminal, and plain text without colours and in full length for anything else.

Files that commands write, and the name of a model, which may stand in place of a configuration: an import path or a
configuration of Hugging Face. Imports no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.tables import Page, Table


def check_writable(option: str, path: Path | None) -> None:
    """Refuse the path of a file that could not be written in the end.

    Raises:
        ConfigError: it is a folder, or is in none.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        rule = "It is a folder" if path.is_dir() else "There is no such folder"
        raise ConfigError(option, str(path), rule, "Name a file in one that exists")


def write(option: str, path: Path, text: str) -> None:
    """Write a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(option, path, error) from error


def unwritable(option: str, path: Path, error: OSError) -> ConfigError:
    """Return the error of a file that cannot be written."""
    return ConfigError(option, str(path), f"It cannot be written: {error.strerror}", "Name another file")


def show(page: Page) -> None:
    """Print a page on standard output."""
    if not sys.stdout.isatty():
        print("\n\n".join(map(str, page)))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for number, part in enumerate(page):
        if number:
            console.print()
        if isinstance(part, Table):
            console.print(_fitting(part))
        else:
            console.print(part, soft_wrap=True)  # so that what is to be pasted keeps its lines


def reason(error: BaseException) -> str:
    """Return an error in one short line: its class, and what it says."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def warn(sentences: Iterable[str]) -> None:
    """Print a line per sentence on standard error."""
    for sentence in sentences:
        print(f"mm5d: warning: {sentence}", file=sys.stderr)


def _fitting(table: Table) -> object:
    """The table for rich, which folds cells where the terminal is too narrow and truncates none."""
    from rich.table import Table as RichTable

    rich_table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, right in zip(table.header, table.numeric, strict=True):
        rich_table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in table.rows:
        rich_table.add_row(*row, style="bold" if row[0].endswith(" *") else None)
    return rich_table


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
        inside = sorted(file.name for file in path.parent.iterdir())[:8] if path.parent.is_dir() else []
        rule = f"It cannot be read ({error.strerror})" + (
            f"; beside it there are {', '.join(inside)}" if inside else ""
        )
        raise ConfigError(FIELD, str(path), rule, FIX) from error
    except ValueError as error:
        raise ConfigError(FIELD, str(path), f"It is no JSON: {error}", FIX) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(FIELD, str(path), "It has no model_type, which says what family the model is of", FIX)
    return fields
