"""The manifest of a checkpoint directory: its files with sizes and checksums, and what the writer notes beside them.

It is written last, so that a directory without one was never finished. It is JSON with a checksum of itself in front.
Checksums find damage; they are no signatures, so what a manifest says is checked like any untrusted input.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_mm5d.storage.files import WrittenFile, corrupt, read_whole

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
