"""Refuses objects of the Lightning that is not the strategy's, where a process has two, by what to change.

`config.one_lightning` says when it has. A callback or sampler of the one is not known to the other, which then does
without it in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.trainer.trainer as trainer_module

from lightning_mm5d.config.errors import other_package, private

_PACKAGES = {"lightning", "pytorch_lightning"}
_UNWRAP = "_maybe_unwrap_optimized"


def is_of_other_package(thing: object) -> bool:
    """Whether a class, or the class of an object, derives from one of the Lightning that is not the strategy's."""
    cls = thing if isinstance(thing, type) else type(thing)
    others = _PACKAGES - {pl.Trainer.__module__.partition(".")[0]}
    return any(one.__module__.partition(".")[0] in others for one in cls.__mro__)


def check_package(field: str, things: Iterable[object]) -> None:
    """Refuse objects of the other package.

    Args:
        field: what they are.
        things: objects or classes.

    Raises:
        ConfigError: at the first one.
    """
    for thing in things:
        if is_of_other_package(thing):
            raise other_package(field, (thing if isinstance(thing, type) else type(thing)).__name__)


def explain_other_modules() -> None:
    """Have Lightning's trainer refuse modules of another package, where both are imported, by what to change.

    The trainer looks at a module before its strategy does, and says only that it is no `LightningModule`.
    """
    original = private(trainer_module, _UNWRAP)
    if sys.modules.keys() >= _PACKAGES and not isinstance(original, _Explained):
        setattr(trainer_module, _UNWRAP, _Explained(original))


class _Explained:
    """What a trainer calls first with the module that it is given."""

    def __init__(self, original: Callable[[Any], Any]) -> None:
        self._original = original

    def __call__(self, model: Any) -> Any:
        check_package("module", [model])
        return self._original(model)
