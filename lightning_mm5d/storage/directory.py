"""A checkpoint directory: many processes write its files, it appears as a whole, and each byte read is verified.

A save has a random id and works on hidden siblings of the directory ``NAME``. Process 0 does, one after the other:

1. `begin`: clears what dead saves left in the folder, then makes ``.NAME.ID.mm5d-lock`` and ``.NAME.ID.mm5d-new``. The
   lock is held until the end: the operating system frees that of a killed process.
2. All processes write files into ``.NAME.ID.mm5d-new``, and flush each one to the disk.
3. `commit`: writes the manifest, renames an older ``NAME`` to ``.NAME.ID.mm5d-old`` and the new directory to ``NAME``.
   Then it deletes the older one.

A save that is killed before step 3 leaves ``NAME`` as it was. Between the two renames the older directory is complete
under its hidden name, where `resolve` finds it; the next save gives it back its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightning_mm5d.storage.files import (
    WrittenFile,
    corrupt,
    flush_folder,
    opened,
    read_whole,
    write_whole,
)
from lightning_mm5d.storage.manifest import MANIFEST, Manifest, encode_manifest, read_manifest
from lightning_mm5d.storage.tensor_file import TensorFile, TensorFileWriter

TENSOR_SUFFIX = ".safetensors"
_LOCK, _NEW, _OLD = "mm5d-lock", "mm5d-new", "mm5d-old"
_HIDDEN = re.compile(rf"\.(?P<name>.+)\.(?P<save>[0-9a-f]{{16}})\.(?:{_LOCK}|{_NEW}|{_OLD})")


def new_save_id() -> str:
    """Return a random id; one process draws it for all that write the same directory."""
    return secrets.token_hex(8)


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
        self.path = Path(os.path.abspath(path))
        self.folder = _hidden(self.path, save_id, _NEW)
        self._old = _hidden(self.path, save_id, _OLD)
        self._lock_path = _hidden(self.path, save_id, _LOCK)
        self._lock: int | None = None

    def begin(self) -> None:
        """Make the folder to write to, after removing what dead saves left beside it.

        Raises:
            OSError: the disk is full or may not be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path.parent)
        self._lock = _take_lock(self._lock_path)
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
            if os.path.lexists(self.path):
                os.rename(self.path, self._old)
            os.rename(self.folder, self.path)
            flush_folder(self.path.parent)
        except BaseException:
            self.abort()
            raise
        _delete(self._old)
        self._release()

    def abort(self) -> None:
        """Remove what this save has written; an older directory keeps its name."""
        with suppress(OSError):  # the error that ended the save says more; the next save removes what stays
            _clear(self.path, self.folder, self._old)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            with suppress(OSError):  # the next save removes it
                self._lock_path.unlink()
            os.close(self._lock)
            self._lock = None


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


def resolve(path: str | os.PathLike[str]) -> Path:
    """Return where the checkpoint `path` is: there, or put aside by a save that was killed while replacing it."""
    place = Path(os.path.abspath(path))
    if os.path.lexists(place):
        return place
    aside = [
        entry
        for entry in (place.parent.iterdir() if place.parent.is_dir() else ())
        if entry.name.endswith(_OLD) and _HIDDEN.fullmatch(entry.name) and _original(entry) == place
    ]
    return max(aside, key=lambda entry: entry.lstat().st_mtime_ns, default=place)


def is_checkpoint_directory(path: str | os.PathLike[str]) -> bool:
    """Return whether `path`, or what was put aside for it, is a directory."""
    return resolve(path).is_dir()


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint; a process killed meanwhile leaves no half of it under its name.

    Raises:
        OSError: it may not be deleted.
    """
    place = Path(os.path.abspath(path))
    hidden = _hidden(place, new_save_id(), _NEW)
    try:
        os.rename(place, hidden)
    except FileNotFoundError:
        return
    _delete(hidden)


def remove_leftovers(folder: Path) -> None:
    """Remove what saves of killed processes left in `folder`; directories that they put aside get their names back."""
    saves = {
        (_original(entry), match["save"]) for entry in folder.iterdir() if (match := _HIDDEN.fullmatch(entry.name))
    }
    for path, save_id in saves:
        lock_path = _hidden(path, save_id, _LOCK)
        lock = _lock_of_dead_save(lock_path)
        if lock is None:
            continue
        _clear(path, _hidden(path, save_id, _NEW), _hidden(path, save_id, _OLD))
        lock_path.unlink(missing_ok=True)
        os.close(lock)


def _hidden(path: Path, save_id: str, kind: str) -> Path:
    return path.with_name(f".{path.name}.{save_id}.{kind}")


def _original(entry: Path) -> Path:
    match = _HIDDEN.fullmatch(entry.name)
    assert match is not None
    return entry.with_name(match["name"])


def _take_lock(path: Path) -> int:
    """Make the file `path` and lock it; where the file system has no locks, nobody can tell dead saves either."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            return descriptor
        try:
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:
            pass  # another save took the new file for that of a dead one
        os.close(descriptor)


def _lock_of_dead_save(path: Path) -> int | None:
    """Return the locked file of a save whose process is gone, or None."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return None  # somebody else's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _clear(path: Path, new: Path, old: Path) -> None:
    """Give `old` back its name `path` where nothing has it, and delete the rest of an unfinished save."""
    if os.path.lexists(old) and not os.path.lexists(path):
        os.rename(old, path)
    _delete(old)
    _delete(new)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
