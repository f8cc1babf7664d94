"""Keeps the copies that autocast makes of weights over all microbatches of a step.

Autocast can cast a trained weight once and keep the copy until its outermost context ends. Lightning's context has that
switched off, because copies made for an evaluation have no graph; and it ends with its microbatch. So every microbatch
in flight would keep copies of its own for its backward. Here a context around the step lets all microbatches use one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.remote_value import plain


def kept_casts(device: torch.device) -> AbstractContextManager[Any]:
    """Enter around a training step; autocast is on or off in it as it is outside."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


class CastingOnce:
    """Keeps autocast's copies within the microbatches of training steps, unless these write to trained weights.

    The first microbatch of all keeps none, and shows whether a microbatch writes to weights in place: copies would have
    the values from before. Writes to `parameter.data` do not show.

    Args:
        module: the LightningModule.
        device: where it computes.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._named, self._kind = list(module.named_parameters()), device.type
        self._keeps: bool | None = None  # None before the first microbatch

    @contextmanager
    def entered(self, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Enter what `context` returns around a microbatch of a training step; autocast in it keeps its copies.

        Raises:
            ConfigError: a microbatch wrote to trained weights, and those before it did not.
        """
        with context():
            if not (torch.amp.is_autocast_available(self._kind) and torch.is_autocast_enabled(self._kind)):
                yield
                return
            before = self._versions()
            if self._keeps:
                torch.set_autocast_cache_enabled(True)  # until the context ends, which sets it back
            yield
            written = [name for name, version in self._versions().items() if before.get(name, version) != version]
        if self._keeps and written:
            raise ConfigError(
                "training_step",
                f"a write to {written[0]!r}",
                "Under autocast all microbatches of a step use one copy of each trained weight, and its first "
                "microbatch of the fit wrote to none",
                "Write between steps, as in on_train_batch_start, or use bf16-true with main_params",
            )
        self._keeps = not written

    def _versions(self) -> dict[str, int]:
        with plain():
            return {name: parameter._version for name, parameter in self._named if parameter.requires_grad}
