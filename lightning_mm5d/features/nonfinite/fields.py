"""Checks of `on_nonfinite`: one of three words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.options import check_choice

REACTIONS = ("propagate", "raise", "skip")


def check(fields: Mapping[str, Any]) -> None:
    """Refuse any other word.

    Raises:
        ConfigError: it is none of them.
    """
    check_choice("on_nonfinite", fields.get("on_nonfinite", "propagate"), REACTIONS)
