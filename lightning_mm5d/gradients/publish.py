"""Gradients that a schedule computed inside the step are published at the backward that Lightning calls after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Publish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, publish: Callable[[Tensor], None]) -> Tensor:
        ctx.publish = publish
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[None, None, None]:
        ctx.publish(gradient[0])
        return None, None, None


def published(value: Tensor, publish: Callable[[Tensor], None]) -> Tensor:
    """Return `value` as the result of a computation whose backward calls ``publish(gradient)``.

    Lightning runs the step, then zeroes gradients, then calls backward; a whole schedule runs inside the step. So its
    gradients wait until that backward, and accumulation, scaling and a user's own `backward` work as ever.

    Args:
        value: 0-dim loss.
        publish: gets the 0-dim gradient of whatever is computed from the result.
    """
    anchor = torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)
    return _Publish.apply(anchor, value.detach(), publish)


class _Skipped(Tensor):
    """A loss of which Lightning, which shows callbacks a clone, shows none."""

    def clone(self, **_: Any) -> None:  # type: ignore[override]
        return None


def skipped(device: torch.device, publish: Callable[[Tensor], None] = lambda _: None) -> Tensor:
    """Return a loss of zero for a batch that is skipped, which callbacks do not see.

    Lightning raises where a step returns None and there are several processes.

    Args:
        device: of the loss.
        publish: as of `published`; others of the accumulation, or of the replicas, may have gradients.
    """
    return published(torch.zeros((), device=device), publish).as_subclass(_Skipped)
