"""Full checkpoints: one file that plain Lightning loads too, written as a whole and verified before it is unpickled.

`torch.save` writes a zip archive with a checksum for each record, which `torch.load` does not compare. Here all of them
are compared first, and the archive must consist of its records and their list alone.

Unpickling makes tensors, plain types and what `AllowedGlobals` lists. Another class or function in a file is refused by
its name, unless the caller trusts the file and says ``weights_only=False``.

What a checkpoint may name beside tensors and plain types, with harmless stand-ins for what could do harm.

NumPy's own functions are not among them, because a crafted dtype makes them read memory that is not theirs: the
stand-ins take elements that hold no references. Neither are enums, whose members a pickle could change for everybody.

Compares the records of a zip archive, as `torch.save` writes it, with their checksums.

`torch.load` does not compare them. It also reads lengths from the entry before each record, which nothing covers, so
that a changed one shifts all numbers of a tensor. Here the record must lie where its entry says and have its checksum.
"""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import pickle
import pickletools
import re
import struct
import types
import warnings
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from functools import partial
from pathlib import Path
from typing import IO, Any

import fsspec
import numpy as np
import torch
import torchmetrics.utilities.enums
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io import CheckpointIO
from lightning.fabric.utilities.data import AttributeDict as FabricAttributeDict
from lightning.pytorch.trainer import states
from lightning.pytorch.utilities.parsing import AttributeDict
from torch.utils.serialization import config as serialization_config
from typing_extensions import override

from lightning_mm5d.config.errors import CheckpointUntrustedError
from lightning_mm5d.storage.files import corrupt
from lightning_mm5d.storage.replacement import Replacement, new_save_id, remove_checkpoint

ENTRY_START = b"PK\x03\x04"
_ENTRY = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field
_END = b"PK\x05\x06"
_END_BYTES = 22
_IS_FOLDER = 0x10  # among the attributes of a record
_CHUNK_BYTES = 2**20
_UNREADABLE = (
    *(zipfile.BadZipFile, ValueError, NotImplementedError, LookupError, ArithmeticError, EOFError),
    struct.error,
)


class ArchiveError(ValueError):
    """An archive is not as it was written; the message says how."""


def verify_archive(file: IO[bytes]) -> None:
    """Compare all records with their checksums.

    The file must consist of records that are not compressed, one after the other from its first byte on, and of their
    list. Archives without any checksums, which `torch.save` writes when told so, pass with that.

    Raises:
        ArchiveError: bytes are missing, added or changed.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - _END_BYTES))
    if not file.read().startswith(_END):
        raise ArchiveError("its list of records does not stand at its end: it is truncated, or something was added")
    try:
        archive = zipfile.ZipFile(file)
    except _UNREADABLE as error:
        raise ArchiveError(f"its list of records is not readable ({error})") from None
    records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    if len({record.filename for record in records}) != len(records):
        raise ArchiveError("a record stands in it twice")
    has_checksums, end = any(record.CRC for record in records), 0
    for record in records:
        if not end <= record.header_offset < archive.start_dir or (end == 0 and record.header_offset):
            raise ArchiveError(f"its record {record.filename!r} does not lie after the one before")
        end = _verify_record(file, record, has_checksums)
    if end > archive.start_dir:
        raise ArchiveError("its last record reaches into the list of records")


def _verify_record(file: IO[bytes], record: zipfile.ZipInfo, has_checksums: bool) -> int:
    """Return where the bytes of a record end."""
    if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
        raise ArchiveError(f"its record {record.filename!r} is compressed, and torch.save writes no such records")
    if record.filename.endswith("/") or record.external_attr & _IS_FOLDER:
        # torch reads nothing of it, and says nothing
        raise ArchiveError(f"its record {record.filename!r} is called a folder")
    file.seek(record.header_offset)
    entry = file.read(_ENTRY.size)
    if len(entry) < _ENTRY.size:
        raise ArchiveError(f"its record {record.filename!r} is missing")
    start, name_bytes, extra_bytes = _ENTRY.unpack(entry)
    name = file.read(name_bytes)
    if start != ENTRY_START or name != record.orig_filename.encode():
        raise ArchiveError(f"the entry of its record {record.filename!r} differs from its list of records")
    begin = file.seek(record.header_offset + _ENTRY.size + name_bytes + extra_bytes)
    checksum, left = 0, record.file_size
    while left:
        data = file.read(min(left, _CHUNK_BYTES))
        if not data:
            raise ArchiveError(f"its record {record.filename!r} is shorter than its list of records says")
        checksum, left = zlib.crc32(data, checksum), left - len(data)
    if has_checksums and checksum != record.CRC:
        raise ArchiveError(f"its record {record.filename!r} differs from what was written")
    return begin + record.file_size


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
        empty: dict = {}
        self._dicts[id(empty)] = empty, make
        return empty

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
    paths = list[Any]()
    for kind in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
        pure = pathlib.PurePosixPath if "Posix" in kind.__name__ else pathlib.PureWindowsPath
        here = kind if kind is type(pathlib.Path()) else pure
        paths += [(here, f"pathlib{home}.{kind.__name__}") for home in ("", "._local")]
    return paths


def _enums() -> list[type[Enum]]:
    modules = (states, torchmetrics.utilities.enums)
    values = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return [value for value in values if issubclass(value, Enum) and len(value)]


def _homes(kind: type) -> set[str]:
    """Return the modules that an enum may be said to be of: Lightning has two names."""
    module = kind.__module__
    return {module, *(f"{name}.trainer.states" for name in _LIGHTNINGS if module == states.__name__)}


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


# has torch write the checksums of records, whatever it is set to
_checksums = partial(serialization_config.patch, "save.compute_crc32", True)  # type: ignore[attr-defined]
_SCANNED_BYTES = 64 * 2**20  # of a pickle, for the names in it
_DAMAGE = (
    *(RuntimeError, ValueError, TypeError, LookupError, EOFError, AttributeError, ArithmeticError, MemoryError),
    *(AssertionError, SyntaxError, SystemError),  # of torch, and of NumPy's dtypes and characters
)


def save_full(checkpoint: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint to one file, which appears as a whole; an older file stays where this fails.

    Args:
        checkpoint: what `torch.save` takes.
        path: of the file, or an address that fsspec knows.

    Raises:
        OSError: the disk is full or may not be written.
    """
    place = _local(path)
    if place is None:
        with fsspec.open(os.fspath(path), "wb") as remote, _checksums():
            torch.save(checkpoint, remote)
        return
    replacement = Replacement(place, new_save_id())
    replacement.begin()
    try:
        with open(replacement.new, "xb") as file, _checksums():
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        replacement.abort()
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(cause, OSError):  # torch says only that it could not write
            raise OSError(cause.errno, cause.strerror, os.fspath(path)) from None
        raise
    replacement.commit()


