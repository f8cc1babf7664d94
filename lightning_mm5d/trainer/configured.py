"""Runs `configure_model` before a run, on a copy of the module without memory: for plans, and to refuse early."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.weights import DeferredInit
from lightning_mm5d.weights.built_copy import copy_without_memory

_log = logging.getLogger(__name__)
_ATTRIBUTE = "_mm5d_configured"


def is_configured(module: pl.LightningModule) -> bool:
    """Whether a module is as a run would have it: it has no `configure_model`, or is a copy on which it has run."""
    return _ATTRIBUTE in vars(module) or not is_overridden("configure_model", module)


def configured(module: pl.LightningModule, precision: Precision) -> pl.LightningModule:
    """Return `module`, or a copy without memory on which `configure_model` has run.

    `configure_model` runs again where it has run before; Lightning asks that nothing changes then.
    """
    if is_configured(module):
        return module
    made = copy_without_memory(module)
    with kept_random_state(), DeferredInit(), precision.module_init_context():
        made.configure_model()
    vars(made)[_ATTRIBUTE] = True
    return made


def try_configured(module: pl.LightningModule, precision: Precision) -> pl.LightningModule | None:
    """Return what `configured` returns, or None where `configure_model` cannot run yet, as before `prepare_data`."""
    try:
        return configured(module, precision)
    except ConfigError:
        raise
    except Exception as error:  # a user's code
        _log.debug("configure_model is left to the run: %r", error)
        return None
