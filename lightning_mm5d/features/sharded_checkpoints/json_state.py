"""Nested state as JSON that gives back the very same types; tensors and what JSON cannot hold are kept beside it.

Numbers, strings, lists and dicts with strings as keys are JSON's own. Everything else is an object with the key ``"$"``
that says what it is. Decoding makes nothing but the types that stand in this file, and it runs no code of the text's
choice. Objects of all other classes, also enums and dataclasses, are kept beside the text.
"""

from __future__ import annotations

import base64
import json
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mm5d.config.errors import CheckpointCorruptError, CheckpointUntrustedError
from lightning_mm5d.storage.tensor_file import storable

_DEPTH = 100  # of containers in each other; deeper ones are kept as objects
_TAG = "$"
_DECODING_ERRORS = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, struct.error),
    *(SyntaxError, SystemError),  # of NumPy: a dtype, and a character that Unicode does not have
)
_PATHS = {kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.WindowsPath)} | {
    kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath)
}
_TIMES: dict[str, Any] = {"datetime": datetime, "date": date, "time": time}
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set)}
_SEQUENCES: dict[str, type] = {kind.__name__: kind for kind in (tuple, set, frozenset)}
_MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}


@dataclass
class EncodedState:
    """State in parts.

    Attributes:
        text: JSON.
        tensors: those in the state, by names that tell where they are.
        objects: what JSON cannot hold, by names that tell where it is.
    """

    text: bytes
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)


def encode_state(state: Any, *, stands: Callable[[Tensor], bool] = lambda _: False) -> EncodedState:
    """Return `state` in parts, from which `decode_state` makes an equal one of equal types.

    Args:
        state: nested containers of anything.
        stands: whether a tensor of a class of its own stands for a plain one; it is kept as it is.
    """
    encoder = _Encoder(stands)
    tree = encoder.encode(state, ())
    encoder.encoded.text = json.dumps(tree, allow_nan=False).encode()
    return encoder.encoded


def decode_state(text: bytes, tensor: Callable[[str], Tensor], objects: Mapping[str, Any]) -> Any:
    """Return the state that `encode_state` took apart.

    Args:
        text: JSON.
        tensor: gives the tensor of a name.
        objects: what JSON could not hold, by name.

    Raises:
        CheckpointUntrustedError: the text names a class.
        CheckpointCorruptError: the text was not made by `encode_state`, or names an object that is not there.
    """
    decoder = _Decoder(tensor, objects)
    try:
        return decoder.decode(json.loads(text.decode()), 0)
    except (CheckpointCorruptError, CheckpointUntrustedError):
        raise
    except _DECODING_ERRORS as error:
        raise CheckpointCorruptError(
            f"the state of a checkpoint is not as it was written ({type(error).__name__}: {error}). Nothing of it was "
            "loaded. Load an earlier checkpoint."
        ) from None


class _CircleError(Exception):
    """A container holds itself; the argument is its id."""


class _NotPlainError(Exception):
    """JSON cannot hold a value exactly."""


