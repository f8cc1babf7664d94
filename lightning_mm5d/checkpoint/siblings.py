"""The checkpoints beside another one: the last good one before it, and links to them."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_mm5d.config.errors import CheckpointCorruptError
from lightning_mm5d.storage.directory import CheckpointDirectory
from lightning_mm5d.storage.files import flush_folder
from lightning_mm5d.storage.replacement import new_save_id, remove_checkpoint, resolve


def earlier_checkpoints(path: str | os.PathLike[str]) -> list[Path]:
    """Return the sharded checkpoints in the folder of `path` that are not it, those of later steps first.

    Those of later steps than that of `path`, where it still says its step, are left out.
    """
    place = resolve(path)
    limit = _step(place)
    found: dict[Path, float] = {}
    for entry in sorted(place.parent.iterdir()) if place.parent.is_dir() else ():
        other = Path(os.path.realpath(entry))
        if entry.name.startswith(".") or not other.is_dir() or other == Path(os.path.realpath(place)):
            continue
        step = _step(other)
        if step is not None and (limit is None or step <= limit):
            found[other] = step
    return sorted(found, key=lambda other: (found[other], other.lstat().st_mtime_ns), reverse=True)


def link(target: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Make `path` a symbolic link to `target` in place of what it is, in one step where that is no directory."""
    place = Path(os.path.abspath(path))
    aside = place.with_name(f".{place.name}.{new_save_id()}.link")
    os.symlink(os.path.relpath(os.path.abspath(target), place.parent), aside)
    if place.is_dir() and not place.is_symlink():
        remove_checkpoint(place)
    os.replace(aside, place)
    flush_folder(place.parent)


def _step(path: Path) -> float | None:
    try:
        step = CheckpointDirectory(path).fields.get("step")
    except (CheckpointCorruptError, OSError):
        return None
    return step if isinstance(step, int) else None
