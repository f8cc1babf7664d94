"""One call of an encoder for several microbatches: what the field may say. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError, nearest, one_of


def check(fields: Mapping[str, Any]) -> None:
    """Refuse numbers that are none, or do not divide that of microbatches.

    Raises:
        ConfigError: names the field.
    """
    count = fields.get("num_microbatches") or (1 if fields.get("microbatch_size") is None else None)
    for name, modality in (fields.get("modalities") or {}).items():
        field, size = f"modalities.{name}.pipeline.microbatches_per_call", modality.pipeline.microbatches_per_call
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(field, size, "It must be a whole number of at least 1", "Use 1, or leave it unset")
        if isinstance(count, int) and count % size:
            near = nearest(size, lambda n: count % n == 0)
            raise ConfigError(field, size, f"It divides num_microbatches={count}", f"Use {one_of(near)}")