class _Encoder:
    def __init__(self, stands: Callable[[Tensor], bool]) -> None:
        self.encoded = EncodedState(b"")
        self._stands = stands
        self._tensors: dict[int, str] = {}  # names by id, so that a tensor that stands twice is kept once
        self._open: list[int] = []  # ids of the containers around

    def encode(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """Return the JSON of `value`, or of a reference to it among the tensors or objects."""
        if value is None or type(value) in (bool, str):
            return value
        if id(value) in self._open:
            raise _CircleError(id(value))
        depth = len(self._open)
        self._open.append(id(value))
        try:
            if depth < _DEPTH:
                return self._encode(value, path)
        except _NotPlainError:
            pass
        except _CircleError as circle:
            if circle.args[0] != id(value):
                raise
        finally:
            del self._open[depth:]
        name = _unused(path, self.encoded.objects)
        self.encoded.objects[name] = value
        return {_TAG: "object", "name": name}

    def _encode(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, path)
        if kind is dict and _TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(entry, (*path, key)) for key, entry in value.items()}
        if kind in (Tensor, torch.nn.Parameter):
            return self._tensor(value, path)
        if isinstance(value, Tensor) and self._stands(value):
            return self._reference(value, value, path)
        if isinstance(value, np.ndarray | np.generic):
            return _numpy(value)
        if _SEQUENCES.get(kind.__name__) is kind:
            return {_TAG: kind.__name__, "items": self._items(value, path)}
        if kind is deque:
            return {_TAG: "deque", "items": self._items(value, path), "maxlen": value.maxlen}
        if isinstance(value, dict):
            return self._mapping(value, path)
        return _scalar(value)

    def _items(self, values: Iterable[Any], path: tuple[str, ...]) -> list[Any]:
        return [self.encode(entry, (*path, str(index))) for index, entry in enumerate(values)]

    def _mapping(self, value: dict, path: tuple[str, ...]) -> Any:
        kind, tree = type(value), dict[str, Any]()
        if isinstance(value, defaultdict) and kind is defaultdict:
            factory = value.default_factory
            if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                raise _NotPlainError
            tree = {_TAG: "defaultdict", "factory": None if factory is None else factory.__name__}
        elif _MAPPINGS.get(kind.__name__) is kind:
            tree = {_TAG: kind.__name__}
        else:
            raise _NotPlainError
        pairs = [[self._key(key), self.encode(entry, (*path, str(key)))] for key, entry in value.items()]
        return tree | {"items": pairs}

    def _key(self, key: Any) -> Any:
        encoder = _Encoder(self._stands)
        tree = encoder.encode(key)
        if encoder.encoded.objects or encoder.encoded.tensors:
            raise _NotPlainError  # such a key may be equal to none but itself
        return tree

    def _tensor(self, value: Tensor, path: tuple[str, ...]) -> Any:
        plain = value.detach().resolve_conj().resolve_neg() if value.layout is torch.strided else value
        is_pairs = value.dtype is torch.complex128
        if value.layout is not torch.strided or value.is_meta or not (is_pairs or storable(value.dtype)):
            raise _NotPlainError
        flags = {"complex": is_pairs, "parameter": type(value) is not Tensor, "grad": value.requires_grad}
        reference = self._reference(value, torch.view_as_real(plain) if is_pairs else plain, path)
        return {**reference, **{key: True for key in flags if flags[key]}}

    def _reference(self, value: Tensor, stored: Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        """Keep `stored` for a tensor, once, and return what refers to it."""
        if id(value) not in self._tensors:
            name = self._tensors[id(value)] = _unused(path, self.encoded.tensors)
            self.encoded.tensors[name] = stored
        return {_TAG: "tensor", "name": self._tensors[id(value)]}


def _scalar(value: Any) -> Any:
    """Return the JSON of a value that holds no others."""
    kind = type(value)
    if kind is int:
        return value if abs(value) < 2**63 else {_TAG: "int", "hex": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "bits": struct.pack(">d", value).hex()}
    if kind is complex:
        return {_TAG: "complex", "bits": struct.pack(">dd", value.real, value.imag).hex()}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "base64": base64.b64encode(value).decode()}
    if _PATHS.get(kind.__name__) is kind:
        return {_TAG: "path", "kind": kind.__name__, "path": str(value)}
    if _TIMES.get(kind.__name__) is kind:
        text = value.isoformat()
        if kind.fromisoformat(text) != value or getattr(value, "fold", 0) or not _has_plain_zone(value):
            raise _NotPlainError
        return {_TAG: kind.__name__, "iso": text}
    if kind is timedelta:
        return {_TAG: "timedelta", "parts": [value.days, value.seconds, value.microseconds]}
    if kind is range:
        return {_TAG: "range", "parts": [value.start, value.stop, value.step]}
    if kind is torch.Size:
        return {_TAG: "size", "lengths": list(value)}
    if kind is torch.dtype:
        return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {_TAG: "device", "name": str(value)}
    raise _NotPlainError


def _numpy(value: np.ndarray | np.generic) -> Any:
    array = np.asarray(value)
    if type(value) not in (np.ndarray, array.dtype.type) or array.dtype.kind not in "biufcmMSU":
        raise _NotPlainError
    tag, shape = ("array", list(array.shape)) if isinstance(value, np.ndarray) else ("number", [])
    data = base64.b64encode(array.tobytes()).decode()
    return {_TAG: tag, "dtype": array.dtype.str, "shape": shape, "base64": data}


def _has_plain_zone(value: Any) -> bool:
    zone = getattr(value, "tzinfo", None)
    return zone is None or (type(zone) is timezone and repr(zone) == repr(timezone(zone.utcoffset(None))))


