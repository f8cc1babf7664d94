"""Hooks on parameters: called once for each batch, with the gradient of all its microbatches, replicas and stages.

A schedule runs a backward for each microbatch, so autograd would call a hook as often, with a part of the gradient each
time: a hook that clamps or adds noise would give another result than on one process.

Gradients that a schedule computed inside the step are published at the backward that Lightning calls after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import private
from lightning_mm5d.sharded.remote_value import plain


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


_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class ParameterHooks:
    """Knows whether a module's parameters have hooks, which a parameter that leaves this rank does not take along.

    Args:
        module: full, before any of its parameters leaves this rank.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._from_start = any(_found(parameter) for parameter in module.parameters())

    def exist(self) -> bool:
        """Return whether any parameter has hooks, also one of other ranks: the same on all ranks."""
        with plain():
            return self._from_start or any(_found(parameter) for parameter in self._module.parameters())


@contextmanager
def set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Enter around backwards that give parts of the gradients of `parameters`: none of their hooks is called."""
    aside = [(hooks, dict(hooks)) for parameter in parameters for hooks in _found(parameter)]
    for hooks, _ in aside:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in aside:
            registered = dict(hooks)  # by the step
            hooks.clear()
            hooks.update(before | registered)


@contextmanager
def called(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Call the hooks of `parameters` as autograd would; inside, their new gradients are added to older ones."""
    fresh = [parameter for parameter in parameters if parameter.grad is not None]
    before, after = _KINDS
    for parameter in fresh:
        for hook in list((private(parameter, before) or {}).values()):
            changed = hook(parameter.grad)
            if changed is not None:
                parameter.grad = changed
    yield
    for parameter in fresh:
        for hook in list((private(parameter, after) or {}).values()):
            hook(parameter)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks of any kind on its gradient."""
    return bool(_found(parameter))


def _found(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """The hooks of a parameter: one dict for each kind that it has."""
    return [hooks for kind in _KINDS if (hooks := private(parameter, kind))]
