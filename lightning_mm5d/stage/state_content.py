"""What plain values, containers, functions and objects hold, written out so that it can be compared and hashed.

`contents` turns a value into nested tuples of strings and numbers. Containers are followed, and objects by what copying
them would take along. A function is its name, code, defaults and closure. Tensors are handed to a function of the
caller. An object that occurs again is written by the order of first sight, so cycles end.

It refuses (`ValueError`) what cannot be copied, such as a lock or an open file: nothing tells what it holds.
"""

from __future__ import annotations

import builtins
import copyreg
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format, range)


class Contents:
    """Writes out values, of which those that occur several times are written once.

    Args:
        tensor: returns what stands for a tensor.
        module: returns what stands for a module.
    """

    def __init__(self, tensor: Callable[[Tensor], Any], module: Callable[[nn.Module], Any]) -> None:
        self._tensor, self._module = tensor, module
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object, whose id must not be taken again

    def of(self, value: Any) -> Any:
        """Return the content of `value`.

        Raises:
            ValueError: it holds something whose content cannot be known.
        """
        if value is None or type(value) in _PLAIN or isinstance(value, (torch.dtype, torch.layout)):
            return type(value).__name__, repr(value)
        if isinstance(value, torch.device):
            return "device", value.type
        if isinstance(value, (type, ModuleType)):
            return "name", getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__)
        if type(value) is tuple:
            return "tuple", *map(self.of, value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, np.ndarray) and value.dtype != object:
            return "array", str(value.dtype), value.shape, value.tobytes()
        if isinstance(value, (set, frozenset)):
            return "set", *sorted(map(repr, map(self.of, value)))
        if type(value) is list:
            return "list", *map(self.of, value)
        if type(value) is dict:
            return "dict", *((self.of(key), self.of(one)) for key, one in value.items())
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, (MethodType, BuiltinFunctionType)):
            owner = getattr(value, "__self__", None)
            return "method", value.__module__, value.__qualname__, None if owner is builtins else self.of(owner)
        return self._copied(value)

    def _function(self, function: FunctionType) -> Any:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return (
            "function",
            function.__module__,
            function.__qualname__,
            self._code(function.__code__),
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            *((name, self.of(_inside(cell))) for name, cell in cells),
        )

    def _code(self, code: CodeType) -> Any:
        constants = [self._code(one) if isinstance(one, CodeType) else self.of(one) for one in code.co_consts]
        return code.co_code, code.co_names, code.co_varnames, tuple(constants)

    def _copied(self, value: Any) -> Any:
        """The content of an object, by the protocol of `copy`."""
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        try:
            known = copyreg.dispatch_table.get(type(value))
            taken = value.__reduce_ex__(2) if known is None else known(value)
        except Exception as error:
            raise ValueError(f"a value of type {name}, whose content cannot be known ({error})") from None
        if isinstance(taken, str):
            return name, taken
        parts = [list(one) if index > 2 and one is not None else one for index, one in enumerate(taken)]
        return name, *map(self.of, parts)


def _inside(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet set
        return None
