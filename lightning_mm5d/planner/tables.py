"""Tables and pages of text, kept as cells until it is known where they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; its text has numbers to the right and all else to the left."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
        """Make a table; whole numbers get commas, ``1,234``."""
        cells = (tuple(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row) for row in rows)
        return cls(tuple(header), tuple(cells))

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column whether its cells are numbers."""
        return tuple(all(row[column][:1].isdigit() for row in self.rows) for column in range(len(self.header)))

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = []
        for row in (self.header, *self.rows):
            cells = zip(row, widths, self.numeric, strict=True)
            lines.append("  ".join(cell.rjust(n) if right else cell.ljust(n) for cell, n, right in cells).rstrip())
        return "\n".join(lines)


Page = list[str | Table]
"""Paragraphs and tables, one below the other."""


def as_text(page: Page) -> str:
    """The page as plain text, with an empty line between its parts."""
    return "\n\n".join(map(str, page))


def memory_text(size: int) -> str:
    """Return a number of bytes with its unit: ``1.5 GiB``."""
    power = min((max(size, 1).bit_length() - 1) // 10, 4)
    return f"{size / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
