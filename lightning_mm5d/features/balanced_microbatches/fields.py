"""Checks of `batching.balance`: samples can be dealt where batches are split here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError


def check(fields: Mapping[str, Any]) -> None:
    """Refuse what is neither true nor false, and batches that somebody else divides.

    Raises:
        ConfigError: names `batching.balance`.
    """
    balance = fields.get("balance", False)
    if not isinstance(balance, bool):
        raise ConfigError("batching.balance", balance, "It is true or false", "Use true, or leave it out")
    if balance and fields.get("microbatching", "split") != "split":
        divider = "microbatching='loader'" if fields["microbatching"] == "loader" else "a function that splits batches"
        rule = f"Samples are dealt to microbatches where the strategy splits batches, and here is {divider}"
        raise ConfigError("batching.balance", balance, rule, "Leave out microbatching, or balance")
