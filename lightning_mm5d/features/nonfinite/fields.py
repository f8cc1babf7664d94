"""Checks of `on_nonfinite`: one of three words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError, did_you_mean

REACTIONS = ("propagate", "raise", "skip")


def check(fields: Mapping[str, Any]) -> None:
    """Refuse any other word.

    Raises:
        ConfigError: it is none of them.
    """
    got = fields.get("on_nonfinite", "propagate")
    if not isinstance(got, str) or got not in REACTIONS:
        raise ConfigError("on_nonfinite", got, f"It is one of {', '.join(REACTIONS)}", did_you_mean(got, REACTIONS))
