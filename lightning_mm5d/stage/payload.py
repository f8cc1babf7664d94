"""Pytrees that travel between ranks: taken apart into a description and a list of tensors, and put together again.

The description is plain JSON, so that no peer's bytes are ever unpickled. Each distinct tensor appears once, however
often the tree holds it. Containers are dicts, lists, tuples (named ones too) and dataclasses or Hugging Face outputs,
whose class this process must have imported already.

It refuses trees with other objects in them, by name.
"""

from __future__ import annotations

import base64
import enum
import pathlib
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.sharded.tensor import Group, NotYetComputed, Sharded, from_local
from lightning_mm5d.stage.view import StageError

Path = tuple[str | int, ...]
_VALUES = (bool, int, float, str, bytes, pathlib.PurePath, np.generic, enum.Enum)
_PLAIN = ("builtins", "collections", "lightning_mm5d")
"""whose lists, tuples and dicts cross as plain ones"""
_CROSSING = (tuple, list, dict, enum.Enum)


PARTS = ("boundaries", "calls", "taps", "writes", "grads", "remote")
"""What a description of a payload lists."""


@dataclass
class Payload:
    """One message between stages.

    Attributes:
        meta: JSON description; which tensors carry a gradient is part of it.
        tensors: the tensors that it refers to by position.
        local: positions of those that are this rank's shard of a sharded tensor; all others are equal on all ranks of
            the stage.
        has_values: whether plain values travel beside the tensors.
    """

    meta: dict[str, Any]
    tensors: list[Tensor] = field(default_factory=list)
    local: frozenset[int] = frozenset()
    has_values: bool = False


