"""Full checkpoints, files of ``torch.save``: opened and read, and written for plain Lightning, one tensor at a time.

A file that is read is mapped, so that everything but tensors is known without reading them. A tensor is then read from
its place in the file into new memory: pages of the map are never touched.

Phases of writing one: `torch.save` writes a draft, with stand-ins without memory in place of all tensors, and leaves
holes where their bytes belong. The draft is loaded, which shows which hole is whose. Then its records are copied into
the final file, and each tensor is read when its turn comes. So no more than one tensor is in memory, and pickles are
those of `torch.save`.

A folder that appears whole or not at all: written beside its place, flushed, then renamed.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # torch.serialization.skip_data is documented with it
from typing_extensions import override

from lightning_mm5d.checkpoint.full_file import load_full
from lightning_mm5d.config.errors import CheckpointCorruptError, ConfigError
from lightning_mm5d.features.sharded_checkpoints.sharded_load import SavedOptimizerState, SavedWeights
from lightning_mm5d.sharded.remote_value import tensors_of
from lightning_mm5d.storage.files import Region, StateDictSource, TensorSource, flush

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
    states = {key: state for key, state in content.items() if _is_state(state)} if isinstance(content, Mapping) else {}
    usual = [states[key] for key in ("model", "model_state_dict", "module") if key in states]
    if usual or len(states) == 1:
        return {**content, "state_dict": (usual or list(states.values()))[0]}
    rule = "It has no state_dict, as checkpoints of Lightning have, and is none that torch.save wrote"
    raise ConfigError("CHECKPOINT", str(path), rule, "Name a checkpoint of Lightning, or a file with one state_dict")


def _is_state(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(tensor, Tensor) for tensor in value.values())


class PlainTensors(StateDictSource):
    """The tensors of one dict of a full checkpoint, read from their places in the file.

    Args:
        path: of the file.
        content: what `open_plain` returned.
        state: the dict in it, by name.
    """

    def __init__(self, path: Path, content: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        super().__init__(state)
        self._path, self._base = path, map_base(path, content)

    @override
    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or its `region`, in memory of its own.

        Raises:
            CheckpointCorruptError: the file became shorter.
        """
        tensor = super().read(name, region)
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


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `path` when the context is left without an error.

    Raises:
        ConfigError: `path` exists and is not an empty folder, or cannot be made.
    """
    check_new(path)
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            draft.chmod(0o777 & ~umask())
            yield draft
            for each in (*draft.rglob("*"), draft):
                flush(each)
            draft.rename(path)  # replaces an empty folder, and fails where another process was first
            flush(path.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def check_new(path: Path) -> None:
    """Raise ConfigError where `path` is a file, or a folder with something in it."""
    with _writable(path):
        taken = path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir())))
    if taken:
        raise ConfigError("DIR", str(path), "It exists already, and nothing is overwritten", "Name another folder")


def check_new_file(path: Path) -> None:
    """Raise ConfigError where `path` exists."""
    if os.path.lexists(path):
        raise ConfigError("DIR", str(path), "It exists already, and nothing is overwritten", "Name another file")


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Refuse a place that cannot be written, or looked at."""
    try:
        yield
    except OSError as error:
        rule = f"It cannot be written: {error.strerror or error}"
        raise ConfigError("DIR", str(path), rule, "Name a folder that can, on a disk with room") from error


