"""What a checkpoint may name beside tensors and plain types, with harmless stand-ins for what could do harm.

NumPy's own functions are not among them, because a crafted dtype makes them read memory that is not theirs: the
stand-ins take elements that hold no references. Neither are enums, whose members a pickle could change for everybody.
"""

from __future__ import annotations

import argparse
import pathlib
import types
from collections import defaultdict
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torchmetrics.utilities.enums
from lightning.fabric.utilities.data import AttributeDict as FabricAttributeDict
from lightning.pytorch.trainer import states
from lightning.pytorch.utilities.parsing import AttributeDict

_LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")
_KINDS = "biufcmMSU"  # of elements that hold no references
_FACTORIES = (bool, int, float, complex, str, list, dict, tuple, set)  # what a defaultdict makes


class AllowedGlobals:
    """What one checkpoint may name while it is loaded, and what its stand-ins become afterwards.

    Attributes:
        names: for `torch.serialization.safe_globals`: classes, or stand-ins with the names that they answer to.
    """

    def __init__(self) -> None:
        self._dicts: dict[int, tuple[dict, Callable[[dict], dict]]] = {}  # plain ones that stand for others
        self._done: dict[int, Any] = {}
        self.names: list[Any] = [
            *(argparse.Namespace, types.SimpleNamespace, timedelta, timezone, datetime, date, time, frozenset, slice),
            (_Dict(self, AttributeDict), "lightning.pytorch.utilities.parsing.AttributeDict"),
            (_Dict(self, AttributeDict), "pytorch_lightning.utilities.parsing.AttributeDict"),
            (_Dict(self, FabricAttributeDict), "lightning.fabric.utilities.data.AttributeDict"),
            (_Dict(self, FabricAttributeDict), "lightning_fabric.utilities.data.AttributeDict"),
            (_Dict(self), "collections.defaultdict"),
            *_paths(),
            *((partial(kind), f"{home}.{kind.__qualname__}") for kind in _enums() for home in _homes(kind)),
            *((partial(_not_called, kind), f"builtins.{kind.__name__}") for kind in _FACTORIES if kind is not set),
            (_no_bytes, "builtins.bytes"),
            (_NumPyType, "numpy.dtype"),
            (_NumPyArray, "numpy.ndarray"),
            *((_new_array, f"numpy.{home}.multiarray._reconstruct") for home in ("core", "_core")),
            *((_number, f"numpy.{home}.multiarray.scalar") for home in ("core", "_core")),
        ]

    def stand_in(self, make: Callable[[dict], dict]) -> dict:
        """Return an empty dict, of which `restored` makes another kind of dict when it is filled."""
        made: dict = {}
        self._dicts[id(made)] = made, make
        return made

    def restored(self, tree: Any) -> Any:
        """Return `tree` with arrays and dicts in the place of their stand-ins."""
        if type(tree) is tuple:
            return tuple(self.restored(value) for value in tree)
        if isinstance(tree, _NumPyArray):
            return tree.array
        if not isinstance(tree, dict | list | argparse.Namespace | types.SimpleNamespace):
            return tree
        if id(tree) not in self._done:
            self._done[id(tree)] = tree  # a container may hold itself
            if isinstance(tree, dict):
                for key, value in tree.items():
                    tree[key] = self.restored(value)
            elif isinstance(tree, list):
                tree[:] = [self.restored(value) for value in tree]
            else:
                self.restored(vars(tree))
            if isinstance(tree, dict) and id(tree) in self._dicts:
                self._done[id(tree)] = self._dicts[id(tree)][1](tree)
        return self._done[id(tree)]


class _Dict:
    """Stands for a subclass of dict, into which torch puts no items.

    Args:
        owner: keeps note of the plain dict that is filled.
        kind: the subclass; None for a defaultdict, which is made from its factory.
    """

    def __init__(self, owner: AllowedGlobals, kind: type[dict] | None = None) -> None:
        self._owner, self._kind = owner, kind
        vars(self)["__new__"] = lambda *_: self()  # torch calls that of a class

    def __call__(self, factory: Any = None, *_: Any) -> dict:
        if self._kind is not None:
            return self._owner.stand_in(self._kind)
        kind = factory.args[0] if isinstance(factory, partial) and factory.func is _not_called else factory
        if kind is not None and kind not in _FACTORIES:
            raise ValueError(f"a defaultdict of a checkpoint makes {kind!r}")
        return self._owner.stand_in(partial(defaultdict, kind))


def _paths() -> list[Any]:
    """Return paths, under the names of Python 3.13 too; those of another system are pure ones."""
    found = list[Any]()
    for kind in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
        pure = pathlib.PurePosixPath if "Posix" in kind.__name__ else pathlib.PureWindowsPath
        here = kind if kind is type(pathlib.Path()) else pure
        found += [(here, f"pathlib{home}.{kind.__name__}") for home in ("", "._local")]
    return found


def _enums() -> list[type[Enum]]:
    modules = (states, torchmetrics.utilities.enums)
    values = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return [value for value in values if issubclass(value, Enum) and len(value)]


def _homes(kind: type) -> set[str]:
    """Return the modules that an enum may be said to be of: Lightning has two names."""
    found = kind.__module__
    return {found, *(f"{name}.trainer.states" for name in _LIGHTNINGS if found == states.__name__)}


def _not_called(kind: type, *_: Any) -> None:
    raise ValueError(f"a checkpoint calls {kind.__name__}")  # it may only name it, for a defaultdict


def _no_bytes() -> bytes:
    return b""  # others are pickled as text


class _NumPyType:
    """A NumPy dtype as it is pickled: its letters, then its byte order."""

    def __init__(self, letters: str, *_: Any) -> None:
        self.dtype = _plain(np.dtype(letters))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order, units = state[1], state[8:]
        if order in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(order)
        if units and self.dtype.kind in "mM":
            _, (unit, count, *_) = units[0]
            unit = unit.decode() if isinstance(unit, bytes) else unit
            self.dtype = _plain(np.dtype(f"{self.dtype.str[:3]}[{int(count)}{unit}]"))


class _NumPyArray:
    """A NumPy array as it is pickled: an empty one, then its content."""

    array = np.zeros(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, data = state
        flat = np.frombuffer(data, _dtype(kind)).copy()
        self.array = flat.reshape(shape, order="F" if is_fortran else "C")


def _new_array(*_: Any) -> _NumPyArray:
    return _NumPyArray()


def _number(kind: Any, data: bytes) -> Any:
    return np.frombuffer(data, _dtype(kind))[0]


def _dtype(kind: Any) -> np.dtype:
    if not isinstance(kind, _NumPyType):
        raise ValueError("an array of a checkpoint has no dtype")
    return kind.dtype


def _plain(dtype: np.dtype) -> np.dtype:
    if dtype.kind not in _KINDS:
        raise ValueError(f"a checkpoint holds arrays of {dtype}, whose elements could hold references")
    return dtype