def load_full(
    path: str | os.PathLike[str], weights_only: bool | None = None, map_location: Any = "cpu", *, mmap: bool = False
) -> Any:
    """Return what `save_full` or `torch.save` wrote, verified.

    Args:
        path: of the file, or an address that fsspec knows.
        weights_only: False to run whatever code the file asks for; None is True.
        map_location: of `torch.load`.
        mmap: whether tensors stay in a local file until they are used; those of an old format cannot.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointCorruptError: the file is not as it was written.
        CheckpointUntrustedError: the file names a class or function that could run code.
    """
    place = _local(path)
    opened: Any = open(place, "rb") if place else fsspec.open(os.fspath(path), "rb")  # noqa: SIM115
    with opened as file:
        return load_opened(file, os.fspath(place or path), weights_only, map_location, mmap=mmap and place is not None)


def load_opened(
    file: IO[bytes], name: str, weights_only: bool | None = None, map_location: Any = "cpu", *, mmap: bool = False
) -> Any:
    """Return what `torch.save` wrote into an open file, verified.

    Args:
        file: at its start.
        name: of the file, for errors.
        weights_only: False to run whatever code the file asks for; None is True.
        map_location: of `torch.load`.
        mmap: whether to map the file `name`, where it is an archive.

    Raises:
        CheckpointCorruptError: the file is not as it was written.
        CheckpointUntrustedError: the file names a class or function that could run code.
    """
    is_archive = file.read(len(ENTRY_START)) == ENTRY_START
    if is_archive:
        try:
            verify_archive(file)
        except ArchiveError as error:
            raise corrupt(name, str(error)) from None
    file.seek(0)
    mmap = mmap and is_archive
    source: Any = name if mmap else file
    if weights_only is False:
        return torch.load(source, map_location, mmap=mmap, weights_only=False)
    allowed = AllowedGlobals()
    try:
        with torch.serialization.safe_globals(allowed.names), warnings.catch_warnings(action="ignore"):
            return allowed.restored(torch.load(source, map_location, mmap=mmap, weights_only=True))
    except pickle.UnpicklingError as error:
        named = re.findall(r"GLOBAL (\S+)", str(error)) or _globals(file, is_archive)
        if not named and not is_archive:
            raise corrupt(name, "it is neither an archive nor a pickle") from None
        raise _untrusted(name, named) from None
    except _DAMAGE as error:
        raise corrupt(name, f"it cannot be read ({type(error).__name__}: {error})") from None


class FullFileIO(CheckpointIO):
    """Lightning's way to full checkpoints: `save_full` and `load_full`. It deletes directories too."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError(f"storage_options: got {storage_options!r}. Full checkpoints have no such options")
        save_full(checkpoint, path)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load_full(path, weights_only, "cpu" if map_location is None else map_location)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        place = _local(path)
        if place is not None:
            remove_checkpoint(place)
            return
        files, name = url_to_fs(os.fspath(path))
        if files.exists(name):
            files.rm(name, recursive=True)


def _local(path: str | os.PathLike[str]) -> Path | None:
    """Return the local path of `path`, None for an address elsewhere."""
    name = os.fspath(path)
    if "://" not in name and "::" not in name:
        return Path(name)
    files, place = url_to_fs(name)
    return Path(place) if isinstance(files, LocalFileSystem) else None


def _untrusted(name: str, named: list[str]) -> CheckpointUntrustedError:
    what = ", ".join(dict.fromkeys(named)) or "an instruction that no checkpoint of tensors and plain values needs"
    return CheckpointUntrustedError(
        f"{name!r} holds {what}, which could run code while it is loaded. Nothing of it was run. If you trust who "
        "wrote the file, load it with weights_only=False."
    )


def _globals(file: IO[bytes], is_archive: bool) -> list[str]:
    """Return the classes and functions that the pickles in a file name, as far as they are readable."""
    file.seek(0)
    if is_archive:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            pickles: IO[bytes] = io.BytesIO(archive.read(names[0]) if names else b"")
    else:
        pickles = io.BytesIO(file.read(_SCANNED_BYTES))
    named, words = list[str](), ["", ""]
    with warnings.catch_warnings(action="ignore"), suppress(*_DAMAGE):  # until they end, or are no pickles
        while True:
            for code, argument, _ in pickletools.genops(pickles):
                if isinstance(argument, str):
                    words = [words[-1], argument]
                if code.name in ("GLOBAL", "INST") and isinstance(argument, str):
                    named.append(argument.replace(" ", "."))
                elif code.name == "STACK_GLOBAL":
                    named.append(".".join(words))
    return named
