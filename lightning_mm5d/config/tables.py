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
        numeric, lines = self.numeric, []
        for row in (self.header, *self.rows):
            cells = zip(row, widths, numeric, strict=True)
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


def spans(numbers: Iterable[int], most: int | None = None) -> str:
    """Return ``0-3, 6`` for 0, 1, 2, 3 and 6.

    Args:
        numbers: in any order.
        most: stretches to name; what is left is counted, as in ``0-3, 6 and 5 more``.
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    most = len(runs) if most is None else most
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:most]]
    more = sum(map(len, runs[most:]))
    return ", ".join(shown) + (f" and {more} more" if more else "")
