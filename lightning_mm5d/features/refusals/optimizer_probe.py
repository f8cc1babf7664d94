"""Whether an optimizer's update of a value depends on other values: tried out on small parameters of the same class.

Ranks hold parts of the parameters, with stages, or parts of each, with tensor parallelism. An optimizer that looks at
others, such as a norm over all gradients, would do something else on each rank without a word. A new optimizer of the
same class takes a few steps on two matrices, then again with other gradients for one part; what moves elsewhere shows.
Where its constructor takes other arguments, a copy of the optimizer takes these steps. An optimizer around others
(lookahead, averaging) depends on what any of them depends on.

It does not try one that needs a closure, or keeps tensors or modules outside of its groups and state.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mm5d.data.random_state import CPU, kept_random_state, seed_all

_SIZE, _STEPS = 72, 4  # optimizers of 8 bits leave tensors of up to 4096 elements as they are
_OURS = ("params", "param_names")


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
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer) and value is not optimizer]
    tried = [_tried(one) for one in (optimizer, *inner)]
    found = [one for one in tried if one is not None]
    # what one part is found to depend on holds, whatever the others do
    if not found or (len(found) < len(tried) and not any(map(any, found))):
        return None
    return Dependence(any(one.on_parameters for one in found), any(one.on_elements for one in found))


def remade(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer | None:
    """Return an optimizer of the same class with other parameters and the settings of `group`, without state.

    None where neither its constructor nor a copy of it takes them.
    """
    for make in (_new, _copied):
        try:
            with redirect_stdout(io.StringIO()):
                return make(optimizer, group, parameters)
        except Exception:  # whatever a class of somebody else's does with what it did not expect
            continue
    return None


def _tried(optimizer: Optimizer) -> Dependence | None:
    groups: list[Mapping[str, Any]] = []
    for group in optimizer.param_groups:
        if not any(_same_settings(group, other) for other in groups):
            groups.append(group)
    for make in (_new, _copied):
        try:
            with kept_random_state(CPU), redirect_stdout(io.StringIO()):
                found = [_of_group(make, optimizer, group) for group in groups]
        except Exception:  # whatever a class of somebody else's does with what it did not expect
            continue
        return Dependence(any(one.on_parameters for one in found), any(one.on_elements for one in found))
    return None


def _same_settings(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    keys = (group.keys() | other.keys()) - set(_OURS)
    return all(key in group and key in other and group[key] is other[key] for key in keys)


def _of_group(make: Callable[..., Optimizer], optimizer: Optimizer, group: Mapping[str, Any]) -> Dependence:
    half = _SIZE // 2

    def updated(change: Callable[[list[Tensor]], Any]) -> list[Tensor]:
        return _updated(lambda parameters: make(optimizer, group, parameters), change)

    before = updated(lambda grads: grads)
    other = updated(lambda grads: grads[1].mul_(1000).add_(1))
    right = updated(lambda grads: grads[0][:, half:].mul_(1000).add_(1))
    below = updated(lambda grads: grads[0][half:].mul_(1000).add_(1))
    return Dependence(
        on_parameters=not torch.equal(before[0], other[0]),
        on_elements=not torch.equal(before[0][:, :half], right[0][:, :half])
        or not torch.equal(before[0][:half], below[0][:half]),
    )


def _updated(make: Callable[[list[nn.Parameter]], Optimizer], change: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    """Return two matrices after some steps of a new optimizer with gradients as `change` leaves them."""
    generator = torch.Generator().manual_seed(0)

    def matrices() -> list[Tensor]:
        return [torch.randn(_SIZE, _SIZE, generator=generator) for _ in range(2)]

    parameters = [nn.Parameter(matrix) for matrix in matrices()]
    seed_all(0)
    probe = make(parameters)
    if callable(train := getattr(probe, "train", None)):  # those without a schedule of their own step in this mode only
        train()
    with torch.enable_grad():
        for _ in range(_STEPS):
            grads = matrices()
            change(grads)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            probe.step()
    return [parameter.detach() for parameter in parameters]


def _new(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a new optimizer of the same class, with the settings of `group`, on the CPU."""
    known = inspect.signature(type(optimizer).__init__).parameters
    settings = _settings(group)
    defaults = {key: settings.get(key, value) for key, value in optimizer.defaults.items() if key in known}
    return type(optimizer)([{**settings, "params": parameters}], **defaults)


def _copied(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer with other parameters, without state and hooks."""
    probe = copy.copy(optimizer)  # of what torch's own state holds
    own = {name: value for name, value in vars(optimizer).items() if name not in vars(probe)}
    # a scheduler puts a `step` in front that belongs to the original
    own = {name: value for name, value in own.items() if not (callable(value) and hasattr(type(optimizer), name))}
    _check_plain(own)
    group = {**_settings(group), "params": parameters}
    vars(probe).update(copy.deepcopy(own), state=defaultdict(dict), param_groups=[group])
    return probe


def _check_plain(value: Any) -> None:
    """Refuse values that may hold a part of the model, whose copy would be large or would change it.

    Raises:
        TypeError: it holds something other than plain values in containers, functions and classes.
    """
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        for one in value:
            _check_plain(one)
    elif not isinstance(value, bool | int | float | str | FunctionType | type | torch.dtype | torch.device | None):
        raise TypeError


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key not in _OURS}
    # implementations for a device or a graph update the same, and a warm-up may begin with nothing
    settings |= {key: False for key in ("fused", "capturable") if settings.get(key)}
    if "lr" in settings and (isinstance(settings["lr"], Tensor) or settings["lr"] == 0):
        settings["lr"] = 0.1
    return settings
