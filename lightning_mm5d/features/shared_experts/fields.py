"""Checks of `expert_tp_size`, over which each expert is divided or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError, one_of


def check(fields: Mapping[str, Any]) -> None:
    """Refuse other sizes than 1 and `tp_size`.

    Raises:
        ConfigError: at the first modality that has another one.
    """
    for name, modality in (fields.get("modalities") or {}).items():
        within, tp_size = modality.tensor.expert_tp_size, modality.tp_size
        if within != 1 and (modality.ep_size == 1 or within != tp_size):
            rule = f"Each expert is divided as other layers are, over tp_size={tp_size} ranks, or not at all"
            if modality.ep_size == 1:
                rule = "With ep_size=1 experts are divided over tp_size ranks, as other layers are"
            fix = "Leave it unset" if modality.ep_size == 1 else f"Use {one_of(sorted({1, tp_size}))}"
            raise ConfigError(f"modalities.{name}.tensor.expert_tp_size", within, rule, fix)
