"""A copy of a module as its `configure_model` would build it, without memory, for plans that are made before a run."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_Module = TypeVar("_Module", bound=nn.Module)
_CONTAINERS = (dict, OrderedDict, set, list)


def copy_without_memory(module: _Module) -> _Module:
    """Return modules of the same classes and names, whose tensors are on the meta device; tied ones stay tied.

    The values of all other attributes are shared with `module`; what is set or added on the copy is not there.
    """
    return _copy(module, {})


def _copy(module: _Module, known: dict[int, Any]) -> _Module:
    if id(module) in known:
        found: _Module = known[id(module)]
        return found
    made = known[id(module)] = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(made)[name] = type(value)(value) if type(value) in _CONTAINERS else value
    for name, tensor in module._parameters.items():
        made._parameters[name] = None if tensor is None else _empty(tensor, known)
    for name, buffer in module._buffers.items():
        made._buffers[name] = None if buffer is None else _empty(buffer, known)
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _copy(child, known)
    return made


def _empty(tensor: Tensor, known: dict[int, Any]) -> Any:
    if id(tensor) not in known:
        if is_lazy(tensor) or tensor.is_meta:
            known[id(tensor)] = tensor
        else:
            made: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            known[id(tensor)] = made
    return known[id(tensor)]
