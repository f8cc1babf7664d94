"""A checkpoint directory appears as a whole or not at all, whoever is killed while writing it."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lightning_mm5d.features.sharded_checkpoints.directory import (
    CheckpointDirectory,
    DirectoryWriter,
)
from lightning_mm5d.storage.replacement import is_checkpoint_directory, new_save_id, remove_checkpoint


def save(path: Path, value: float) -> None:
    """Write a checkpoint of two tensor files and a small one, all about `value`."""
    writer = DirectoryWriter(path, new_save_id())
    try:
        writer.begin()
        files = {"state.json": writer.write_bytes("state.json", json.dumps(value).encode())}
        for rank in range(2):
            name = f"rank-{rank:05d}.safetensors"
            with writer.tensor_file(name, {"weight": (torch.float32, (40_000,))}) as file:
                file.write("weight", torch.full((40_000,), value + rank))
            files[name] = file.written
        writer.commit(files, {"step": value})
    except BaseException:
        writer.abort()
        raise


def load(path: Path) -> float:
    """Return the value of a checkpoint, of which all parts must be."""
    directory = CheckpointDirectory(path)
    directory.check_sizes()
    directory.verify()
    value = directory.fields["step"]
    assert json.loads(directory.read_bytes("state.json")) == value
    for rank, name in enumerate(directory.tensor_files()):
        weight = directory.tensor_file(name).read("weight")
        assert torch.equal(weight, torch.full((40_000,), value + rank))
    return value


def test_a_checkpoint_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "last.ckpt"
    for value in (1.0, 2.0):
        save(path, value)
        assert load(path) == value
        assert is_checkpoint_directory(path)
        assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]
    remove_checkpoint(path)
    remove_checkpoint(path)
    assert list(path.parent.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        CheckpointDirectory(path)


def test_a_file_or_a_link_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    for name in ("file", "link"):
        save(tmp_path / name, 3.0)
        assert load(tmp_path / name) == 3.0
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "link", "target"}


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder where flushing costs nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


class _Calls:
    """Counts calls that change files, and kills the process, or raises, at one of them."""

    NAMES = ("open", "mkdir", "pwrite", "fsync", "rename", "unlink", "rmdir")

    def __init__(self, at: int, end: Callable[[], None]) -> None:
        self.count, self._at, self._end = 0, at, end
        self.originals = {name: getattr(os, name) for name in self.NAMES}

    def __enter__(self) -> _Calls:
        for name, original in self.originals.items():
            setattr(os, name, self._counted(original))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self.originals.items():
            setattr(os, name, original)

    def _counted(self, original: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            self.count += 1
            if self.count == self._at:
                self._end()
            return original(*args, **kwargs)

        return call


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _save_and_be_killed(path: Path, at: int) -> bool:
    """Save in a child process that is killed at its call number `at`; return whether it was."""
    child = os.fork()
    if child == 0:
        with _Calls(at, _kill):
            save(path, 2.0)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_save_killed_at_any_of_its_calls_leaves_a_whole_checkpoint(memory_path: Path) -> None:
    found, aside, at = list[float](), 0, 0
    while True:
        path = memory_path / str(at) / "last.ckpt"
        save(path, 1.0)
        if not _save_and_be_killed(path, at := at + 1):
            break
        aside += not path.exists()
        found.append(load(path))
        save(path.with_name("next.ckpt"), 3.0)  # clears what the killed one left
        assert {entry.name for entry in path.parent.iterdir()} == {"last.ckpt", "next.ckpt"}
        assert load(path) == found[-1]
    assert aside == 1  # between the two renames
    assert found == sorted(found)  # the old one until the second rename, the new one from then on
    assert found.count(1.0) >= 20
    assert found.count(2.0) >= 6


def test_a_save_that_fails_at_any_of_its_calls_leaves_a_whole_checkpoint_and_nothing_else(memory_path: Path) -> None:
    def no_space() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    failed, at = 0, 0
    while True:
        path = memory_path / str(at) / "last.ckpt"
        save(path, 1.0)
        calls = _Calls(at := at + 1, no_space)
        with calls, suppress(OSError):
            save(path, 2.0)
        if calls.count < at:
            break
        value = load(path)
        failed += value == 1.0
        if value == 1.0:
            assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"], at
    assert failed >= 20


def test_a_save_leaves_alone_what_another_still_writes(tmp_path: Path) -> None:
    other = DirectoryWriter(tmp_path / "a.ckpt", new_save_id())
    other.begin()
    other.write_bytes("state.json", b"1")
    save(tmp_path / "b.ckpt", 1.0)
    assert (other.folder / "state.json").read_bytes() == b"1"
    other.abort()
    (tmp_path / ".a.ckpt.0123456789abcdef.mm5d-new").mkdir()  # of a killed save
    (tmp_path / ".a.ckpt.0123.mm5d-new").mkdir()  # somebody else's
    save(tmp_path / "b.ckpt", 2.0)
    assert {entry.name for entry in tmp_path.iterdir()} == {"b.ckpt", ".a.ckpt.0123.mm5d-new"}


def test_a_full_disk_and_a_folder_that_may_not_be_written_are_named(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*rank-00000"):
            save(path, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    (tmp_path / "folder").touch()
    with pytest.raises(FileExistsError):  # root may write anywhere, so a file stands where a folder must
        save(tmp_path / "folder" / "a.ckpt", 2.0)
    with pytest.raises(ValueError, match="is no path"):
        save("s3://bucket/a.ckpt", 2.0)  # type: ignore[arg-type]
    assert load(path) == 1.0
