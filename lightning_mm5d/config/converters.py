"""The door for converters of other systems' configurations, so that the strategy names none of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError

Configuration = str | os.PathLike[str] | Mapping[str, Any]
"""A file, or what such a file holds."""
Converter = Callable[[Configuration, Mapping[str, Any]], dict[str, Any]]
"""Called with a configuration and arguments in place of converted ones, returns the arguments of the strategy."""

_CONVERTERS: list[Converter] = []


def register_converter(converter: Converter) -> None:
    """Let `converter` read the configurations of other systems; the one that is registered last does."""
    _CONVERTERS.append(converter)


def converted(config: Configuration, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the strategy that a configuration of another system asks for.

    Args:
        config: of the other system.
        given: arguments that take the place of converted ones.

    Raises:
        ConfigError: the configuration cannot be converted, or nothing is registered that converts it.
    """
    if not _CONVERTERS:
        rule = "Nothing is registered that reads the configurations of other systems"
        raise ConfigError("config", str(config), rule, "Call register_converter, or give the arguments themselves")
    return _CONVERTERS[-1](config, given)
