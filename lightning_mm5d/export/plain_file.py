"""Opens a full checkpoint, a file of ``torch.save``, and reads its tensors one at a time.

The file is mapped, so that everything but tensors is known without reading them. A tensor is then read from its place
in the file into new memory: pages of the map are never touched, and the process holds the tensors that it asked for.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.checkpoint.full_file import load_full
from lightning_mm5d.config.errors import CheckpointCorruptError, ConfigError
from lightning_mm5d.sharded.remote_value import tensors_of
from lightning_mm5d.storage.files import Region, checked_region

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip's member: at its end the lengths of its name and its extra field


def open_plain(path: Path, weights_only: bool = True) -> dict[str, Any]:
    """Return what a full checkpoint holds, verified; its tensors are mapped.

    Of a file of plain torch, ``torch.save(model.state_dict(), path)``, or of a dict with one such entry, the tensors
    are its ``state_dict``.

    Args:
        path: of the file.
        weights_only: whether to refuse what needs pickle to run code.

    Raises:
        ConfigError: the file holds no tensors by name.
        CheckpointCorruptError: the file is damaged.
        CheckpointUntrustedError: the file asks for code to be run.
    """
    content = load_full(path, weights_only, mmap=True)
    if isinstance(content, dict) and isinstance(content.get("state_dict"), Mapping):
        return content
    if _is_state(content):
        return {"state_dict": content}
    states = {key: one for key, one in content.items() if _is_state(one)} if isinstance(content, Mapping) else {}
    usual = [states[key] for key in ("model", "model_state_dict", "module") if key in states]
    if usual or len(states) == 1:
        return {**content, "state_dict": (usual or list(states.values()))[0]}
    rule = "It has no state_dict, as checkpoints of Lightning have, and is none that torch.save wrote"
    raise ConfigError("CHECKPOINT", str(path), rule, "Name a checkpoint of Lightning, or a file with one state_dict")


def _is_state(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(one, Tensor) for one in value.values())


class PlainTensors:
    """The tensors of one dict of a full checkpoint, a `TensorSource`.

    Args:
        path: of the file.
        content: what `open_plain` returned.
        state: the dict in it, by name.
    """

    def __init__(self, path: Path, content: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        self._path = path
        self._state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self._base = map_base(path, content)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._state[name].dtype

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or its `region`, in memory of its own.

        Raises:
            CheckpointCorruptError: the file became shorter.
        """
        tensor = self._state[name].detach()
        bounds = checked_region(region, tuple(tensor.shape), name)
        tensor = tensor[tuple(slice(start, stop) for start, stop in bounds)]
        if self._base is None or tensor.numel() == 0:
            return tensor.clone()
        spans = (stride * (length - 1) for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
        memory = torch.empty(sum(spans) + 1, dtype=tensor.dtype, device="cpu")
        with self._path.open("rb") as file:
            file.seek(tensor.data_ptr() - self._base)
            wanted = memoryview(memory.view(torch.uint8).numpy())  # type: ignore[arg-type]
            if file.readinto(wanted) != len(wanted):
                raise CheckpointCorruptError(f"{self._path} is shorter than it was")
        return memory.as_strided(tensor.shape, tensor.stride())


def map_base(path: Path, content: Mapping[str, Any]) -> int | None:
    """Return the address of the file's first byte in the map that the tensors of `content` lie in.

    Returns None where they cannot be matched with the file's members.
    """
    addresses = sorted({each.untyped_storage().data_ptr() for each in tensors_of(content) if each.numel()})
    places = sorted(_places(path))
    if not addresses or len(places) != len(addresses):
        return None
    bases = {address - place for address, place in zip(addresses, places, strict=True)}
    return bases.pop() if len(bases) == 1 else None


def _places(path: Path) -> Iterator[int]:
    """The first byte of each tensor's memory in the file."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if "/data/" in member.filename and member.file_size:
                yield member_place(path, member)


def member_place(path: Path, member: zipfile.ZipInfo) -> int:
    """Return where the content of a zip's member begins in the file."""
    with path.open("rb") as file:
        file.seek(member.header_offset)
        name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return member.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)
