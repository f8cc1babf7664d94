"""A converted configuration as YAML of a LightningCLI, with what became of each knob as comments above."""

from __future__ import annotations

import textwrap
from typing import Any

import yaml

from lightning_mm5d.tools.convert.knobs import Conversion, Effect, Entry

_HEADINGS: tuple[tuple[Effect, str], ...] = (
    ("mapped", "Converted"),
    ("results", "No equal, and results depend on it"),
    ("costs", "No equal; time or memory may differ"),
    ("elsewhere", "Said elsewhere: in the model, the data or the Trainer"),
    ("always", "Nothing to say"),
)
_WIDEST = 60


def as_yaml(conversion: Conversion) -> str:
    """Return the configuration; its comments list every given knob."""
    settings: dict[str, Any] = {
        "trainer": {
            **conversion.trainer,
            "strategy": {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": conversion.strategy},
        }
    }
    listed = "".join(f"# {line}\n" if line else "#\n" for line in as_lines(conversion))
    return f"{listed}{yaml.safe_dump(settings, sort_keys=False)}"


def as_lines(conversion: Conversion) -> list[str]:
    """Return a line for every given knob, below headings that say what became of them."""
    lines = [f"From {conversion.source}"]
    for effect, heading in _HEADINGS:
        entries = conversion.of(effect)
        if entries:
            lines += ["", f"{heading}:"]
        if effect == "elsewhere":
            for about in dict.fromkeys(entry.about for entry in entries):
                names = ", ".join(_one_line(entry.name) for entry in entries if entry.about == about)
                lines += [f"  {part}" for part in textwrap.wrap(f"{names}  ({about})", 110)]
        else:
            lines += [f"  {_line(entry)}" for entry in entries]
    return lines


def _line(entry: Entry) -> str:
    said = f"{_one_line(entry.name)}={_shown(entry.got)}"
    if entry.fields:
        said += " -> " + ", ".join(f"{name}: {_shown(value)}" for name, value in entry.fields.items())
    return _one_line(f"{said}  ({entry.about})" if entry.about else said)


def _shown(value: Any) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
