"""Puts a new file or directory in the place of an older one, so that there is never a moment without a whole one.

A save has a random id and works on hidden siblings of ``NAME``. It does, one after the other:

1. `begin`: clears what dead saves left in the folder, then makes and locks ``.NAME.ID.mm5d-lock``. The operating system
   frees the lock of a killed process.
2. The caller writes ``.NAME.ID.mm5d-new``, and flushes it to the disk.
3. `commit`: renames an older directory ``NAME`` to ``.NAME.ID.mm5d-old`` and the new one to ``NAME``. Then it deletes
   the older one.

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
from contextlib import suppress
from pathlib import Path

from lightning_mm5d.storage.files import flush

_LOCK, _NEW, _OLD = "mm5d-lock", "mm5d-new", "mm5d-old"
_HIDDEN = re.compile(rf"\.(?P<name>.+)\.(?P<save>[0-9a-f]{{16}})\.(?:{_LOCK}|{_NEW}|{_OLD})")
_OF_CHECKPOINT = re.compile(r"manifest\.json|state\.json|objects\.pt|rank-[0-9-]+\.safetensors")


def new_save_id() -> str:
    """Return a random id; one process draws it for all that write the same checkpoint."""
    return secrets.token_hex(8)


class Replacement:
    """One save of a file or directory.

    Args:
        path: what is made or replaced.
        save_id: from `new_save_id`.

    Attributes:
        path: what is made or replaced, absolute.
        new: where it is written meanwhile.

    Raises:
        ValueError: the path is the address of something remote, where nothing can be renamed.
    """

    def __init__(self, path: str | os.PathLike[str], save_id: str) -> None:
        if "://" in os.fspath(path):
            raise ValueError(f"{os.fspath(path)!r} is no path. Save to a local or mounted folder")
        self.path = Path(os.path.abspath(path))
        self.new = _hidden(self.path, save_id, _NEW)
        self._old = _hidden(self.path, save_id, _OLD)
        self._lock_path = _hidden(self.path, save_id, _LOCK)
        self._lock: int | None = None

    def begin(self) -> None:
        """Make the folder around, remove what dead saves left there, and mark this save as alive.

        Raises:
            OSError: the disk is full or may not be written, or the path is a folder with other files in it.
        """
        if self.path.is_dir() and not self.path.is_symlink():
            others = [entry.name for entry in self.path.iterdir() if not _OF_CHECKPOINT.fullmatch(entry.name)]
            if others:
                text = f"The folder holds {min(others)!r}, which is of no checkpoint, and would be deleted"
                raise FileExistsError(errno.EEXIST, text, os.fspath(self.path))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path.parent)
        self._lock = _take_lock(self._lock_path)

    def commit(self) -> None:
        """Give what was written its name, and delete the older one.

        Raises:
            OSError: the disk may not be written; the older one keeps its name.
        """
        try:
            if os.path.lexists(self.path) and (self.new.is_dir() or self.path.is_dir()):
                os.rename(self.path, self._old)
            os.rename(self.new, self.path)
            flush(self.path.parent)
        except BaseException:
            self.abort()
            raise
        with suppress(OSError):  # the next save removes it
            _delete(self._old)
        self._release()

    def abort(self) -> None:
        """Remove what this save has written; an older one keeps its name."""
        with suppress(OSError):  # the error that ended the save says more; the next save removes what stays
            _clear(self.path, self.new, self._old)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                self._lock_path.unlink()
            os.close(self._lock)
            self._lock = None


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
    """Delete a file or directory; a process killed meanwhile leaves no half of it under its name.

    Raises:
        OSError: it may not be deleted.
    """
    place = Path(os.path.abspath(path))
    hidden = _hidden(place, new_save_id(), _NEW)
    with suppress(FileNotFoundError):
        os.rename(place, hidden)
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
        with suppress(OSError):  # a later save tries again
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
