"""Which dtype main parameters have, and whether the trainer's precision leaves them a use."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data_parallel.main_parameters import computing_dtypes

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


def main_dtype(said: str | None) -> torch.dtype | None:
    """Return the dtype that ``main_params`` names."""
    return None if said is None else _DTYPES[said]


def check_main_params(said: str | None, module: pl.LightningModule, precision: Precision) -> None:
    """Refuse main parameters that would be no wider than what layers compute in, and manual optimization.

    Raises:
        ConfigError: no parameter is narrower; or the module optimizes manually.
    """
    dtype = main_dtype(said)
    if dtype is None:
        return
    if not module.automatic_optimization:
        rule = (
            "Manual optimization runs its own backward, and parameters show what layers compute with inside a schedule"
        )
        fix = "Use automatic optimization, or leave main_params unset"
        raise ConfigError("automatic_optimization", False, rule, fix)
    computes = _TRUE.get(str(precision.precision))
    found = {computes or p.dtype for p in module.parameters() if p.is_floating_point()}
    found |= set(computing_dtypes(module).values())
    if not any(one.itemsize < dtype.itemsize for one in found):
        held = ", ".join(sorted(str(one).removeprefix("torch.") for one in found)) or "no floating-point"
        rule = f"Main parameters are wider than what layers compute in, and the module has {held} parameters"
        raise ConfigError(
            "numerics.main_params", said, rule, 'Use Trainer(precision="bf16-true"), or leave main_params unset'
        )
