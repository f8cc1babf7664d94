"""A checkpoint directory: many processes write its files, it appears as a whole, and each byte read is verified.

Its manifest has files with sizes and checksums, and what the writer notes beside them. It is written last, so that a
directory without one was never finished. It is JSON with a checksum of itself in front. Checksums find damage; they are
no signatures, so what a manifest says is checked like any untrusted input.

Its tensors are put together from the pieces that ranks wrote. The header of each file says where its pieces lie in the
full tensors, in the convention of the Hugging Face storage of torch.distributed.checkpoint, whose reader finds them
too. A file has one piece of a tensor at most. Directories whose pieces do not cover every tensor exactly once are
refused.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.plan.holdings import Box, whole_box
from lightning_mm5d.storage.files import (
    Region,
    WrittenFile,
    checked_region,
    corrupt,
    flush,
    opened,
    read_into,
    write_at,
)
from lightning_mm5d.storage.replacement import Replacement, resolve
from lightning_mm5d.storage.tensor_file import TensorFile, TensorFileWriter, are_lengths

MANIFEST = "manifest.json"
VERSION = 1
_FORMAT = "lightning_mm5d checkpoint"
_LIMIT = 256 * 2**20  # bytes
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
Reader = Callable[[memoryview, int], None]
"""fills memory with the bytes of a file from an offset on"""
UNCHECKED = "unchecked"
"""field of a manifest whose tensor files have no checksums: they never leave the memory of hosts"""
_HEAD, _TAIL = '{"checksum":"%08x","manifest":', "}\n"


def write_whole(path: Path, data: bytes) -> WrittenFile:
    """Write a new file and flush it to the disk.

    Raises:
        OSError: the disk is full, may not be written, or has such a file.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_at(descriptor, data, 0, path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return WrittenFile.of(data)


def read_whole(path: Path, limit: int) -> bytes:
    """Return all bytes of a file of at most `limit` bytes, which is no link.

    Raises:
        CheckpointCorruptError: it is missing, no ordinary file, or larger.
    """
    with opened(path, follow=False) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise corrupt(path, f"it has {size} bytes, and such a file has at most {limit}")
        memory = bytearray(size)
        read_into(descriptor, memoryview(memory), 0, path)
    return bytes(memory)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint directory holds.

    Attributes:
        files: size and checksum of each file, by name.
        fields: what the writer noted, in JSON's own types.
    """

    files: Mapping[str, WrittenFile]
    fields: Mapping[str, Any]


def is_file_name(name: str) -> bool:
    """Return whether a manifest may name such a file: no separators, nothing hidden, not the manifest itself."""
    return _NAME.fullmatch(name) is not None and name != MANIFEST


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the text of a manifest.

    Raises:
        ValueError: a file's name that no manifest may have, or a field that JSON cannot hold exactly.
    """
    refused = [name for name in manifest.files if not is_file_name(name)]
    if refused:
        raise ValueError(f"{refused[0]!r} is no name for a file of a checkpoint")
    tree = {
        "format": _FORMAT,
        "version": VERSION,
        "files": {name: [file.size, file.checksum] for name, file in manifest.files.items()},
        "fields": dict(manifest.fields),
    }
    body = json.dumps(tree, allow_nan=False)
    if json.loads(body) != tree:
        raise ValueError("the fields of a manifest hold something that JSON cannot hold, for instance a key of int")
    return (_HEAD % zlib.crc32(body.encode()) + body + _TAIL).encode()


def decode_manifest(text: bytes, path: Path) -> Manifest:
    """Return the manifest of this text.

    Args:
        text: of the file.
        path: of it, for errors.

    Raises:
        CheckpointCorruptError: it is damaged, or names files outside of the directory.
    """
    start = len(_HEAD % 0)
    body = text[start : -len(_TAIL)]
    if text != (_HEAD % zlib.crc32(body)).encode() + body + _TAIL.encode():
        raise corrupt(path, "its checksum is not that of its text")
    try:
        tree = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"it is not readable: {error}") from None
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        raise corrupt(path, "it is no manifest of lightning_mm5d")
    if tree.get("version") != VERSION:
        raise corrupt(path, f"it has version {tree.get('version')!r}, and this lightning_mm5d reads version {VERSION}")
    files, fields = tree.get("files"), tree.get("fields")
    if not isinstance(files, dict) or not isinstance(fields, dict):
        raise corrupt(path, "it lacks files or fields")
    for name, value in files.items():
        if not is_file_name(name):
            raise corrupt(path, f"it names the file {name!r}, which cannot lie in the directory")
        if not (are_lengths(value) and len(value) == 2):
            raise corrupt(path, f"it has no size and checksum of {name!r}")
    return Manifest({name: WrittenFile(*value) for name, value in files.items()}, fields)


TENSOR_SUFFIX = ".safetensors"


