"""Checks of `compile`: what is said of it, and what goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError


def check(fields: Mapping[str, Any]) -> None:
    """Refuse what names no backend, or does not go with other fields.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    for name, modality in (fields.get("modalities") or {}).items():
        field, setting = f"modalities.{name}.compute.compile", modality.compute.compile
        if not isinstance(setting, bool | str) or not (isinstance(setting, bool) or setting.strip()):
            rule = "It is true, false or the name of a backend of torch.compile"
            raise ConfigError(field, setting, rule, f"Use {bool(setting)}")
        if setting and modality.tensor.sequence_parallel:
            rule = (
                "With sequence_parallel layers take hidden states that stand for shards of other ranks, and run "
                "uncompiled"
            )
            raise ConfigError(field, setting, rule, "Leave out compile, or sequence_parallel")
