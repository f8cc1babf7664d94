"""Prints pages: tables that fit a terminal, and plain text without colours and in full length for anything else.

Numbers of bytes as people write them. Imports no torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.tables import Page, Table, as_text

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_BY_NAME = {name.lower(): size for name, size in _UNITS.items()}


def bytes_of(field: str, said: object) -> int:
    """Return a number of bytes: ``16_000_000_000`` of ``"16GB"``, 1024**3 of ``"1GiB"``, and numbers as they are.

    Args:
        field: path of the field, for the error.
        said: a number, or a number and a unit.

    Raises:
        ConfigError: it is neither, or not above 0.
    """
    text = str(said).strip()
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)", text)
    size = int(float(found[1]) * _BY_NAME[found[2].lower()]) if found and found[2].lower() in _BY_NAME else 0
    if size < 1 or isinstance(said, bool):
        rule = f"It is a number of bytes, or a number with one of {', '.join(name for name in _UNITS if name)}"
        raise ConfigError(field, said, rule, "Write for instance 80GiB")
    return size


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
        print(as_text(page))
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


def warn(sentences: Iterable[str]) -> None:
    """Print a line per sentence on standard error."""
    for sentence in sentences:
        print(f"mm5d: warning: {sentence}", file=sys.stderr)


def _fitting(table: Table) -> object:
    """The table for rich, which folds cells where the terminal is too narrow and truncates none."""
    from rich.table import Table as RichTable

    made = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, right in zip(table.header, table.numeric, strict=True):
        made.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*row, style="bold" if row[0].endswith(" *") else None)
    return made
