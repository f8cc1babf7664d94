"""Full checkpoints: one file that plain Lightning loads too, written as a whole and verified before it is unpickled.

`torch.save` writes a zip archive with a checksum for each record, which `torch.load` does not compare. Here all of them
are compared first, and the archive must consist of its records and their list alone.

Unpickling makes tensors, plain types and what `AllowedGlobals` lists. Another class or function in a file is refused by
its name, unless the caller trusts the file and says ``weights_only=False``.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import fsspec
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io import CheckpointIO
from typing_extensions import override

from lightning_mm5d.checkpoint.allowed_globals import AllowedGlobals
from lightning_mm5d.config.errors import CheckpointUntrustedError
from lightning_mm5d.storage.archive import ENTRY_START, ArchiveError, verify_archive
from lightning_mm5d.storage.files import corrupt
from lightning_mm5d.storage.replacement import Replacement, new_save_id, remove_checkpoint

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
    except (RuntimeError, OSError) as error:
        replacement.abort()
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError):  # torch says only that it could not write
            raise OSError(cause.errno, cause.strerror, os.fspath(path)) from None
        raise
    except BaseException:
        replacement.abort()
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
        found = re.findall(r"GLOBAL (\S+)", str(error)) or _globals(file, is_archive)
        if not found and not is_archive:
            raise corrupt(name, "it is neither an archive nor a pickle") from None
        raise _untrusted(name, found) from None
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


@contextmanager
def _checksums() -> Iterator[None]:
    """Have torch write the checksums of records, whatever it is set to."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _untrusted(name: str, found: list[str]) -> CheckpointUntrustedError:
    what = ", ".join(dict.fromkeys(found)) or "an instruction that no checkpoint of tensors and plain values needs"
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
    found, words = list[str](), ["", ""]
    with warnings.catch_warnings(action="ignore"), suppress(*_DAMAGE):  # until they end, or are no pickles
        while True:
            for code, argument, _ in pickletools.genops(pickles):
                if isinstance(argument, str):
                    words = [words[-1], argument]
                if code.name in ("GLOBAL", "INST") and isinstance(argument, str):
                    found.append(argument.replace(" ", "."))
                elif code.name == "STACK_GLOBAL":
                    found.append(".".join(words))
    return found
