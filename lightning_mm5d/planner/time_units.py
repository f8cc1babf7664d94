"""What a duration is a number of: milliseconds after a measurement, else a relative unit that says so.

An estimate in multiply-adds looks like a time and is none, so every table, picture and trace names its unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_POWERS = ("", "thousand ", "million ", "billion ", "trillion ")


@dataclass(frozen=True)
class TimeUnit:
    """A unit of time.

    Attributes:
        symbol: stands in the headers of columns.
        meaning: the unit in words.
        factor: a duration times this is a number of units.
    """

    symbol: str
    meaning: str
    factor: float = 1.0

    def fitted(self, longest: float) -> TimeUnit:
        """The unit, or thousands, millions and so on of it, so that `longest` has at most four digits before the dot.

        Milliseconds stay milliseconds.
        """
        power = 0
        while self.symbol != "ms" and longest * self.factor >= 1000 ** (power + 1) * 10 and power < len(_POWERS) - 1:
            power += 1
        words = {"symbol": _POWERS[power] + self.symbol, "meaning": _POWERS[power] + self.meaning}
        return replace(self, **words, factor=self.factor / 1000**power)

    def text(self, duration: float) -> str:
        """The duration as a number of five digits, never with an exponent."""
        number = f"{duration * self.factor:.5g}"
        if "e" not in number:
            return number
        return f"{duration * self.factor:.5f}".rstrip("0").rstrip(".")


SECONDS = TimeUnit("ms", "milliseconds", 1e3)
"""Of durations in seconds; they are shown in milliseconds."""
MILLISECONDS = TimeUnit("ms", "milliseconds")
WORK = TimeUnit("units", "units of work (multiply-adds per token)")
COSTS = TimeUnit("units", "units of the given costs")
