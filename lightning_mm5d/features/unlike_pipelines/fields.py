"""Checks of what replicas with unlike numbers of microbatches cannot do; `pipelines.py` checks the fields alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import path_of
from lightning_mm5d.features.unlike_pipelines.pipelines import UNLIKE_SCHEDULES

SPEED_SCHEDULES = (*UNLIKE_SCHEDULES, "interleaved", "zbv")
"""The schedules of replicas with speeds."""


def check(fields: Mapping[str, Any]) -> None:
    """Refuse what the strategy says beside pipelines and speeds that passed `check_pipelines`.

    Raises:
        ConfigError: at the first field that does not go with them.
    """
    modalities = fields.get("modalities") or {}
    options = {name: (modality.pipeline.pipelines, modality.pipeline.speeds) for name, modality in modalities.items()}
    name = next((name for name, unlike in options.items() if unlike != (None, None)), None)
    if name is None:
        return
    field = path_of("speeds" if modalities[name].pipeline.pipelines is None else "pipelines")
    reason = f"Replicas may have unlike numbers of microbatches (modalities.{name}.{field})"
    schedule = fields.get("schedule", "1f1b")
    if schedule not in SPEED_SCHEDULES:
        raise ConfigError("schedule", schedule, f"{reason}, of which named schedules know", "Use '1f1b'")
    if fields.get("microbatching", "split") == "loader":
        rule = f"{reason}, and a loader has one batch size for all"
        raise ConfigError("batching.microbatching", "loader", rule, "Use 'split', or a function")
    if fields.get("microbatch_size") is not None:
        rule = f"{reason}, by a number of microbatches"
        raise ConfigError("batching.microbatch_size", fields["microbatch_size"], rule, "Use num_microbatches")
    placement = fields.get("placement")
    if isinstance(placement, list | tuple) and any(isinstance(axis, str) for axis in placement):
        rule = f"Replicas may have unlike pipelines (modalities.{name}.{field}), which form no grid"
        raise ConfigError("placement", list(placement), rule, "Leave it unset, or give a rank for each position")