def _unused(path: tuple[str, ...], taken: Mapping[str, Any]) -> str:
    """Return a name for what stands at `path`."""
    name = ".".join(path) or "state"
    return name if name not in taken else f"{name}#{len(taken)}"


class _Decoder:
    def __init__(self, tensor: Callable[[str], Tensor], objects: Mapping[str, Any]) -> None:
        self._tensor_of, self._objects = tensor, objects
        self._tensors: dict[str, Tensor] = {}

    def decode(self, tree: Any, depth: int = 0) -> Any:
        """Undo `_Encoder.encode`."""
        if depth > 2 * _DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(tree, list):
            return [self.decode(entry, depth + 1) for entry in tree]
        if not isinstance(tree, dict):
            return tree
        if _TAG not in tree:
            return {key: self.decode(entry, depth + 1) for key, entry in tree.items()}
        tag = tree[_TAG]
        if tag == "object":
            return self._objects[tree["name"]]
        if tag == "tensor":
            return self._tensor(tree)
        if "class" in tree:
            raise CheckpointUntrustedError(
                f"the state of a checkpoint names the class {tree['class']!r}, which a checkpoint may not name; "
                "nothing of it was loaded. Load only checkpoints that you or this library have written"
            )
        if tag == "defaultdict":
            factory = None if tree["factory"] is None else _FACTORIES[tree["factory"]]
            return defaultdict(factory, self._pairs(tree, depth))
        if tag in _MAPPINGS:
            return _MAPPINGS[tag](self._pairs(tree, depth))
        if tag == "deque":
            return deque(self.decode(tree["items"], depth), tree["maxlen"])
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.decode(tree["items"], depth))
        if tag not in _READERS:
            raise ValueError(f"{tag!r} is no kind of value that this version knows")
        return _READERS[tag](tree)

    def _pairs(self, tree: Any, depth: int) -> dict[Any, Any]:
        return {self.decode(key, depth + 1): self.decode(entry, depth + 1) for key, entry in tree["items"]}

    def _tensor(self, tree: Any) -> Tensor:
        name = tree["name"]
        if name not in self._tensors:
            tensor = self._tensor_of(name)
            if "complex" in tree:
                tensor = torch.view_as_complex(tensor)
            if "parameter" in tree:
                tensor = torch.nn.Parameter(tensor, requires_grad=False)
            self._tensors[name] = tensor.requires_grad_("grad" in tree)
        return self._tensors[name]


def _from_base64(tree: Any) -> bytes:
    return base64.b64decode(tree["base64"], validate=True)


def _path(tree: Any) -> pathlib.PurePath:
    kind = _PATHS[tree["kind"]]
    return pathlib.Path(tree["path"]) if issubclass(kind, pathlib.Path) else kind(tree["path"])


def _dtype(tree: Any) -> torch.dtype:
    dtype = getattr(torch, tree["name"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{tree['name']} is no dtype")
    return dtype


def _array(tree: Any) -> np.ndarray:
    dtype = np.dtype(tree["dtype"])
    if dtype.kind not in "biufcmMSU":
        raise ValueError(f"arrays of {dtype} are not kept as JSON")
    return np.frombuffer(_from_base64(tree), dtype).reshape(tree["shape"]).copy()


_READERS: dict[Any, Callable[[Any], Any]] = {  # undo `_scalar` and `_numpy`
    "int": lambda tree: int(tree["hex"], 16),
    "float": lambda tree: struct.unpack(">d", bytes.fromhex(tree["bits"]))[0],
    "complex": lambda tree: complex(*struct.unpack(">dd", bytes.fromhex(tree["bits"]))),
    "bytes": _from_base64,
    "bytearray": lambda tree: bytearray(_from_base64(tree)),
    "path": _path,
    "datetime": lambda tree: datetime.fromisoformat(tree["iso"]),
    "date": lambda tree: date.fromisoformat(tree["iso"]),
    "time": lambda tree: time.fromisoformat(tree["iso"]),
    "timedelta": lambda tree: timedelta(*tree["parts"]),
    "range": lambda tree: range(*tree["parts"]),
    "size": lambda tree: torch.Size(tree["lengths"]),
    "dtype": _dtype,
    "device": lambda tree: torch.device(tree["name"]),
    "array": _array,
    "number": lambda tree: _array(tree)[()],
}
