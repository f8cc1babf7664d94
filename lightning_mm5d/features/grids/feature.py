"""Refuses modules that cannot train on a grid."""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.trainer.feature import Feature


class OnGrids(Feature):
    """The fields `Modality.tensor.tp_mode` and `Modality.tensor.tp_depth`; `layers_in_blocks` divides the layers."""

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse manual optimization."""
        for name in () if module.automatic_optimization else plan.division.in_blocks:
            rule = "The ranks of a replica run a step of manual optimization together, and those"
            fix = f"Use automatic optimization, or tp_size with tp_mode 1d alone for {name!r}"
            raise ConfigError("automatic_optimization", False, f"{rule} of {name!r} have parts of its sequences", fix)


FEATURE = OnGrids