class NotSent:
    """Stands for a value of a result that cannot cross to other ranks, such as a cache; any use of it raises.

    Args:
        what: its name and type, for the message.
    """

    def __init__(self, what: str) -> None:
        self.__dict__["what"] = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StageError(
            f"{self.what} cannot be sent to other ranks, and the step uses it: use tensors of the result, or give "
            "both modalities the same ranks with colocate_with"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        values = [value for arg in args for value in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        return next(value for value in (*values, *(kwargs or {}).values()) if isinstance(value, cls)).values

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return bool(self.is_set)

    def __len__(self) -> int:
        return int(self.length)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __getitem__(self, key: Any) -> Any:
        return self.items[key]


def sendable(name: str, value: Any) -> Any:
    """Return a value of the result `name`, or what stands for it on other ranks where it cannot cross."""
    try:
        Packer().describe(value)
    except ValueError:
        where = " within a function" if "<locals>" in type(value).__qualname__ else ""
        return NotSent(f"{name}, of type {type(value).__name__}{where},")
    return value


def encoded(value: Any, where: str) -> Any:
    """Return `value` as it crosses to other ranks; what cannot is a `NotSent`."""
    if isinstance(value, Tensor):
        full = unsharded(value)
        sent = full.layout == torch.strided and not is_remote(full)
        return full.detach().clone() if sent else NotSent(f"{where}, which this rank does not have in full,")
    if isinstance(value, np.ndarray):
        return value.copy() if value.dtype.kind in "biufcUS" else value.tolist()
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        plain = {key: encoded(inner, where) for key, inner in value.items()}
        return plain if type(value).__module__ in ("builtins", "collections") else _sendable_value(value, where)
    if type(value) in (list, tuple, deque):
        return (tuple if type(value) is tuple else list)(encoded(element, where) for element in value)
    return _sendable_value(value, where)


def _sendable_value(value: Any, where: str) -> Any:
    is_local = "<locals>" in type(value).__qualname__
    return NotSent(f"{where}, of type {type(value).__name__},") if is_local else sendable(where, value)


def with_sendable_fields(name: str, result: Any) -> Any:
    """Return the result `name`, with what stands for them in place of those of its fields that cannot cross."""
    if not isinstance(result, Mapping):
        return result
    sent = {key: sendable(f"{name}().{key}", value) for key, value in result.items()}
    if all(value is result[key] for key, value in sent.items()):
        return result
    return type(result)(**sent) if all(isinstance(key, str) for key in sent) else sent


class UnsendableError(ValueError):
    """A tree holds a value that cannot cross to other ranks.

    Args:
        kind: name of its type.

    Attributes:
        path: of the value in the tree.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind, self.path = kind, list[Any]()

    def __str__(self) -> str:
        names = ".".join(step for step in self.path if isinstance(step, str))
        fix = ". Call the model with use_cache=False, or return its logits" if self.kind.endswith("Cache") else ""
        return (
            f"a value of type {self.kind}{f' in {names!r}' if names else ''} cannot be sent to other ranks; tensors, "
            f"arrays, numbers, strings, bytes, paths, dicts, lists, tuples, sets and dataclasses of these can{fix}"
        )


class Packer:
    """Collects trees into one list of distinct tensors.

    Args:
        keeps_sharded: whether sharded tensors stay so: the local one is in the list; else they are taken as tensors.
        crosses: whether descriptions go to other ranks; else they hold classes themselves.

    Attributes:
        tensors: the list.
        local: positions of the local tensors of sharded ones.
        has_values: whether a description holds plain values other than None.
    """

    def __init__(self, *, keeps_sharded: bool = False, crosses: bool = True) -> None:
        self._keeps_sharded, self._crosses = keeps_sharded, crosses
        self.tensors: list[Tensor] = []
        self.local: set[int] = set()
        self.has_values = False
        self._index: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id is taken again when its tensor is gone
        self._open: set[int] = set()  # ids of the containers around what is described
        self._is_beside = False

    def add(self, tensor: Tensor) -> int:
        """Return the position of `tensor`, the same for the same tensor."""
        if id(tensor) not in self._index:
            self._index[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._index[id(tensor)]

    def describe(self, tree: Any) -> Any:
        """Return the JSON description of `tree`.

        Raises:
            ValueError: it holds something that is neither a container, a tensor or array, a path nor a plain value.
        """
        if self._keeps_sharded and isinstance(tree, Sharded):
            return self._describe_sharded(tree)
        if isinstance(tree, Tensor):
            if tree.layout != torch.strided:
                kind = str(tree.layout).removeprefix("torch.")
                raise ValueError(f"a tensor of layout {kind} cannot cross from one rank to another: use its to_dense()")
            return {"t": self.add(tree)}
        if tree is None:
            return None
        self.has_values = self.has_values or isinstance(tree, _VALUES)
        if isinstance(tree, enum.Enum):  # also one that is a text or a number, or `is` would no longer find it
            return {"e": self._class(tree), "n": tree.value if isinstance(tree, enum.Flag) else tree.name}
        if isinstance(tree, (bool, int, float, str)):
            return tree
        if isinstance(tree, pathlib.PurePath):
            return {"f": str(tree)}
        if isinstance(tree, bytes):
            return {"b": base64.b64encode(tree).decode()}
        if isinstance(tree, set):
            return {"s": [self.describe(value) for value in tree]}
        if isinstance(tree, np.generic):
            return tree.item()
        if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufcUS":
            is_text = tree.dtype.kind in "US"
            return {"a": self.describe(tree.tolist()) if is_text else self.add(torch.from_numpy(np.array(tree)))}
        if isinstance(tree, NotSent):
            return {"x": tree.what}
        if isinstance(tree, torch.Size):
            return {"u": list(tree)}
        if isinstance(tree, torch.dtype):
            return {"y": str(tree).removeprefix("torch.")}
        if id(tree) in self._open:
            raise UnsendableError(f"{type(tree).__name__}, which holds itself,")
        self._open.add(id(tree))
        try:
            return self._describe_container(tree)
        finally:
            self._open.remove(id(tree))

    def _describe_container(self, tree: Any) -> Any:
        if is_dataclass(tree) and not isinstance(tree, type):
            if isinstance(tree, Mapping):
                return {"c": self._class(tree), "d": [[key, self._entry(key, value)] for key, value in tree.items()]}
            names = [f.name for f in fields(tree) if hasattr(tree, f.name)]
            values = [[name, self._entry(name, getattr(tree, name))] for name in names]
            return {"c": self._class(tree), "d": values + self._beside(tree, names)}
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            named = zip(tree._fields, tree, strict=True)
            return {"c": self._class(tree), "l": [self._entry(key, value) for key, value in named]}
        if isinstance(tree, (list, tuple)):
            values = [self.describe(value) for value in tree]
            return {"u" if isinstance(tree, tuple) else "l": values, **self._kind(tree)}
        if isinstance(tree, Mapping):
            return {"d": [[_key(key), self._entry(key, value)] for key, value in tree.items()], **self._kind(tree)}
        raise UnsendableError(type(tree).__name__)

    def _entry(self, key: Any, value: Any) -> Any:
        """The description of a value in a container, which an error names."""
        try:
            return self.describe(value)
        except UnsendableError as error:
            error.path.insert(0, key)
            raise

    def _kind(self, tree: Any) -> dict[str, Any]:
        """Return the class of a list, tuple or dict of a user's own, and what the instance holds beside its elements.

        Nothing for other ones, and for one whose class is within a function, or makes entries by itself, which is a
        plain one elsewhere.
        """
        kind = type(tree)
        is_own = isinstance(tree, (list, tuple, dict)) and kind.__module__.partition(".")[0] not in _PLAIN
        if not is_own or isinstance(tree, defaultdict) or (self._crosses and "<locals>" in kind.__qualname__):
            return {}
        return {"k": self._class(tree), "v": None if getattr(tree, "__dict__", None) is tree else self._beside(tree)}

    def _beside(self, tree: Any, names: Collection[str] = ()) -> list[list[Any]]:
        """What an instance holds beside its elements, or the fields of these names."""
        others = getattr(tree, "__dict__", {}).items()
        return [[name, self._attribute(name, value)] for name, value in others if name not in names]

    def _attribute(self, name: str, value: Any) -> Any:
        """The description of a value beside fields; of what is beside the fields of that one, containers do not cross.

        Objects that refer to each other would else be described along each path from one to another.
        """
        count, is_outer = len(self.tensors), not self._is_beside
        try:
            if not (is_outer or value is None or isinstance(value, (Tensor, *_VALUES))):
                raise UnsendableError(type(value).__name__)
            self._is_beside = True
            return self.describe(value)
        except ValueError:
            del self.tensors[count:]
            self._index = {key: index for key, index in self._index.items() if index < count}
            self.local = {index for index in self.local if index < count}
            return {"x": f"{name}, of type {type(value).__name__},"} if self._crosses else {"o": value}
        finally:
            self._is_beside = not is_outer

    def _class(self, tree: Any) -> str | type:
        if not self._crosses:
            return type(tree)
        module, name = type(tree).__module__, type(tree).__qualname__
        if "<locals>" in name:
            raise ValueError(f"{name} is a class within a function, which other ranks do not find: define it outside")
        return f"{module}:{name}"

    def _describe_sharded(self, tensor: Sharded) -> Any:
        if id(tensor) not in self._index:
            self._alive.append(tensor)
            self._index[id(tensor)] = self.add(tensor.local if tensor.travels_local else tensor.full())
        index = self._index[id(tensor)]
        if not tensor.travels_local:
            return {"t": index}
        self.local.add(index)
        return {"t": index, "p": [tensor.sharded_dim, list(tensor.lengths), tensor.group.description()]}


def rebuild(description: Any, tensors: list[Tensor], group: Callable[[Any], Group] | None = None) -> Any:
    """Undo `Packer.describe`; `group` gives that of a sharded tensor from its own description."""
    if not isinstance(description, dict):
        return description
    if "p" in description:
        assert group is not None
        dim, lengths, holders = description["p"]
        return from_local(tensors[description["t"]], dim, lengths, group(holders))
    if "t" in description:
        return tensors[description["t"]]
    if "a" in description:
        array = description["a"]
        return tensors[array].cpu().numpy() if isinstance(array, int) else np.array(rebuild(array, tensors, group))
    if "x" in description:
        return NotSent(description["x"])
    if "o" in description:
        return description["o"]
    if "f" in description:
        return pathlib.Path(description["f"])
    if "b" in description:
        return base64.b64decode(description["b"])
    if "s" in description:
        return {rebuild(value, tensors, group) for value in description["s"]}
    if "y" in description:
        return getattr(torch, description["y"])
    if "e" in description:
        members, member = _find_class(description["e"]), description["n"]
        return members(member) if isinstance(member, int) else members[member]  # type: ignore[index]
    if "k" in description:
        values = rebuild({name: part for name, part in description.items() if name in ("d", "l", "u")}, tensors, group)
        beside = {name: rebuild(value, tensors, group) for name, value in description["v"] or ()}
        instance = _container(_find_class(description["k"]), values, beside)
        if description["v"] is None:  # a dict that is its own attributes
            object.__setattr__(instance, "__dict__", instance)
        return instance
    if "d" in description:
        items = {key: rebuild(value, tensors, group) for key, value in description["d"]}
        return _instance(_find_class(description["c"]), items) if "c" in description else items
    if "l" in description:
        values = [rebuild(value, tensors, group) for value in description["l"]]
        return _find_class(description["c"])(*values) if "c" in description else values
    return tuple(rebuild(value, tensors, group) for value in description["u"])


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return `tree` with `function` applied to its tensors."""
    packer = Packer(crosses=False)
    description = packer.describe(tree)
    return rebuild(description, [function(tensor) for tensor in packer.tensors])


def copies(tree: Any) -> Any:
    """Return `tree` with copies of its tensors, which a model may write to, and register hooks on, in their places.

    A sharded tensor stays, and so does all of a tree with objects of the user's own.
    """
    try:
        return map_tensors(tree, lambda tensor: tensor if isinstance(tensor, Sharded) else tensor.clone())
    except ValueError:
        return tree


def unsharded(tree: Any) -> Any:
    """Return `tree` with the full tensors of the sharded ones in it; the very same object where there are none."""
    if isinstance(tree, Tensor):
        return _unsharded(tree)
    if not any(isinstance(tensor, Sharded | NotYetComputed) for _, tensor in tensors_in(tree)):
        return tree
    return map_tensors(tree, _unsharded)


def _unsharded(tensor: Tensor) -> Tensor:
    tensor = tensor.computed() if isinstance(tensor, NotYetComputed) else tensor
    return tensor.full() if isinstance(tensor, Sharded) else tensor


def tensors_in(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples with their paths; other objects are left alone."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from tensors_in(value, (*path, index))


def arguments(args: tuple, kwargs: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors among a call's arguments with their paths in ``(args, kwargs)``.

    Of a dict that is an argument, whole entries: the other end's dict may not have them yet, in any shape.
    """
    for index, value in enumerate(args):
        yield from _entries(value, (0, index))
    for key, value in kwargs.items():
        yield from _entries(value, (1, key))


def _entries(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if any(True for _ in tensors_in(entry)):
                yield (*path, key), entry
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _entries(entry, (*path, index))


def put(tree: Any, path: Path, value: Any) -> Any:
    """Return `tree` with `value` at `path`: tuples are rebuilt, dicts and lists updated in place.

    In place, because a model may hand one dict to all its layers to share states in, and expects to find them there.
    """
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(tree, tuple):
        assert isinstance(key, int)
        values = list(tree)
        values[key] = put(values[key], rest, value)
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        assert isinstance(key, int)
        tree[key] = put(tree[key], rest, value)
    elif isinstance(tree, MutableMapping):
        tree[key] = put(tree.get(key), rest, value)
    else:  # this end passes nothing there: a plain value takes the place
        return value
    return tree


def _key(key: Any) -> Any:
    if not isinstance(key, (str, int)):
        raise ValueError(f"a dict that is sent to other ranks has keys of str or int, got {key!r}")
    return key


def _instance(cls: type, values: dict[str, Any]) -> Any:
    """A dataclass with these values, which its constructor does not see: it may have changed them once already."""
    if issubclass(cls, Mapping):
        return cls(**values)
    instance = cls.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def _container(cls: Any, values: Any, beside: dict[str, Any]) -> Any:
    """A list, tuple or dict of a user's own class with these elements, which its constructor does not see."""
    if hasattr(cls, "n_sequence_fields"):  # what functions of torch return
        return cls(values)
    kind: Any = next(base for base in (OrderedDict, dict, list, tuple) if issubclass(cls, base))
    instance = kind.__new__(cls, values) if kind is tuple else kind.__new__(cls)
    if kind is list:
        list.extend(instance, values)
    for key, value in values.items() if issubclass(kind, dict) else ():
        kind.__setitem__(instance, key, value)
    if beside:
        vars(instance).update(beside)
    return instance


def _find_class(name: str | type) -> type:
    if isinstance(name, type):
        return name
    module, _, qualname = name.partition(":")
    attribute: Any = sys.modules[module]
    for part in qualname.split("."):
        attribute = getattr(attribute, part)
    if not (isinstance(attribute, type) and (is_dataclass(attribute) or issubclass(attribute, _CROSSING))):
        raise ValueError(f"{name} is no class that may cross from one stage to another")
    return attribute


def detached(tree: Any) -> Any:
    """Return `tree` with its tensors detached; a tree with objects of the user's own stays as it is."""
    try:
        return map_tensors(tree, Tensor.detach)
    except ValueError:
        return tree