def umask() -> int:
    """Return which permissions new files of this process lack."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


Read = Callable[[], Tensor]
_ALIGNMENT = 64  # bytes, as torch.save aligns tensors
_EXTRA, _ZIP64_EXTRA = struct.Struct("<HH"), 20  # in a member's header: id and length; bytes for sizes over 4 GB
_HEADER_BYTES = 30  # of a member, without its name and extra field
_PADDING = 0x4246  # torch's id of padding
_CHUNK_BYTES = 2**24


def write_lightning(path: Path, content: Mapping[str, Any], same: Iterable[Sequence[str]] = ()) -> None:
    """Write what a checkpoint holds into a new file.

    Args:
        path: of the file.
        content: what Lightning loads, of a full or a sharded checkpoint.
        same: names of weights that stand for one tensor, group by group.

    Raises:
        ConfigError: the file exists or cannot be written, or there are tensors inside of objects.
    """
    check_new_file(path)
    builder = _StandIns(same)
    with FakeTensorMode():
        stand_ins = builder.of(content)
    with _beside(path) as draft, _beside(path) as final:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(stand_ins, draft)
        holes = _holes(draft, builder.reads)
        with zipfile.ZipFile(draft) as source, zipfile.ZipFile(final, "w") as target:
            for member in source.infolist():
                name = f"{path.stem}/{member.filename.partition('/')[2]}"
                with target.open(_info(target, name, member.file_size), "w") as file:
                    if "/data/" in member.filename:
                        if member.file_size:
                            _write(file, holes[member_place(draft, member)]())
                    else:
                        file.write(source.read(member))
        final.chmod(0o666 & ~umask())
        with final.open("rb") as file:
            os.fsync(file.fileno())
        os.link(final, path)  # fails where another process was first


class _StandIns:
    """Copies of trees in which tensors have no memory; tensors that share memory share a stand-in.

    Args:
        same: names of weights that stand for one tensor, group by group.

    Attributes:
        reads: the tensors in the order of the tree.
    """

    def __init__(self, same: Iterable[Sequence[str]]) -> None:
        self._first = {name: group[0] for group in same for name in group}
        self.reads: list[Read] = []
        self._tensors: dict[Any, Tensor] = {}

    def of(self, tree: Any) -> Any:
        """Return a copy of a tree, under the `FakeTensorMode`."""
        if isinstance(tree, Tensor):
            place = (tree.data_ptr(), tree.stride()) if tree.numel() else id(tree)
            return self._stand_in((place, tree.shape, tree.dtype), tree.shape, tree.dtype, lambda: tree)
        if isinstance(tree, SavedWeights):
            stand_ins = {name: self._read_later(tree, name, self._first.get(name, name)) for name in tree.names()}
            return {name: stand_ins[name] if name in stand_ins else tree[name] for name in tree}
        if isinstance(tree, SavedOptimizerState):
            return {index: self._state(*tree.parts(index)) for index in tree}
        if type(tree) in (dict, OrderedDict):
            return type(tree)((key, self.of(value)) for key, value in tree.items())
        if type(tree) in (list, tuple):
            return type(tree)(self.of(value) for value in tree)
        self.reads += [partial(Tensor.detach, tensor) for tensor in tensors_of(tree)]  # of other kinds of containers
        return tree

    def _state(self, source: TensorSource, names: Mapping[str, str], rest: Mapping[str, Any]) -> dict[str, Any]:
        """The state of one parameter."""
        return {**{key: self._read_later(source, name, name) for key, name in names.items()}, **self.of(dict(rest))}

    def _read_later(self, source: TensorSource, name: str, memory: str) -> Tensor:
        return self._stand_in((id(source), memory), source.shape(name), source.dtype(name), partial(source.read, name))

    def _stand_in(self, key: Any, shape: Sequence[int], dtype: torch.dtype, read: Read) -> Tensor:
        self.reads.append(read)
        if key not in self._tensors:
            self._tensors[key] = torch.empty(shape, dtype=dtype, device="cpu")
        return self._tensors[key]


def _holes(draft: Path, reads: list[Read]) -> dict[int, Read]:
    """By the place in the draft, what belongs there."""
    content = torch.load(draft, map_location="cpu", mmap=True, weights_only=False)  # of this process
    base = map_base(draft, content)
    tensors = tensors_of(content)
    if base is None and any(each.numel() for each in tensors):
        rule = "It has tensors inside of objects, for instance of a callback, which cannot be read one by one"
        raise ConfigError("CHECKPOINT", "its content", rule, "Use --format huggingface")
    return {each.data_ptr() - (base or 0): read for each, read in zip(tensors, reads, strict=True) if each.numel()}


def _info(target: zipfile.ZipFile, name: str, size: int) -> zipfile.ZipInfo:
    """A member's header, padded so that its content is aligned."""
    info = zipfile.ZipInfo(name)
    info.file_size = size
    assert target.fp is not None
    large = _ZIP64_EXTRA if size * 1.05 > zipfile.ZIP64_LIMIT else 0  # as zipfile decides it
    start = target.fp.tell() + _HEADER_BYTES + len(name.encode()) + large + _EXTRA.size
    padding = -start % _ALIGNMENT
    info.extra = _EXTRA.pack(_PADDING, padding) + bytes(padding)
    return info


def _write(file: Any, tensor: Tensor) -> None:
    memory = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    for start in range(0, len(memory), _CHUNK_BYTES):
        file.write(memory[start : start + _CHUNK_BYTES])


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A hidden file beside `path`, removed at the end."""
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(descriptor)
        try:
            yield Path(name)
        finally:
            os.unlink(name)
