"""What a check found: rows of a table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal


class LackingError(Exception):
    """The machine lacks what a check needs; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure.

    Args:
        name: what was measured.
        value: the figure; None where there is none.
        unit: of the figure; empty for ratios and counts.
        at_most: an aim; the figure must not be above it.
        at_least: an aim; the figure must not be below it.
        note: what a reader should know beside it.
        status: ``"skipped"`` where the machine lacks something, ``"failed"`` where the check did not end well.
    """

    name: str
    value: float | None = None
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""
    status: Literal["measured", "skipped", "failed"] = "measured"

    @property
    def met(self) -> bool | None:
        """Return whether the aim is met; None without an aim, and for what was skipped."""
        if self.status == "failed":
            return False
        if self.status == "skipped" or (self.at_most is None and self.at_least is None):
            return None
        if self.value is None or math.isnan(self.value):
            return False
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return low <= self.value <= high

    @property
    def aim(self) -> str:
        """Return the aim as text."""
        return ", ".join(
            f"{words} {limit:g}"
            for words, limit in (("at most", self.at_most), ("at least", self.at_least))
            if limit is not None
        )

    def as_json(self) -> dict[str, Any]:
        """Return what `json` can write; a value that is not finite becomes text in the note."""
        if self.value is not None and not math.isfinite(self.value):
            return {**asdict(self), "value": None, "note": f"{self.value}; {self.note}".removesuffix("; ")}
        return asdict(self)
