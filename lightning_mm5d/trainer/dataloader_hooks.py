"""Lets the hooks that make dataloaders see the rank and world size of their replica, and keeps the user's samplers.

A datamodule that shards its data by `trainer.global_rank` in `train_dataloader` then gives all ranks of a replica the
same samples. Lightning asks all these hooks through its data sources, also before a run has been set up.

With one replica the order of the samples is that of one process: there is nothing to share out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl

from lightning_mm5d.config.errors import private
from lightning_mm5d.sharded.removable import Removable


class DataloaderHooks(Removable):
    """Enters a context around each hook that makes dataloaders, until `remove`.

    Args:
        trainer: that asks for dataloaders.
        context: made anew for each call.
    """

    def __init__(self, trainer: pl.Trainer, context: Callable[[], AbstractContextManager[None]]) -> None:
        loops: list[Any] = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop]
        loops += [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
        for source in (private(loop, "_data_source") for loop in loops):
            self.put_attribute(source, "dataloader", _within(context, type(source).dataloader.__get__(source)))


def put_in_no_sampler(trainer: pl.Trainer) -> None:
    """Let Lightning keep the samplers of dataloaders; it would put in a distributed one, which shuffles."""
    connector: Any = private(trainer, "_accelerator_connector")
    private(connector, "use_distributed_sampler")
    connector.use_distributed_sampler = False


def _within(context: Callable[[], AbstractContextManager[None]], hook: Callable[[], Any]) -> Callable[[], Any]:
    def called() -> Any:
        with context():
            return hook()

    return called
