"""Numbers of bytes as people write them. Imports no torch."""

from __future__ import annotations

import re

from lightning_mm5d.config.errors import ConfigError

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
