"""A damaged or hostile checkpoint directory is refused, or loads bitwise equal; nothing is silent and nothing runs."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mm5d.config.errors import CheckpointCorruptError
from lightning_mm5d.features.sharded_checkpoints.directory import MANIFEST, CheckpointDirectory, DirectoryWriter
from lightning_mm5d.features.sharded_checkpoints.json_state import decode_state, encode_state
from lightning_mm5d.storage.replacement import new_save_id

Loaded = tuple[dict[str, torch.Tensor], Any]


def _tensors(seed: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return {
        "layers.0.weight": torch.randn(90, 200, generator=generator),
        "layers.0.bias": torch.randn(7, generator=generator, dtype=torch.float64),
        "layers.1.weight": torch.randn(40, 3, generator=generator).bfloat16(),
        "steps": torch.tensor(seed),
    }


def _save(path: Path, seed: int) -> Loaded:
    """Write the checkpoint of two ranks; return what it holds."""
    writer = DirectoryWriter(path, new_save_id())
    writer.begin()
    state = {"epoch": seed, "callbacks": {("best", 1): 0.25 * seed}, "lr": [1e-3] * 20}
    files, tensors = {"state.json": writer.write_bytes("state.json", encode_state(state).text)}, {}
    for rank in range(2):
        name, own = f"rank-{rank:05d}.safetensors", _tensors(seed, rank)
        with writer.tensor_file(name, {key: (t.dtype, t.shape) for key, t in own.items()}, {"rank": str(rank)}) as file:
            for key, tensor in own.items():
                file.write(key, tensor)
        files[name] = file.written
        tensors |= {f"{rank}.{key}": tensor for key, tensor in own.items()}
    writer.commit(files, {"step": seed})
    return tensors, [state, {"step": seed}]


def _load(path: Path) -> Loaded:
    """Read all of a checkpoint as ranks of another layout do: columns of some tensors, others as a whole."""
    directory, tensors = CheckpointDirectory(path), {}
    state = decode_state(directory.read_bytes("state.json"), {}.__getitem__, {})
    for rank, name in enumerate(directory.tensor_files()):
        file = directory.tensor_file(name)
        for key in file.names():
            if len(file.shape(key)) == 2:
                rows, columns = file.shape(key)
                halves = [file.read(key, [(0, rows), bound]) for bound in ((0, 1), (1, columns))]
                tensors[f"{rank}.{key}"] = torch.cat(halves, 1)
            else:
                tensors[f"{rank}.{key}"] = file.read(key)
    return tensors, [state, dict(directory.fields)]


def _same(a: Loaded, b: Loaded) -> bool:
    return a[1] == b[1] and a[0].keys() == b[0].keys() and all(torch.equal(a[0][name], b[0][name]) for name in a[0])


def _flip(data: bytes, choose: random.Random) -> bytes:
    changed = bytearray(data)
    changed[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    return bytes(changed)


def _zero(data: bytes, choose: random.Random) -> bytes:
    start = choose.randrange(len(data))
    return data[:start] + bytes(min(64, len(data) - start)) + data[start + 64 :]


def _swap(data: bytes, choose: random.Random) -> bytes:
    changed, length = bytearray(data), min(16, len(data) // 2)
    a, b = (choose.randrange(len(data) - length + 1) for _ in range(2))
    changed[a : a + length], changed[b : b + length] = data[b : b + length], data[a : a + length]
    return bytes(changed)


def _cut(data: bytes, choose: random.Random) -> bytes:
    start, stop = sorted(choose.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[stop:]


def _replace(*words: tuple[bytes, bytes]) -> Callable[[bytes, random.Random], bytes]:
    def change(data: bytes, choose: random.Random) -> bytes:
        old, new = choose.choice(words)
        return data.replace(old, new, 1)

    return change


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": _flip,
    "zero": _zero,
    "swap": _swap,
    "cut": _cut,
    "truncate": lambda data, choose: data[: choose.randrange(len(data))],
    "append": lambda data, choose: data + choose.choice([b"\0", b" ", data]),
    "a shape": _replace((b"[90,200]", b"[200,90]"), (b"[40,3]", b"[30,4]"), (b"[7]", b"[8]"), (b"[]", b"[1]")),
    "a dtype": _replace(
        (b'"F32"', b'"I32"'), (b"BF16", b"F16 "), (b"BF16", b" F16"), (b"F64", b"I64"), (b"F32", b"F16")
    ),
    "an offset": _replace((b'"data_offsets":[0,', b'"data_offsets":[8,'), (b"72056]", b"72064]"), (b",56]", b",72]")),
    "a name": _replace((b"layers.0", b"layers.2"), (b'"epoch"', b'"Epoch"'), (b'"step"', b'"stop"'), (b"lr", b"rl")),
    "a name twice": _replace(
        (b"layers.1.weight", b"layers.0.weight"),
        (b'{"dtype"', b'{"dtype":"F32","dtype"'),
        (b'"fields"', b'"files":{},"fields"'),
        (b'{"epoch"', b'{"epoch":7,"epoch"'),
    ),
    "a number": _replace(
        (b"0.25", b"0.26"), (b": 1,", b": 2,"), (b'"version": 1', b'"version": 2'), (b"0.001", b"0.002")
    ),
}
FILES = ("state.json", MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors")


def _of_bytes(folder: Path, other: Path, choose: random.Random) -> str:
    kind, path = choose.choice(list(BYTES)), folder / choose.choice(FILES)
    path.write_bytes(BYTES[kind](path.read_bytes(), choose))
    return kind


def _of_files(folder: Path, other: Path, choose: random.Random) -> str:
    kind = choose.choice(["delete", "empty", "of another save", "exchange", "a folder", "a link", "more"])
    path, second = (folder / name for name in choose.sample(FILES, 2))
    if kind in ("delete", "a folder"):
        path.unlink()
        if kind == "a folder":
            path.mkdir()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "of another save":
        shutil.copy(other / path.name, path)
    elif kind == "exchange":
        path.rename(folder / "aside")
        second.rename(path)
        (folder / "aside").rename(second)
    elif kind == "a link":
        path.unlink()
        path.symlink_to(other / path.name)
    else:
        shutil.copy(other / FILES[2], folder / "rank-00002.safetensors")
    return kind


def _content(folder: Path) -> dict[str, Any]:
    return {entry.name: (entry.is_symlink(), entry.is_dir() or entry.read_bytes()) for entry in folder.iterdir()}


def damaged_directories(folder: Path, seeds: range) -> Counter:
    """Load damaged copies of a checkpoint; count how each kind ended."""
    good, other, damaged = (folder / name for name in ("good", "other", "damaged"))
    expected = _save(good, 1)
    _save(other, 2)
    assert _same(_load(good), expected)
    ended = Counter[str]()
    for seed in seeds:
        choose = random.Random(seed)
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(good, damaged)
        kind = choose.choice([_of_bytes, _of_bytes, _of_files])(damaged, other, choose)
        if _content(damaged) == _content(good):
            continue  # what was to be changed does not stand in that file
        try:
            assert _same(_load(damaged), expected), (seed, kind)
            ended[f"{kind} equal"] += 1
        except CheckpointCorruptError as error:
            assert str(damaged) in str(error) or "state of a checkpoint" in str(error)  # noqa: PT017
            ended["refused"] += 1
    return ended


def test_a_damaged_directory_is_refused_or_loads_bitwise_equal(tmp_path: Path) -> None:
    ended = damaged_directories(tmp_path, range(270))
    assert ended.total() >= 200
    assert ended["refused"] >= 190
    assert ended.keys() <= {"refused", "more equal"}  # a file that the manifest does not name is not read


@pytest.mark.exhaustive
def test_many_damaged_directories_are_refused_or_load_bitwise_equal(tmp_path: Path) -> None:
    ended = damaged_directories(tmp_path, range(270, 10_000))
    assert ended["refused"] >= 7000


def test_every_byte_of_every_file_is_verified(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    choose = random.Random(5)
    for name in FILES:
        path = tmp_path / "a" / name
        data = path.read_bytes()
        for _ in range(25):
            path.write_bytes(_flip(data, choose))
            with pytest.raises(CheckpointCorruptError, match="manifest.json|" + name):
                CheckpointDirectory(tmp_path / "a").verify()
        path.write_bytes(data)
    CheckpointDirectory(tmp_path / "a").verify()


def _write_manifest(folder: Path, change: Callable[[dict], Any]) -> None:
    """Change a manifest as an attacker does, with a right checksum."""
    tree = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    changed = change(tree)
    body = changed if isinstance(changed, str) else json.dumps(tree)
    (folder / MANIFEST).write_text(f'{{"checksum":"{zlib.crc32(body.encode()):08x}","manifest":{body}}}\n')


def _of(path: str) -> Callable[[dict], Any]:
    return lambda tree: tree["files"].update({path: tree["files"]["state.json"]})


MANIFESTS: dict[str, Callable[[dict], Any]] = {
    "a path up": _of("../secret.safetensors"),
    "an absolute path": _of("/etc/passwd"),
    "a hidden file": _of(".secret"),
    "a folder's file": _of("a/b.safetensors"),
    "another separator": _of("..\\secret"),
    "a zero byte": _of("a\0b"),
    "a line": _of("a\n"),
    "no name": _of(""),
    "itself": _of(MANIFEST),
    "a long name": _of("a" * 5000),
    "deep nesting": lambda tree: '{"format":' + "[" * 200_000,
    "deep nesting that ends": lambda tree: "[" * 200_000 + "]" * 200_000,
    "a long number": lambda tree: '{"version":' + "9" * 100_000 + "}",
    "a list": lambda tree: "[]",
    "a string for the files": lambda tree: tree.update(files="state.json"),
    "a size of text": lambda tree: tree["files"].update(a=["1", 2]),
    "a negative size": lambda tree: tree["files"].update(a=[-1, 2]),
    "another version": lambda tree: tree.update(version=2),
    "another format": lambda tree: tree.update(format="x"),
    "no fields": lambda tree: tree.pop("fields"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_hostile_manifest_is_refused(tmp_path: Path, case: str) -> None:
    _save(tmp_path / "a", 1)
    _write_manifest(tmp_path / "a", lambda tree: None)
    assert CheckpointDirectory(tmp_path / "a").fields == {"step": 1}  # a right checksum alone is accepted
    _write_manifest(tmp_path / "a", MANIFESTS[case])
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.json"):
        CheckpointDirectory(tmp_path / "a")


def test_files_outside_of_the_manifest_are_not_read(tmp_path: Path) -> None:
    expected = _save(tmp_path / "a", 1)
    _save(tmp_path / "b", 2)
    shutil.copy(tmp_path / "b" / "rank-00001.safetensors", tmp_path / "a" / "rank-00002.safetensors")
    assert _same(_load(tmp_path / "a"), expected)
    with pytest.raises(CheckpointCorruptError, match="does not name this file"):
        CheckpointDirectory(tmp_path / "a").tensor_file("rank-00002.safetensors")
    with pytest.raises(CheckpointCorruptError, match="does not name this file"):
        CheckpointDirectory(tmp_path / "a").read_bytes("../b/state.json")


def test_what_is_no_finished_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    for name, said in (("empty", "never finished"), ("file", "never finished")):
        with pytest.raises(CheckpointCorruptError, match=said):
            CheckpointDirectory(tmp_path / name)
    _save(tmp_path / "a", 1)
    (tmp_path / "link").symlink_to("a")
    assert CheckpointDirectory(tmp_path / "link").fields == {"step": 1}
    os.truncate(tmp_path / "a" / "rank-00001.safetensors", 50_000)
    with pytest.raises(CheckpointCorruptError, match=r"rank-00001\.safetensors.*50000 bytes instead of"):
        CheckpointDirectory(tmp_path / "a").check_sizes()


def test_a_pipe_and_a_huge_header_neither_hang_nor_take_memory(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    path = tmp_path / "a" / "rank-00000.safetensors"
    size = path.stat().st_size
    path.write_bytes(struct.pack("<Q", 90_000_000) + path.read_bytes()[8:])
    os.truncate(path, size)
    started = time.monotonic()
    with pytest.raises(CheckpointCorruptError, match="header"):
        CheckpointDirectory(tmp_path / "a").tensor_file(path.name)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointCorruptError, match="no ordinary file"):
        CheckpointDirectory(tmp_path / "a").check_sizes()
    assert time.monotonic() - started < 60