class DirectoryWriter:
    """One save of a checkpoint directory.

    Every process makes one of the same arguments. One of them calls `begin` before the others write, and `commit` after
    them, or `abort`.

    Args:
        path: of the directory; an older one is replaced.
        save_id: from `new_save_id`, equal in all processes.

    Attributes:
        path: of the directory.
        folder: where files are written meanwhile.
        make_file: makes the writer of a tensor file of its path, specs and metadata.
    """

    make_file: Callable[..., TensorFileWriter] = TensorFileWriter

    def __init__(self, path: str | os.PathLike[str], save_id: str) -> None:
        self._replacement = Replacement(path, save_id)
        self.path, self.folder = self._replacement.path, self._replacement.new

    def begin(self) -> None:
        """Make the folder to write to, after removing what dead saves left beside it.

        Raises:
            OSError: the disk is full or may not be written.
        """
        self._replacement.begin()
        try:
            self.folder.mkdir()
        except OSError:
            self.abort()
            raise

    def write_bytes(self, name: str, data: bytes) -> WrittenFile:
        """Write a small file, flushed to the disk.

        Raises:
            OSError: the disk is full.
        """
        return write_whole(self.folder / name, data)

    def tensor_file(
        self,
        name: str,
        specs: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> TensorFileWriter:
        """Return a writer of a tensor file; its name ends in ``.safetensors``."""
        assert name.endswith(TENSOR_SUFFIX)
        return self.make_file(self.folder / name, specs, metadata)

    def commit(self, files: Mapping[str, WrittenFile], fields: Mapping[str, Any]) -> None:
        """Write the manifest and give the directory its name.

        Args:
            files: of all processes, by name.
            fields: what the manifest says beside them, in JSON's own types.

        Raises:
            ValueError: a file's name or a field that a manifest cannot hold.
            OSError: the disk is full or may not be written; the older directory keeps its name.
        """
        try:
            write_whole(self.folder / MANIFEST, encode_manifest(Manifest(files, fields)))
            flush(self.folder)
        except BaseException:
            self.abort()
            raise
        self._replacement.commit()

    def abort(self) -> None:
        """Remove what this save has written; an older directory keeps its name."""
        self._replacement.abort()


class CheckpointDirectory:
    """A finished checkpoint directory, of which only files in its manifest are read.

    Args:
        path: of the directory, or of a link to it.
        elsewhere: what reads files that other hosts have, by name.

    Attributes:
        path: where it was found.
        fields: what the writer noted.
        files: size and checksum of each file, by name.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        CheckpointCorruptError: there is no manifest, or a damaged one.
    """

    def __init__(self, path: str | os.PathLike[str], elsewhere: Mapping[str, Reader] | None = None) -> None:
        self.path, self._elsewhere = resolve(path), elsewhere or {}
        if not os.path.lexists(self.path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(self.path))
        file = self.path / MANIFEST
        if not os.path.lexists(file):
            raise corrupt(self.path, f"it has no {MANIFEST}: the save was never finished, or this is no checkpoint")
        manifest = decode_manifest(read_whole(file, _LIMIT), file)
        self.fields, self.files = manifest.fields, manifest.files

    def read_bytes(self, name: str, limit: int = 2**30) -> bytes:
        """Return a whole file, verified.

        Args:
            name: of a file in the manifest.
            limit: most bytes that it may have.

        Raises:
            CheckpointCorruptError: the file is missing, damaged, too large, or not in the manifest.
        """
        path, written = self._file(name)
        if (read := self._elsewhere.get(name)) is not None and written.size <= limit:
            read(memoryview(sent := bytearray(written.size)), 0)
            data = bytes(sent)
        else:
            data = read_whole(path, limit)
        if WrittenFile.of(data) != written:
            raise corrupt(path, "its content differs from what was written")
        return data

    def tensor_file(self, name: str) -> TensorFile:
        """Return a tensor file whose reads are verified.

        Raises:
            CheckpointCorruptError: the file is missing, of another save, or not in the manifest; or its header is
                damaged.
        """
        path, written = self._file(name)
        checksums, read = UNCHECKED not in self.fields, self._elsewhere.get(name)
        return TensorFile(path, written, follow=False, elsewhere=read, checksums=checksums)

    def tensor_files(self) -> list[str]:
        """Return the names of all tensor files."""
        return [name for name in self.files if name.endswith(TENSOR_SUFFIX)]

    def check_sizes(self) -> None:
        """Check that all files are there in their sizes, without reading them.

        Raises:
            CheckpointCorruptError: a file is missing or has another size.
        """
        for name, written in self.files.items():
            with opened(self.path / name, follow=False) as descriptor:
                size = os.fstat(descriptor).st_size
            if size != written.size:
                raise corrupt(self.path / name, f"it has {size} bytes instead of {written.size}")

    def verify(self) -> None:
        """Compare every byte of every file with its checksum.

        Raises:
            CheckpointCorruptError: they differ, or a file is missing.
        """
        for name in self.files:
            if name.endswith(TENSOR_SUFFIX):
                self.tensor_file(name).verify()
            else:
                self.read_bytes(name)

    def _file(self, name: str) -> tuple[Path, WrittenFile]:
        if name not in self.files:
            raise corrupt(self.path / name, "the manifest of the checkpoint does not name this file")
        return self.path / name, self.files[name]


_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_FULL = "full_shape"
_COPIED_BYTES = 16 * 2**20  # read at once, of a tensor in several pieces


def sharding_metadata(boxes: Mapping[str, tuple[Box, Sequence[int]]]) -> dict[str, str]:
    """Return the metadata of a file: of each tensor the box that the file holds, and the full shape."""
    info = {name: {_OFFSETS: [start for start, _ in box], _FULL: list(shape)} for name, (box, shape) in boxes.items()}
    return {"format": "pt", _SHARDING: json.dumps(info)}


@dataclass(frozen=True)
class _Part:
    file: TensorFile
    box: Box


class StoredTensors:
    """All tensors of a checkpoint directory, a `TensorSource`; opening it reads the headers of the files.

    Args:
        directory: finished.

    Raises:
        CheckpointCorruptError: a file is missing or damaged, or the pieces of a tensor do not cover it once.
    """

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.directory = directory
        self.files = {name: directory.tensor_file(name) for name in sorted(directory.tensor_files())}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[_Part]] = {}
        for file in self.files.values():
            self._add(file)
        for name, parts in self._parts.items():
            self._check(name, parts)

    @property
    def bytes_read(self) -> int:
        """Of all files so far, with headers."""
        return sum(file.bytes_read for file in self.files.values())

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor; raise KeyError for an unknown name."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; raise KeyError for an unknown name."""
        return self._parts[name][0].file.dtype(name)

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or its `region`, in new memory of the CPU; it reads no pieces beside the region.

        Raises:
            KeyError: there is no such tensor.
            CheckpointCorruptError: bytes differ from what was written.
        """
        wanted = checked_region(region, self._shapes[name], name)
        parts = [(part, _intersection(part.box, wanted)) for part in self._parts[name]]
        overlaps = [(part, box) for part, box in parts if box is not None]
        if len(overlaps) == 1 and overlaps[0][1] == tuple(wanted):
            part, box = overlaps[0]
            return part.file.read(name, _within(box, part.box))
        result = torch.empty([stop - start for start, stop in wanted], dtype=self.dtype(name))
        for part, box in overlaps:
            for rows in _divided(box, result.itemsize):
                target = tuple(slice(start, stop) for start, stop in _within(rows, wanted))
                result[target] = part.file.read(name, _within(rows, part.box))
        return result

    def _add(self, file: TensorFile) -> None:
        info = _sharding(file)
        for name in file.names():
            entry = info.get(name)
            shape = file.shape(name)
            offsets, full = ([0] * len(shape), list(shape)) if entry is None else (entry[_OFFSETS], entry[_FULL])
            box = tuple((offset, offset + length) for offset, length in zip(offsets, shape, strict=True))
            full_shape = self._shapes.setdefault(name, tuple(full))
            parts = self._parts.setdefault(name, [])
            if full_shape != tuple(full) or (parts and parts[0].file.dtype(name) != file.dtype(name)):
                raise corrupt(file.path, f"its {name!r} has another shape or dtype than that of another file")
            parts.append(_Part(file, box))

    def _check(self, name: str, parts: list[_Part]) -> None:
        parts.sort(key=lambda part: part.box)
        full = whole_box(self._shapes[name])
        inside = all(_intersection(part.box, full) == part.box or not _size(part.box) for part in parts)
        covers = sum(_size(part.box) for part in parts) == _size(full)
        if not inside or not covers or _overlap([part.box for part in parts]):
            raise corrupt(self.directory.path, f"its files do not hold {name!r} exactly once")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any of the boxes overlap, which are sorted."""
    for number, box in enumerate(boxes):
        for later in islice(boxes, number + 1, None):
            if box and later[0][0] >= box[0][1]:
                break
            if _intersection(box, later) is not None:
                return True
    return False


def _sharding(file: TensorFile) -> dict[str, dict[str, list[int]]]:
    """Return where the pieces of a file lie, by name, after a check of its form."""
    try:
        info = json.loads(file.metadata.get(_SHARDING, "{}"))
        wrong = [name for name, entry in info.items() if not _places(entry, len(file.shape(name)))]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        wrong = [_SHARDING]
    if wrong:
        raise corrupt(file.path, f"its header does not say where {wrong[0]!r} belongs")
    return dict(info)


def _places(entry: Any, dims: int) -> bool:
    return all(are_lengths(numbers) and len(numbers) == dims for numbers in (entry[_OFFSETS], entry[_FULL]))


def _intersection(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> Box | None:
    """Return the box that lies in both; None where there is none, or an empty one."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _divided(box: Box, itemsize: int) -> Iterator[Box]:
    """Yield the box in ranges of its first dim, so that little is in memory beside the tensor that they go to."""
    (first, last), rest = box[0], box[1:]
    step = max(1, _COPIED_BYTES // (_size(rest) * itemsize))
    for start in range(first, last, step):
        yield ((start, min(start + step, last)), *rest)


def _within(box: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a box as counted from the first element of `outer`."""
    return [(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer, strict=True)]


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
