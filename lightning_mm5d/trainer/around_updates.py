"""What features do around the steps of optimizers: the door of the optimization."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch.optim import Optimizer


class SkippedUpdate(Exception):  # noqa: N818 - no error: it ends the optimizer's step
    """Leaves an optimizer's step before it changes anything; raised on all ranks or on none."""


class AroundUpdates:
    """Is called at each step of an optimizer; what a subclass leaves out does nothing."""

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """A training step begins; `optimizers` are all of the trainer's."""

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return what is entered around a step of `optimizer`, in which it gets its gradients."""
        return nullcontext()

    def stepped(self) -> None:
        """An optimizer has stepped."""

    def ready(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        """The gradients of `optimizer` are there, summed over ranks, and it has not stepped.

        Args:
            optimizer: that is about to step.
            is_scaled: whether a scaler looks at the gradients itself, which it lets overflow now and then.

        Raises:
            SkippedUpdate: the optimizer must not step.
        """
