"""What ``mm5d convert`` prints and writes."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import as_modalities
from lightning_mm5d.schedule import check_fields
from lightning_mm5d.tools.convert.conversion import as_lines, as_yaml, read_configuration


def convert(file: Path, out: Path | None) -> None:
    """Print a configuration of another system as YAML, or write it to `out` and print what became of each knob.

    Raises:
        ConfigError: it is no such configuration, what it asks for cannot work, or `out` cannot be written.
    """
    conversion = read_configuration(file)
    said = {**conversion.strategy, "modalities": as_modalities(conversion.strategy["modalities"])}
    check_fields(said)
    for entry in conversion.of("results"):
        print(f"mm5d: warning: {entry.name}={entry.got!r} has no equal. {entry.about}", file=sys.stderr)
    if out is None:
        print(as_yaml(conversion), end="")
        return
    try:
        out.write_text(as_yaml(conversion), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", str(out), f"It cannot be written: {error.strerror}", "Name another file") from error
    print("\n".join(as_lines(conversion)))
