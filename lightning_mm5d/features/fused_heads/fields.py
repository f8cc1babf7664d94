"""Checks of `Modality.compute.fused_linear_cross_entropy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import decoders_of, main_modality_of


def check(fields: Mapping[str, Any]) -> None:
    """Refuse what is no bool, and a head of an encoder, whatever the model.

    Raises:
        ConfigError: at the first modality that cannot have it.
    """
    modalities = fields.get("modalities") or {}
    for name, modality in modalities.items():
        field = f"modalities.{name}.compute.fused_linear_cross_entropy"
        fuses = modality.compute.fused_linear_cross_entropy
        if not isinstance(fuses, bool):
            raise ConfigError(field, fuses, "It is true or false", f"Use {bool(fuses)}")
        if fuses and name not in (main_modality_of(modalities), *decoders_of(modalities)):
            rule = "It fuses a head with its loss, and an encoder has none"
            raise ConfigError(field, fuses, rule, "Leave it unset here")
