"""Refuses encoders whose features change, and stands before the boundaries of the others."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.cached_features.cached_features import CachedFeatures
from lightning_mm5d.partition.parts import is_in
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.stage import Runtime
from lightning_mm5d.trainer.feature import Feature

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class CacheFeatures(Feature):
    """The field `Modality.cache_features`: the folder in which features are kept."""

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse encoders whose features change from step to step.

        Random numbers that no dropout module draws show in the first call (`CachedFeatures`).

        Raises:
            ConfigError: parameters are trained, or a dropout or batch norm is in training mode.
        """
        for name, modality in plan.modalities.items():
            if modality.cache_features is None:
                continue
            field, got = f"modalities.{name}.cache_features", modality.cache_features
            owned = [full for full, keys in plan.partition.owners.items() if any(key.modality == name for key in keys)]
            parameters = dict(module.named_parameters(remove_duplicate=False))
            trained = [full for full in owned if full in parameters and parameters[full].requires_grad]
            if trained:
                count = sum(full in parameters for full in owned)
                rule = (
                    f"Features of a frozen encoder are kept, and {len(trained)} of the {count} parameters of {name} are"
                )
                fix = "Freeze them with requires_grad_(False), or let module and boundary name the part that is frozen"
                raise ConfigError(field, got, f"{rule} trained, {trained[0]} among them", fix)
            owns = plan.partition.encoders[name].owns
            for path, part in module.named_modules():
                is_random = isinstance(part, _DROPOUTS) and part.p > 0
                if (
                    part.training
                    and (is_random or isinstance(part, _BATCH_NORMS))
                    and any(is_in(path, one) for one in owns)
                ):
                    where = f"{path} ({type(part).__name__})"
                    rule = f"{where} is in training mode, and gives an image other features each time"
                    fix = f"Call eval() on {owns[0]} in __init__ or configure_model, which Lightning keeps"
                    raise ConfigError(field, got, rule, fix)

    def cut(self, runtime: Runtime, plan: Plan, device: torch.device) -> Callable[[], None] | None:
        """Look calls of boundaries up before they are computed, and before any patch says that another rank does."""
        if all(modality.cache_features is None for modality in plan.modalities.values()):
            return None
        return CachedFeatures(runtime, plan.modalities, device).remove


FEATURE = CacheFeatures
