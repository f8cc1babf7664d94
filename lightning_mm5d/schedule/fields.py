"""Checks of all that a user says to the strategy, as far as neither the model nor the number of ranks matters.

Imports no torch, so that a wrong field is refused before anything slow starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning_mm5d.config.checks import check
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import check_features
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.config.options import BACKENDS, check_options
from lightning_mm5d.schedule.builders import SCHEDULES, check_schedule


def check_fields(fields: Mapping[str, Any], backends: Collection[str] = BACKENDS) -> None:
    """Refuse fields of the strategy that cannot work with any model and number of ranks.

    Args:
        fields: by name; those that are missing have their defaults.
        backends: that torch.distributed knows here.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    schedule, modalities = fields.get("schedule", "1f1b"), fields.get("modalities")
    check_schedule(schedule)
    check(
        {"model": Modality()} if modalities is None else modalities,
        num_microbatches=fields.get("num_microbatches"),
        microbatch_size=fields.get("microbatch_size"),
        schedule=schedule if isinstance(schedule, str) and schedule in SCHEDULES else "own",
        schedules=("own", *SCHEDULES),
    )
    check_options(fields, backends)
    check_features(fields)
    if fields.get("microbatch_size") is not None and schedule not in SCHEDULES:
        rule = "A table or a function is for one number of microbatches, and with a size it follows from each batch"
        raise ConfigError("batching.microbatch_size", fields["microbatch_size"], rule, "Set num_microbatches instead")
