"""Opens, reads and writes ordinary files by bytes: no pipe, no device, and no link where none may be.

Where tensors come from: a checkpoint, a folder of weights or a state dict in memory, read by name and in parts.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_mm5d.config.errors import CheckpointCorruptError

Region = Sequence[tuple[int, int]]  # one (start, stop) for each dim of the full tensor


class TensorSource(Protocol):
    """Named tensors that are read in parts."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor; raise KeyError for an unknown name."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the full tensor; raise KeyError for an unknown name."""

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return the full tensor, or its `region`; the result may share memory with the source."""


class StateDictSource:
    """The tensors of a state dict in memory; other values have no name here.

    Args:
        state: by name; read when a tensor is asked for.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def names(self) -> list[str]:
        """Return the names of all tensors, in the order of the state dict."""
        return [name for name, value in self._state.items() if isinstance(value, Tensor)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the full tensor."""
        return self._tensor(name).dtype

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return the tensor itself, detached, or a view of its `region`."""
        tensor = self._tensor(name).detach()
        if region is None:
            return tensor
        bounds = checked_region(region, tuple(tensor.shape), name)
        return tensor[tuple(slice(start, stop) for start, stop in bounds)]

    def _tensor(self, name: str) -> Tensor:
        value = self._state[name]
        if not isinstance(value, Tensor):
            raise KeyError(name)
        return value


def checked_region(region: Region | None, shape: tuple[int, ...], name: str) -> list[tuple[int, int]]:
    """Return `region` as a list, the whole tensor for None.

    Raises:
        ValueError: the region lies outside of `shape`, or has another number of dims.
    """
    if region is None:
        return [(0, length) for length in shape]
    bounds = [(int(start), int(stop)) for start, stop in region]
    inside = all(0 <= start <= stop <= length for (start, stop), length in zip(bounds, shape, strict=False))
    if len(bounds) != len(shape) or not inside:
        raise ValueError(f"the region {bounds} does not lie in the tensor {name!r} of shape {list(shape)}")
    return bounds


@dataclass(frozen=True)
class WrittenFile:
    """What identifies a file's content.

    Attributes:
        size: bytes.
        checksum: CRC-32 of all bytes; of a tensor file that of its header, which holds those of all blocks.
    """

    size: int
    checksum: int

    @classmethod
    def of(cls, data: bytes) -> WrittenFile:
        """Return what identifies a file of these bytes."""
        return cls(len(data), zlib.crc32(data))


class BlockChecksums:
    """CRC-32 of each block of bytes that come in parts of any length.

    Args:
        size: bytes of a block; the last one may be shorter.
    """

    def __init__(self, size: int) -> None:
        self._size, self._done, self._current, self._room = size, list[int](), 0, size

    def add(self, memory: memoryview) -> None:
        """Take the next bytes."""
        start = 0
        while start < len(memory):
            part = memory[start : start + self._room]
            self._current = zlib.crc32(part, self._current)
            start, self._room = start + len(part), self._room - len(part)
            if not self._room:
                self._done.append(self._current)
                self._current, self._room = 0, self._size

    def digits(self) -> str:
        """Return 8 hexadecimal digits for each block, also for the last, shorter one."""
        last = [self._current] if self._room < self._size else []
        return "".join(f"{checksum:08x}" for checksum in self._done + last)


def corrupt(path: str | os.PathLike[str], what: str) -> CheckpointCorruptError:
    """Return the error that `path` is not what was written, and what to do about it."""
    return CheckpointCorruptError(
        f"{os.fspath(path)!r}: {what}. Load an earlier checkpoint, or copy this one again from where it is whole."
    )


@contextmanager
def opened(path: Path, *, follow: bool = True) -> Iterator[int]:
    """Open the ordinary file at `path` for reading; yield its descriptor.

    Args:
        path: of the file.
        follow: whether it may be a symbolic link.

    Raises:
        CheckpointCorruptError: there is no such file, or it is a folder, a pipe, a device or a link.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise corrupt(path, "the file is missing") from None
    except OSError as error:
        if not follow and os.path.islink(path):
            raise corrupt(path, "it is a symbolic link, and files of a checkpoint may not be links") from None
        raise error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise corrupt(path, "it is no ordinary file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_into(descriptor: int, memory: memoryview, offset: int, path: Path) -> None:
    """Fill `memory` with the file's bytes from `offset` on.

    Raises:
        CheckpointCorruptError: the file ends before.
    """
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if not count:
            raise corrupt(path, f"the file ends at byte {offset + done}, before byte {offset + len(memory)}")
        done += count


def write_at(descriptor: int, data: memoryview | bytes, offset: int, path: Path) -> None:
    """Write all of `data` at `offset`.

    Raises:
        OSError: with the file's name, for instance because the disk is full.
    """
    memory = memoryview(data)
    done = 0
    try:
        while done < len(memory):
            done += os.pwrite(descriptor, memory[done:], offset + done)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def flush(path: Path) -> None:
    """Flush a file, or the names of a folder's files, to the disk, so that a rename in it outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
