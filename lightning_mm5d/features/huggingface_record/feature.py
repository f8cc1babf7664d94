"""Puts a record of the Hugging Face models in a module into its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_mm5d.config.errors import private
from lightning_mm5d.features.huggingface_record.record import describe, with_record
from lightning_mm5d.trainer.feature import Feature


class HuggingFaceRecord(Feature):
    """Describes the models of a module once."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._described: tuple[pl.LightningModule, dict[str, Any]] | None = None

    def saving(self, checkpoint: dict[str, Any], module: pl.LightningModule) -> None:
        """Add the record."""
        if self._described is None or self._described[0] is not module:
            # a process that only waited for ranks has a module without a trainer
            trainer = private(module, "_trainer")
            self._described = module, describe(module, getattr(trainer, "datamodule", None))
        with_record(checkpoint, self._described[1])


FEATURE = HuggingFaceRecord
