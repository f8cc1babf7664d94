"""A folder that appears whole or not at all: written beside its place, flushed, then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_mm5d.config.errors import ConfigError


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `path` when the context is left without an error.

    Raises:
        ConfigError: `path` exists and is not an empty folder, or cannot be made.
    """
    check_new(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        made.chmod(0o777 & ~umask())
        yield made
        for each in (*made.rglob("*"), made):
            _flush(each)
        made.rename(path)  # replaces an empty folder, and fails where another process was first
        _flush(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def check_new(path: Path) -> None:
    """Raise ConfigError where `path` is a file, or a folder with something in it."""
    try:
        taken = path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir())))
    except OSError as error:
        raise unwritable(path, error) from error
    if taken:
        raise ConfigError("DIR", str(path), "It exists already, and nothing is overwritten", "Name another folder")


def check_new_file(path: Path) -> None:
    """Raise ConfigError where `path` exists."""
    if os.path.lexists(path):
        raise ConfigError("DIR", str(path), "It exists already, and nothing is overwritten", "Name another file")


def unwritable(path: Path, error: OSError) -> ConfigError:
    """Return the error of a place that cannot be written."""
    rule = f"It cannot be written: {error.strerror or error}"
    return ConfigError("DIR", str(path), rule, "Name a folder that can, on a disk with room")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def umask() -> int:
    """Return which permissions new files of this process lack."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
