"""Checks of what `checkpoint` says: words, numbers, and what goes together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.options import check_choice

CHOICES = {"checkpoint_format": ("full", "sharded"), "on_corrupt_checkpoint": ("raise", "previous")}


def check(fields: Mapping[str, Any]) -> None:
    """Refuse other words, and saves in a thread of what one rank writes.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    for name, known in CHOICES.items():
        check_choice(name, fields.get(name, known[0]), known)
    wanted = fields.get("async_checkpoint", False)
    if not isinstance(wanted, bool):
        raise ConfigError("checkpoint.async_checkpoint", wanted, "It is true or false", "Use True or False")
    if wanted and fields.get("checkpoint_format", "full") != "sharded":
        rule = "Only sharded checkpoints are written while training goes on"
        fix = 'Set checkpoint_format="sharded" too, or leave it unset'
        raise ConfigError("checkpoint.async_checkpoint", wanted, rule, fix)
    steps = fields.get("in_memory_every_n_steps")
    if steps is not None and (type(steps) is not int or steps < 1):
        rule = "It is a number of steps from 1 on"
        raise ConfigError("checkpoint.in_memory_every_n_steps", steps, rule, "Use 1, or leave it unset")
