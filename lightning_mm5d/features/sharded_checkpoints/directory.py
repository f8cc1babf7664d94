"""A checkpoint directory: many processes write its files, it appears as a whole, and each byte read is verified.

Its manifest has files with sizes and checksums, and what the writer notes beside them. It is written last, so that a
directory without one was never finished. It is JSON with a checksum of itself in front. Checksums find damage; they are
no signatures, so what a manifest says is checked like any untrusted input.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_mm5d.storage.files import WrittenFile, corrupt, flush_folder, opened, read_whole, write_whole
from lightning_mm5d.storage.replacement import Replacement, resolve
from lightning_mm5d.storage.tensor_file import TensorFile, TensorFileWriter

MANIFEST = "manifest.json"
VERSION = 1
_FORMAT = "lightning_mm5d checkpoint"
_LIMIT = 256 * 2**20  # bytes
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_HEAD, _TAIL = '{"checksum":"%08x","manifest":', "}\n"


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


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint directory.

    Raises:
        CheckpointCorruptError: it is missing or damaged, or names files outside of the directory.
    """
    path = folder / MANIFEST
    text = read_whole(path, _LIMIT, follow=False)
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
        if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and n >= 0 for n in value)):
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
    """

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
        return TensorFileWriter(self.folder / name, specs, metadata)

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
            flush_folder(self.folder)
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

    Attributes:
        path: where it was found.
        fields: what the writer noted.
        files: size and checksum of each file, by name.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        CheckpointCorruptError: there is no manifest, or a damaged one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = resolve(path)
        if not os.path.lexists(self.path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(self.path))
        if not os.path.lexists(self.path / MANIFEST):
            raise corrupt(self.path, f"it has no {MANIFEST}: the save was never finished, or this is no checkpoint")
        manifest = read_manifest(self.path)
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
        data = read_whole(path, limit, follow=False)
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
        return TensorFile(path, written, follow=False)

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
