"""A folder of results that are kept by key: one safetensors file for each, which any number of processes share.

A file is written under a name of its own and renamed when it is whole, so that readers see all of it or nothing, and
of two processes that write the same key one wins. Nothing is flushed to the disk: a file that a power cut has damaged
shows by its checksums, like any other damage, and counts as missing. Files are never removed here.

A full disk ends the writing, with a warning, and not the run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_mm5d.config.errors import CheckpointCorruptError
from lightning_mm5d.storage.tensor_file import TensorFile, TensorFileWriter
from lightning_mm5d.storage.tensor_header import Entry

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FeatureFiles:
    """The files of one folder.

    Args:
        folder: made with the first file.
        field: of the configuration that named it, for warnings.
    """

    def __init__(self, folder: str | os.PathLike[str], field: str) -> None:
        self._folder, self._field = Path(folder), field
        self._writes = True

    def path(self, key: str) -> Path:
        """Return the file of a key, of hexadecimal digits."""
        return self._folder / key[:2] / f"{key}.safetensors"

    def read(self, key: str) -> tuple[Any, list[Tensor]] | None:
        """Return what was written under `key`: its description, and its tensors on the CPU; None without a whole file.

        A damaged file is reported by a warning.
        """
        path = self.path(key)
        if not path.exists():
            return None
        try:
            file = TensorFile(path)
            description = json.loads(file.metadata["description"])
            if not file.has_checksums or file.metadata["digest"] != _digest(key, description, file.entries):
                raise CheckpointCorruptError(f"{str(path)!r}: its description differs from what was written")
            return description, [file.read(str(index)) for index in range(len(file.names()))]
        except (CheckpointCorruptError, KeyError, ValueError, RecursionError) as error:
            warnings.warn(f"{self._field}: these features are computed again. {error}", stacklevel=2)
            return None

    def write(self, key: str, description: Any, tensors: Sequence[Tensor]) -> None:
        """Keep a description, which JSON can hold, and tensors under `key`.

        Raises:
            ValueError: a dtype that no safetensors file can hold.
            OSError: the folder may not be written.
        """
        if not self._writes:
            return
        path = self.path(key)
        new = path.with_name(f".{key}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        specs = {str(index): (tensor.dtype, tuple(tensor.shape)) for index, tensor in enumerate(tensors)}
        entries = {name: Entry(dtype, shape, 0, 0) for name, (dtype, shape) in specs.items()}
        metadata = {"description": json.dumps(description), "digest": _digest(key, description, entries)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with TensorFileWriter(new, specs, metadata, flush=False) as file:
                for index, tensor in enumerate(tensors):
                    file.write(str(index), tensor)
            new.replace(path)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._writes = False
            warnings.warn(f"{self._field}: no more features are kept from here on: {error}", stacklevel=2)
        finally:
            new.unlink(missing_ok=True)


def _digest(key: str, description: Any, entries: Mapping[str, Entry]) -> str:
    """Return what a file's header must agree with; the bytes of tensors have checksums of their own."""
    shapes = sorted((name, str(entry.dtype), list(entry.shape)) for name, entry in entries.items())
    return hashlib.sha256(json.dumps([key, description, shapes]).encode()).hexdigest()
