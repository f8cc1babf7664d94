"""Tables and pages of text, kept as cells until it is known where they are shown; numbers of bytes as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_mm5d.config.errors import ConfigError


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


def memory_text(size: int) -> str:
    """Return a number of bytes with its unit: ``1.5 GiB``."""
    power = min((max(size, 1).bit_length() - 1) // 10, 4)
    return f"{size / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_BY_NAME = {name.lower(): size for name, size in _UNITS.items()}
_MOST_BYTES = 2**63


def bytes_of(field: str, amount: object, usual: str = "80GiB") -> int:
    """Return a number of bytes: ``16_000_000_000`` of ``"16GB"``, 1024**3 of ``"1GiB"``, and numbers as they are.

    Args:
        field: path of the field, for the error.
        amount: a number, or a number and a unit.
        usual: what would work, for the error.

    Raises:
        ConfigError: it is neither, or not above 0, or more than any machine has.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)", str(amount).strip())
    size = float(match[1]) * _BY_NAME.get(match[2].lower(), 0) if match else 0.0
    if not 1 <= size < _MOST_BYTES or isinstance(amount, bool):
        rule = f"It is a number of bytes, or a number with one of {', '.join(name for name in _UNITS if name)}"
        raise ConfigError(field, amount, rule, f"Write for instance {usual}")
    return int(size)


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
