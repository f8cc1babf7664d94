"""What belongs to Lightning and torchmetrics in a user's module: below the trainer, only this file tells it apart."""

from __future__ import annotations

from typing import Any, TypeGuard

import lightning.pytorch as pl
from torch import nn
from torchmetrics import Metric, MetricCollection

_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))


def is_metric(module: object) -> TypeGuard[Metric]:
    """Whether a module is a metric; a collection of metrics is none."""
    return isinstance(module, Metric)


def holds_metrics(module: object) -> bool:
    """Whether a module is a metric or a collection of metrics."""
    return isinstance(module, (Metric, MetricCollection))


def is_lightnings(module: nn.Module, name: str) -> bool:
    """Whether Lightning keeps an attribute of `module` for itself, such as its trainer."""
    return isinstance(module, pl.LightningModule) and name in _OF_LIGHTNING


def hyperparameters(module: nn.Module) -> dict[str, Any] | None:
    """Return the hyperparameters of a LightningModule; None for other modules."""
    return dict(module.hparams) if isinstance(module, pl.LightningModule) else None
