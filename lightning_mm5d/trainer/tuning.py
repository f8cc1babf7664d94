"""Lightning's tuners: how a run ends that a `Tuner` began, and what its ranks send back of what they have found.

A `Tuner` ends its run by an exception, and Lightning handles that in the process that called `fit`. Where ranks are
processes of their own, each ends its run itself, and what was found goes back to the callback and the module of the
process that waits for them. A learning rate is searched on any layout. Batch sizes are searched by one process alone,
as with Lightning's own distributed strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.tuner import lr_finder
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr

from lightning_mm5d.config.errors import ConfigError, private


def check_tuners(callbacks: Sequence[Callback], world_size: int) -> None:
    """Refuse to search a batch size on several ranks, of which one alone may run out of memory.

    Raises:
        ConfigError: there is a `BatchSizeFinder`.
    """
    if world_size > 1 and any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        rule = f"Batch sizes are searched on one process, and there are {world_size} ranks"
        fix = "Leave it out, and ask `mm5d plan` how much memory a batch takes on each rank"
        raise ConfigError("callbacks", BatchSizeFinder.__name__, rule, fix)


def end_tuning(trainer: Trainer) -> None:
    """End a run that a tuner has left, as Lightning does in the process that called `fit`; collective."""
    private(call, "_call_teardown_hook")(trainer)
    private(trainer, "_teardown")()
    trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None


def found_by_tuner(trainer: Trainer) -> Any:
    """Return what the callback of a `Tuner` has found, None without one."""
    callback = _callback_of_tuner(trainer)
    if callback is None:
        return None
    return callback.optimal_lr if isinstance(callback, LearningRateFinder) else callback.optimal_batch_size


def take_found(trainer: Trainer, found: Any) -> None:
    """Give the callback of a `Tuner`, and the module of this process, what was found in another one."""
    module, callback = trainer.lightning_module, _callback_of_tuner(trainer)
    if isinstance(callback, LearningRateFinder):
        callback.optimal_lr = found
        rate = found.suggestion() if private(callback, "_update_attr") else None
        if rate is not None:
            chosen = private(callback, "_attr_name")
            lightning_setattr(module, private(lr_finder, "_determine_lr_attr_name")(module, chosen), rate)
    elif callback is not None:
        callback.optimal_batch_size = found
        if lightning_hasattr(module, private(callback, "_batch_arg_name")):
            lightning_setattr(module, private(callback, "_batch_arg_name"), found)


def _callback_of_tuner(trainer: Trainer) -> LearningRateFinder | BatchSizeFinder | None:
    for callback in vars(trainer)["callbacks"]:
        if isinstance(callback, LearningRateFinder | BatchSizeFinder) and private(callback, "_early_exit"):
            return callback
    return None
