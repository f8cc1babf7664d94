"""Whether an optimizer's update of a value depends on other values: tried out on small parameters of the same class.

Ranks hold parts of the parameters, with stages, or parts of each, with tensor parallelism. An optimizer that looks at
others, such as a norm over all gradients, would do something else on each rank without a word. A new optimizer of the
same class takes a few steps on two matrices, then again with other gradients for one part; what moves elsewhere shows.

A class that cannot be made from parameters and its own settings, or that needs a closure, is not tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SIZE, _STEPS = 8, 4


class Dependence(NamedTuple):
    """What an update depends on.

    Attributes:
        on_parameters: whether on gradients of other parameters.
        on_elements: whether on gradients of other elements of the same parameter.
    """

    on_parameters: bool
    on_elements: bool


def dependence(optimizer: Optimizer) -> Dependence | None:
    """Return what the updates of an optimizer of this class and settings depend on; None where it cannot be tried."""
    try:
        found = [_of_group(optimizer, group) for group in optimizer.param_groups]
    except Exception:  # whatever a class of somebody else's does with what it did not expect
        return None
    return Dependence(any(one.on_parameters for one in found), any(one.on_elements for one in found))


def _of_group(optimizer: Optimizer, group: Mapping[str, Any]) -> Dependence:
    half = _SIZE // 2
    before = _updated(optimizer, group, lambda grads: grads)
    other = _updated(optimizer, group, lambda grads: grads[1].mul_(1000).add_(1))
    right = _updated(optimizer, group, lambda grads: grads[0][:, half:].mul_(1000).add_(1))
    below = _updated(optimizer, group, lambda grads: grads[0][half:].mul_(1000).add_(1))
    return Dependence(
        on_parameters=not torch.equal(before[0], other[0]),
        on_elements=not torch.equal(before[0][:, :half], right[0][:, :half])
        or not torch.equal(before[0][:half], below[0][:half]),
    )


def _updated(optimizer: Optimizer, group: Mapping[str, Any], change: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    """Return two matrices after some steps of a new optimizer with gradients as `change` leaves them."""
    generator = torch.Generator().manual_seed(0)

    def matrices() -> list[Tensor]:
        return [torch.randn(_SIZE, _SIZE, generator=generator, dtype=torch.float64) for _ in range(2)]

    parameters = [nn.Parameter(matrix) for matrix in matrices()]
    probe = _like(optimizer, group, parameters)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        for _ in range(_STEPS):
            grads = matrices()
            change(grads)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            probe.step()
    return [parameter.detach() for parameter in parameters]


def _like(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a new optimizer of the same class, with the settings of `group`, on the CPU."""
    known = inspect.signature(type(optimizer).__init__).parameters
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    # implementations for a device or a graph update the same, and a warm-up may begin with nothing
    settings |= {key: False for key in ("fused", "capturable") if settings.get(key)}
    if "lr" in settings and (isinstance(settings["lr"], Tensor) or not settings["lr"]):
        settings["lr"] = 0.1
    defaults = {key: settings.get(key, value) for key, value in optimizer.defaults.items() if key in known}
    return type(optimizer)([{**settings, "params": parameters}], **defaults)
