"""Prints pages: tables that fit a terminal, and plain text without colours and in full length for anything else."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from lightning_mm5d.config.tables import Page, Table, as_text


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
