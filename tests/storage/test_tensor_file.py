"""Tensors that are written one at a time come back bitwise, whole and in parts; the safetensors library reads them."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_mm5d.config.errors import CheckpointCorruptError
from lightning_mm5d.storage import tensor_file
from lightning_mm5d.storage.files import StateDictSource, TensorSource, opened
from lightning_mm5d.storage.tensor_file import BLOCK_BYTES, DTYPES, TensorFile, TensorFileWriter, WrittenFile


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def _write(path: Path, tensors: dict[str, Tensor], **metadata: str) -> WrittenFile:
    with TensorFileWriter(path, {name: (t.dtype, t.shape) for name, t in tensors.items()}, metadata) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    return writer.written


def _all_dtypes() -> dict[str, Tensor]:
    return {
        f"{name}.{len(shape)}": _random(shape, dtype)
        for name, dtype in DTYPES.items()
        for shape in [(3, 5, 2), (0, 4), ()]
    }


def test_every_dtype_comes_back_bitwise_and_safetensors_reads_it(tmp_path: Path) -> None:
    tensors = {k: t for k, t in _all_dtypes().items() if not (k.startswith("F4.") and t.dim() == 0)}
    written = _write(tmp_path / "a", tensors, step="3")
    file = TensorFile(tmp_path / "a", written)
    file.verify()
    assert file.metadata == {"step": "3"}
    assert file.has_checksums
    with safe_open(tmp_path / "a", "pt") as theirs:
        for name, tensor in tensors.items():
            for read in (file.read(name), theirs.get_tensor(name)):
                assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(_bits(read), _bits(tensor))


def _some_region(shape: tuple[int, ...], choose: random.Random) -> list[tuple[int, int]]:
    def bound(length: int) -> tuple[int, int]:
        start, stop = sorted((choose.randint(0, length), choose.randint(0, length)))
        return choose.choice([(0, length), (start, stop), (start, min(start + 1, length))])

    return [bound(length) for length in shape]


@pytest.mark.parametrize("has_checksums", [True, False])
def test_any_region_equals_that_of_the_tensor_in_memory(tmp_path: Path, has_checksums: bool) -> None:
    shapes = [(7, 5), (3, 4, 5, 6), (41, 3001), (3, 7, 20011), (5, 130, 300), (200_001,), ()]
    tensors = {str(shape): _random(shape, torch.int16) for shape in shapes}
    tensors["rows of 9 MB"] = _random((2, 3, 1_500_000), torch.int16)
    path = tmp_path / "a"
    if has_checksums:
        _write(path, tensors)
    else:
        save_file(tensors, path)
    sources: list[TensorSource] = [TensorFile(path), StateDictSource({**tensors, "no tensor": 1})]
    choose = random.Random(3)
    for name, tensor in tensors.items():
        for _ in range(12):
            region = _some_region(tuple(tensor.shape), choose)
            expected = tensor[tuple(slice(*bound) for bound in region)]
            for source in sources:
                assert (source.shape(name), source.dtype(name)) == (tensor.shape, tensor.dtype)
                assert torch.equal(source.read(name, region), expected)
    assert set(sources[0].names()) == set(sources[1].names())


def test_reads_no_more_than_was_asked_for(tmp_path: Path) -> None:
    tensors = {"rows": _random((64, 32_768), torch.float32), "narrow": _random((4096, 64), torch.float32)}
    save_file(tensors, tmp_path / "plain")
    _write(tmp_path / "checked", tensors)
    for name, block in (("plain", 0), ("checked", 32_768 * 4 // 16)):
        file = TensorFile(tmp_path / name)

        def bytes_of(name: str, *region: tuple[int, int], file: TensorFile = file) -> int:
            before = file.bytes_read
            file.read(name, region)
            return file.bytes_read - before

        assert bytes_of("rows", (0, 64), (0, 32_768)) == 64 * 32_768 * 4
        assert bytes_of("rows", (8, 16), (0, 32_768)) == 8 * 32_768 * 4
        assert bytes_of("rows", (9, 10), (5, 6)) == (block or 4)
        assert bytes_of("rows", (0, 64), (16_384, 24_576)) == 64 * 32_768  # a run in each row
        assert bytes_of("narrow", (0, 4096), (0, 32)) <= 4096 * 64 * 4  # gaps are read through
        assert bytes_of("narrow", (3, 3), (0, 32)) == 0


@pytest.mark.parametrize("row_bytes", [1024, 2816, 16_384, 22_016, 57_344])
def test_ranks_that_share_columns_read_theirs_alone(tmp_path: Path, row_bytes: int) -> None:
    tensors = {"experts": _random((2, 24, row_bytes // 2), torch.int16)}
    _write(tmp_path / "a", tensors)
    file = TensorFile(tmp_path / "a")
    for ranks in (2, 4) if row_bytes > 4096 else (2,):
        half = row_bytes // 2 // ranks
        region, before = [(0, 2), (1, 24), (half, 2 * half)], file.bytes_read
        assert torch.equal(file.read("experts", region), tensors["experts"][:, 1:, half : 2 * half])
        assert file.bytes_read - before == 2 * 23 * half * 2


def test_a_file_of_many_rows_has_equal_blocks_and_files_with_them_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"rows": _random((64, 4096), torch.int16)}
    monkeypatch.setattr(tensor_file, "_DIGITS_LIMIT", 8 * 64)
    _write(tmp_path / "a", tensors)
    monkeypatch.undo()
    assert f"{BLOCK_BYTES}:".encode() in (tmp_path / "a").read_bytes()
    file = TensorFile(tmp_path / "a")
    file.verify()
    assert torch.equal(file.read("rows", [(3, 9), (5, 77)]), tensors["rows"][3:9, 5:77])


def test_tensors_of_any_strides_are_written_in_row_major_order(tmp_path: Path) -> None:
    base = torch.randn(6, 5, 4, dtype=torch.complex64)
    tensors = {
        "transposed": base.real.transpose(0, 2),
        "expanded": torch.randn(1, 5).expand(7, 5),
        "strided": torch.randn(40)[::3],
        "conjugate": base.conj().transpose(0, 1),
        "parameter": torch.nn.Parameter(torch.randn(3, 3)).t(),
        "bytes": torch.arange(24, dtype=torch.uint8).view(4, 6).t().view(torch.float8_e4m3fn),
    }
    _write(tmp_path / "a", tensors)
    for name, tensor in tensors.items():
        assert torch.equal(_bits(TensorFile(tmp_path / "a").read(name)), _bits(tensor.detach().resolve_conj()))


def test_a_writer_refuses_what_its_header_does_not_say(tmp_path: Path) -> None:
    specs = {"a": (torch.float32, (2, 3)), "b": (torch.float32, (2,))}

    def write_too_few() -> None:
        with TensorFileWriter(tmp_path / "x", specs) as writer:
            writer.write("a", torch.zeros(2, 3))
            with pytest.raises(KeyError):
                writer.write("a", torch.zeros(2, 3))
            with pytest.raises(ValueError, match="float64 of shape"):
                writer.write("b", torch.zeros(2, dtype=torch.float64))
            with pytest.raises(ValueError, match="on meta"):
                writer.write("b", torch.zeros(2, device="meta"))

    with pytest.raises(ValueError, match="lacks 1 tensors, among them 'b'"):
        write_too_few()
    with pytest.raises(CheckpointCorruptError, match="header"):  # no header was written
        TensorFile(tmp_path / "x")
    with pytest.raises(ValueError, match="complex128"):
        TensorFileWriter(tmp_path / "y", {"a": (torch.complex128, (1,))})
    with pytest.raises(FileExistsError), TensorFileWriter(tmp_path / "x", {}):
        pass


HEADERS: dict[str, Callable[[dict], object]] = {
    "a gap": lambda h: h["b"].update(data_offsets=[25, 33]),
    "an overlap": lambda h: h["b"].update(data_offsets=[16, 24]),
    "an offset after the end": lambda h: h["b"].update(data_offsets=[24, 2**62]),
    "a negative offset": lambda h: h["a"].update(data_offsets=[-8, 24]),
    "another shape": lambda h: h["a"].update(shape=[7]),
    "a negative length": lambda h: h["a"].update(shape=[-2, -3]),
    "a huge shape": lambda h: h["a"].update(shape=[2**62, 0, 2**62], data_offsets=[0, 0]),
    "a shape of floats": lambda h: h["a"].update(shape=[2.0, 3.0]),
    "a shape of booleans": lambda h: h["b"].update(shape=[True, 2]),
    "an unknown dtype": lambda h: h["a"].update(dtype="F33"),
    "no dtype": lambda h: h["a"].pop("dtype"),
    "a list for an entry": lambda h: h.update(a=[]),
    "numbers as metadata": lambda h: h.update(__metadata__={"a": 1}),
    "too many dims": lambda h: h["a"].update(shape=[1] * 99 + [6]),
    "no tensors": lambda h: h.clear(),
}


@pytest.mark.parametrize("case", HEADERS)
def test_refuses_a_header_that_no_writer_makes(tmp_path: Path, case: str) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(2)}, tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    HEADERS[case](header)
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(CheckpointCorruptError, match="Load an earlier checkpoint"):
        TensorFile(tmp_path / "a")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x08\0\0",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 99_000_000) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 90_000) + b'{"a":' * 18_000,
        struct.pack("<Q", 22) + b'{"a":{},"a":{}}       ',
        struct.pack("<Q", 4) + b"\xff\xfe{\0",
    ],
)
def test_refuses_what_is_no_header(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CheckpointCorruptError):
        TensorFile(tmp_path / "a")


def test_refuses_a_file_that_changed_or_is_no_ordinary_one(tmp_path: Path) -> None:
    written = _write(tmp_path / "a", {"a": torch.zeros(100_000)})
    file = TensorFile(tmp_path / "a", written)
    _write(tmp_path / "b", {"a": torch.ones(100_000)})
    (tmp_path / "b").replace(tmp_path / "a")
    with pytest.raises(CheckpointCorruptError, match="changed or replaced"):
        file.read("a")
    with pytest.raises(CheckpointCorruptError, match="header differs"):
        TensorFile(tmp_path / "a", written)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("link", "symbolic link"), ("pipe", "no ordinary file"), (".", "no ordinary"), ("c", "missing")):
        with pytest.raises(CheckpointCorruptError, match=said), opened(tmp_path / name, follow=False):
            pass
