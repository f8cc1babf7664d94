"""Reads and writes safetensors files tensor by tensor, and of a tensor no more than is asked for.

Bytes are read straight into the memory of the result, without mapping the file, so that a process holds what it asked
for and nothing else. Files that `TensorFileWriter` wrote have a checksum for each block: every byte handed out was
compared with its own. The safetensors library and `torch.distributed.checkpoint` read these files too.

The header of a safetensors file: which tensor has which dtype and shape, and where its bytes are.

The file is: 8 bytes with the header's length (little-endian), the header in JSON, then the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors). A file of ours also has block checksums in the header's metadata: each tensor
is divided into blocks, the last of them shorter, and the CRC-32 of all blocks stand in the order of the tensors' bytes.
A row of a matrix is a whole number of blocks where that can be, so that ranks which share columns read theirs alone.

It refuses headers that a damaged or hostile file could have, before any memory is taken for tensors.
"""

from __future__ import annotations

import json
import math
import operator
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.storage.files import (
    BlockChecksums,
    Region,
    WrittenFile,
    checked_region,
    corrupt,
    opened,
    read_into,
    write_at,
)

BLOCK_BYTES = 64 * 1024  # a reader verifies whole blocks; smaller ones cost time, larger ones are read for few bytes
_PER_PART = 256  # bytes of a block of rows for each part of its row, so that headers and checksums stay cheap
HEADER_LIMIT = 100_000_000  # bytes; the safetensors library has the same
METADATA = "__metadata__"
CHECKSUMS = "lightning_mm5d.crc32"  # in the metadata: which blocks, a colon, 8 hexadecimal digits for each block
_ROWS, _EQUAL = "rows", str(BLOCK_BYTES)  # which blocks: parts of rows, or as large for all tensors
_DIGITS_LIMIT = HEADER_LIMIT // 4  # of blocks of rows; a larger file has equal blocks
_DIMS_LIMIT = 64

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F4": torch.float4_e2m1fn_x2,  # the file counts single numbers, torch counts pairs
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HeaderError(ValueError):
    """A header breaks the format; the message says how."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        dtype: of its elements.
        shape: as torch has it.
        start: its first byte in the file.
        stop: one after its last byte.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """What the header of a file says.

    Attributes:
        entries: by name, in the order of their bytes.
        metadata: free-form strings, without the checksums.
        blocks: bytes of a block of each tensor, by name; None where the file has no checksums.
        checksums: of each tensor's blocks, by name; empty where the file has none.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    blocks: Mapping[str, int] | None = None
    checksums: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def storable(dtype: torch.dtype) -> bool:
    """Return whether a safetensors file can hold tensors of `dtype`."""
    return dtype in _NAMES


def lay_out(specs: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> dict[str, Entry]:
    """Return where the bytes of each tensor go, from byte 0 on.

    Tensors of large elements come first, so that each begins at a multiple of its element's size.

    Raises:
        ValueError: a dtype that no safetensors file can hold.
    """
    entries, end = dict[str, Entry](), 0
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: -item[1][0].itemsize):
        if not storable(dtype) or name == METADATA:
            raise ValueError(f"a safetensors file cannot hold the tensor {name!r} of {dtype}")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = Entry(dtype, tuple(shape), start, end)
    return entries


def block_sizes(entries: Mapping[str, Entry]) -> tuple[str, dict[str, int]]:
    """Return which blocks a new file has, and the bytes of a block of each tensor by name."""
    sizes = {name: _block_of_rows(entry) for name, entry in entries.items()}
    if 8 * sum(block_count(entry, sizes[name]) for name, entry in entries.items()) > _DIGITS_LIMIT:
        return _EQUAL, dict.fromkeys(entries, BLOCK_BYTES)
    return _ROWS, sizes


def _block_of_rows(entry: Entry) -> int:
    """Return the bytes of a block that divides the rows of a matrix into 2, 4, 8 or more parts; else `BLOCK_BYTES`.

    Rows of 2,816 bytes are two blocks of 1,408, those of 16,384 bytes eight of 2,048.
    """
    row = entry.shape[-1] * entry.dtype.itemsize if len(entry.shape) > 1 else 0
    parts = 1
    while row % (2 * parts) == 0 and row >= _PER_PART * (2 * parts) ** 2:
        parts *= 2
    return row // parts if parts > 1 and row // parts <= BLOCK_BYTES else BLOCK_BYTES


def block_count(entry: Entry, size: int) -> int:
    """Return the number of blocks of a tensor, of `size` bytes each."""
    return -(-entry.size // size)


def encode_header(entries: Mapping[str, Entry], metadata: Mapping[str, str], checksums: str | None) -> bytes:
    """Return length and header; the length depends on the lengths of the strings alone.

    Args:
        entries: from `lay_out`.
        metadata: free-form strings.
        checksums: which blocks, a colon, and the hexadecimal digits of all; None where nobody will verify them.
    """
    digests = {} if checksums is None else {CHECKSUMS: checksums}
    tree: dict[str, Any] = {METADATA: {**metadata, **digests}}
    for name, entry in entries.items():
        shape = list(entry.shape)
        if entry.dtype is torch.float4_e2m1fn_x2:
            shape[-1] *= 2
        tree[name] = {"dtype": _NAMES[entry.dtype], "shape": shape, "data_offsets": [entry.start, entry.stop]}
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"a file of {len(entries)} tensors needs a header over {HEADER_LIMIT} bytes; write more files")
    return struct.pack("<Q", len(text)) + text


def header_bytes(prefix: bytes, file_size: int) -> int:
    """Return the length of the header after the first 8 bytes of a file, `prefix`.

    Raises:
        HeaderError: the file cannot have such a header.
    """
    if len(prefix) < 8:
        raise HeaderError("it is shorter than any safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if not 2 <= length <= min(HEADER_LIMIT, file_size - 8):
        raise HeaderError(f"its header has {length} bytes by its first 8 bytes, but the file has {file_size} bytes")
    return length


def decode_header(text: bytes, file_size: int) -> Header:
    """Return what a header says; the offsets of its entries count from the file's first byte.

    Args:
        text: the header without its length.
        file_size: bytes of the whole file.

    Raises:
        HeaderError: the text is no header of a file of this size.
    """
    try:
        tree = json.loads(text.decode(), object_pairs_hook=_distinct)
    except RecursionError:
        raise HeaderError("its header is nested too deeply") from None
    except ValueError as error:
        raise HeaderError(f"its header is not readable: {error}") from None
    if not isinstance(tree, dict):
        raise HeaderError("its header is no JSON object")
    metadata = tree.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("the metadata of its header are no strings")
    origin = 8 + len(text)
    entries = {name: _entry(name, value, origin) for name, value in tree.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = origin
    for name, entry in entries.items():
        if entry.start != end:
            raise HeaderError(
                f"the bytes of {name!r} start at {entry.start}, and those of the tensor before end at {end}"
            )
        end = entry.stop
    if end != file_size:
        raise HeaderError(f"its tensors end at byte {end}, but the file has {file_size} bytes")
    return _with_checksums(entries, metadata)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise HeaderError("a name stands twice in the same object")
    return tree


def _entry(name: str, value: Any, origin: int) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"the entry of {name!r} does not have dtype, shape and data_offsets")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise HeaderError(f"{name!r} has the dtype {kind!r}, which torch does not have")
    if not (are_lengths(shape) and are_lengths(offsets) and len(offsets) == 2 and len(shape) <= _DIMS_LIMIT):
        raise HeaderError(f"{name!r} has a shape or offsets that no tensor can have")
    dtype = DTYPES[kind]
    if dtype is torch.float4_e2m1fn_x2:
        if not shape or shape[-1] % 2:
            raise HeaderError(f"{name!r} has pairs of numbers in a dim of odd length")
        shape = [*shape[:-1], shape[-1] // 2]
    if math.prod(max(length, 1) for length in shape) * dtype.itemsize >= 2**63:
        raise HeaderError(f"{name!r} has a shape that no tensor can have")
    start, stop = offsets
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise HeaderError(f"{name!r} has {stop - start} bytes, which is no {kind} tensor of shape {shape}")
    return Entry(dtype, tuple(shape), origin + start, origin + stop)


def are_lengths(value: Any) -> bool:
    """Return whether a value read from JSON lists whole numbers of at least 0."""
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _with_checksums(entries: dict[str, Entry], metadata: dict[str, str]) -> Header:
    """Take the checksums out of the metadata."""
    if CHECKSUMS not in metadata:
        return Header(entries, metadata)
    which, _, digits = metadata.pop(CHECKSUMS).partition(":")
    if which not in (_ROWS, _EQUAL):
        raise HeaderError(f"its checksums are for blocks {which!r}, and this version knows {_ROWS!r} and {_EQUAL!r}")
    sizes = {name: _block_of_rows(entry) if which == _ROWS else BLOCK_BYTES for name, entry in entries.items()}
    counts = {name: block_count(entry, sizes[name]) for name, entry in entries.items()}
    try:
        numbers = struct.unpack(f">{sum(counts.values())}I", bytes.fromhex(digits))
    except (ValueError, struct.error):
        raise HeaderError("its checksums are not those of its tensors") from None
    checksums, done = dict[str, tuple[int, ...]](), 0
    for name, count in counts.items():
        checksums[name] = numbers[done : done + count]
        done += count
    return Header(entries, metadata, sizes, checksums)


_GAP_BYTES = 256  # a gap up to this is read through, because another read would cost more
_CHUNK_BYTES = 2**20  # read or written at once, so that checksums find the bytes in the processor's cache
_SCRATCH_BYTES = 8 * 2**20  # for rows that are read together with the gaps between them
_COPY_BYTES = 64 * 2**20  # of a tensor that is copied from its device at once


class TensorFile:
    """A safetensors file, a `TensorSource`. It keeps nothing open and reads the header at once.

    Args:
        path: of the file.
        written: what the file must be; None where nobody noted it.
        follow: whether the path may be a symbolic link.
        elsewhere: fills memory with the bytes from an offset on, of a file that is `written` on another host.
        checksums: whether a file that is `written` must have them.

    Attributes:
        path: of the file.
        entries: dtype, shape and byte range of each tensor, by name.
        metadata: free-form strings of the header.
        bytes_read: so far, with the header.

    Raises:
        CheckpointCorruptError: the file is missing, damaged or another one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        written: WrittenFile | None = None,
        *,
        follow: bool = True,
        elsewhere: Callable[[memoryview, int], None] | None = None,
        checksums: bool = True,
    ) -> None:
        if sys.byteorder != "little":
            raise NotImplementedError("safetensors files hold little-endian numbers; this machine is big-endian")
        self.path, self._follow, self._elsewhere, self._checks = Path(path), follow, elsewhere, checksums
        self.bytes_read = 0
        with self._opened() as descriptor:
            self._identity = _identity(descriptor)
            self._header = self._read_header(descriptor, written)
        self.entries: Mapping[str, Entry] = self._header.entries
        self.metadata: Mapping[str, str] = self._header.metadata

    @property
    def has_checksums(self) -> bool:
        """Whether reads are verified."""
        return self._header.blocks is not None

    def names(self) -> list[str]:
        """Return the names of all tensors, in the order of their bytes."""
        return list(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raise KeyError for an unknown name."""
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; raise KeyError for an unknown name."""
        return self.entries[name].dtype

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or its `region`, in new memory of the CPU.

        Args:
            name: of the tensor.
            region: one ``(start, stop)`` for each dim.

        Raises:
            KeyError: the file has no such tensor.
            ValueError: the region does not lie in the tensor.
            CheckpointCorruptError: bytes are missing, or differ from what was written.
        """
        entry = self.entries[name]
        bounds = checked_region(region, entry.shape, name)
        result = torch.empty([stop - start for start, stop in bounds], dtype=entry.dtype, device="cpu")
        if result.numel():
            with self._reopened() as descriptor:
                reader = _Reader(self, descriptor, name, entry, self._header)
                reader.fill(*_runs(result, entry, bounds))
        return result

    def verify(self) -> None:
        """Compare all bytes with their checksums.

        Raises:
            CheckpointCorruptError: they differ.
        """
        scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device="cpu")
        with self._reopened() as descriptor:
            for name, entry in self.entries.items():
                reader = _Reader(self, descriptor, name, entry, self._header)
                for start in range(0, entry.size, _SCRATCH_BYTES):
                    reader.copy(scratch[: min(_SCRATCH_BYTES, entry.size - start)], start)

    def _read_header(self, descriptor: int | None, written: WrittenFile | None) -> Header:
        size = written.size if descriptor is None and written is not None else _identity(descriptor)[2]
        if written is not None and size != written.size:
            raise corrupt(self.path, f"it has {size} bytes instead of {written.size}")
        prefix = bytearray(min(8, size))
        self.read_at(descriptor, memoryview(prefix), 0)
        try:
            text = bytearray(header_bytes(bytes(prefix), size))
            self.read_at(descriptor, memoryview(text), 8)
            if written is not None and zlib.crc32(text, zlib.crc32(prefix)) != written.checksum:
                raise HeaderError("its header differs from what was written")
            header = decode_header(bytes(text), size)
            if written is not None and self._checks and header.blocks is None:
                raise HeaderError("it has no checksums")
        except HeaderError as error:
            raise corrupt(self.path, str(error)) from None
        return header

    def read_at(self, descriptor: int | None, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes from `offset` on, of the open file, or where there is none from elsewhere."""
        if descriptor is not None:
            read_into(descriptor, memory, offset, self.path)
        elif self._elsewhere is not None:
            self._elsewhere(memory, offset)
        self.bytes_read += len(memory)

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        if self._elsewhere is not None:
            yield None
            return
        with opened(self.path, follow=self._follow) as descriptor:
            yield descriptor

    @contextmanager
    def _reopened(self) -> Iterator[int | None]:
        with self._opened() as descriptor:
            if _identity(descriptor) != self._identity:
                raise corrupt(self.path, "it was changed or replaced after its header was read")
            yield descriptor


class _Reader:
    """Reads bytes of one tensor, counted from its first one; verifies them where the file has checksums."""

    def __init__(self, file: TensorFile, descriptor: int | None, name: str, entry: Entry, header: Header) -> None:
        self._file, self._descriptor, self._name, self._entry = file, descriptor, name, entry
        self._block, self._checksums = (header.blocks or {}).get(name, 0), header.checksums.get(name, ())
        self._gap = max(self._block, _GAP_BYTES)

    def fill(self, target: Tensor, strides: Sequence[int], starts: Sequence[int], offset: int = 0) -> None:
        """Fill `target` with a region of the tensor.

        Args:
            target: contiguous bytes; the last dim is one run of bytes.
            strides: bytes from one index to the next, for each dim of `target`.
            starts: first index of the region, for each dim.
            offset: the tensor's byte at which index 0 lies.
        """
        offset += starts[0] * strides[0]
        if len(strides) == 1:
            self.copy(target, offset)
            return
        low = _dot(starts[1:], strides[1:])
        run = _dot([length - 1 for length in target.shape[1:]], strides[1:]) + 1
        stride = strides[0]
        if stride - run >= self._gap or stride > _SCRATCH_BYTES:
            for index, part in enumerate(target):
                self.fill(part, strides[1:], starts[1:], offset + index * stride)
            return
        for parts in target.split(max(1, _SCRATCH_BYTES // stride)):
            scratch = torch.empty((len(parts) - 1) * stride + run, dtype=torch.uint8, device="cpu")
            self.copy(scratch, offset + low)
            parts.copy_(scratch.as_strided(parts.shape, strides))
            offset += len(parts) * stride

    def copy(self, target: Tensor, start: int) -> None:
        """Fill `target`, bytes of one dim, from the tensor's byte `start` on."""
        memory = target.numpy().data
        if not self._block:
            self._read(memory, start)
            return
        end, done = start + len(memory), start
        while done < end:
            whole = end if end == self._entry.size else end // self._block * self._block
            if done % self._block == 0 and done < whole:
                stop = min(whole, done + _CHUNK_BYTES // self._block * self._block)
                self._read_verified(memory[done - start : stop - start], done)
            else:
                first = done // self._block * self._block
                block = memoryview(bytearray(min(self._block, self._entry.size - first)))
                self._read_verified(block, first)
                stop = min(end, first + self._block)
                memory[done - start : stop - start] = block[done - first : stop - first]
            done = stop

    def _read(self, memory: memoryview, start: int) -> None:
        self._file.read_at(self._descriptor, memory, self._entry.start + start)

    def _read_verified(self, memory: memoryview, start: int) -> None:
        """Read whole blocks."""
        self._read(memory, start)
        for number in range(0, len(memory), self._block):
            if zlib.crc32(memory[number : number + self._block]) != self._checksums[(start + number) // self._block]:
                raise corrupt(self._file.path, f"the bytes of {self._name!r} differ from what was written")


class TensorFileWriter:
    """Writes tensors one at a time into a new safetensors file; a context manager.

    Leaving the context writes the header and flushes the file to the disk, unless `flush` is false. Until then the file
    begins with zeros, which no reader takes for a header.

    Args:
        path: of the file, which must not exist.
        specs: dtype and shape of each tensor that will be written, by name.
        metadata: free-form strings for the header.
        flush: whether the file is on the disk when the context is left.
        checksums: whether reads are to be verified.

    Attributes:
        written: size and checksum, once the context is left without an error.

    Raises:
        ValueError: a dtype that safetensors files cannot hold; on leaving, that a tensor of the specs was not written.
        OSError: the file exists, or the disk is full or may not be written.
    """

    written: WrittenFile

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
        *,
        flush: bool = True,
        checksums: bool = True,
    ) -> None:
        self.path, self._metadata, self._flush, self._checks = Path(path), dict(metadata or {}), flush, checksums
        self._entries = lay_out(specs)
        self._which, self._blocks = block_sizes(self._entries)
        self._digits = {name: "0" * 8 * block_count(entry, self._blocks[name]) for name, entry in self._entries.items()}
        self._missing = set(self._entries)
        self._origin = len(self._header())

    def __enter__(self) -> TensorFileWriter:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, from any device and of any strides; it is copied in parts.

        Raises:
            KeyError: the name is not among the specs, or was written before.
            ValueError: dtype or shape are not those of the specs, or the tensor has no memory.
            OSError: the disk is full.
        """
        if name not in self._missing:
            raise KeyError(name)
        entry = self._entries[name]
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise ValueError(
                f"{name!r} is {entry.dtype} of shape {list(entry.shape)} in {self.path}, got {tensor.dtype} of shape "
                f"{list(tensor.shape)}"
            )
        if tensor.layout != torch.strided or tensor.is_meta:
            raise ValueError(f"{name!r} has layout {tensor.layout} on {tensor.device}, and no file can hold that")
        offset, checksums = self._origin + entry.start, BlockChecksums(self._blocks[name])
        for memory in _pieces(tensor.detach()):
            for start in range(0, len(memory), _CHUNK_BYTES):
                chunk = memory[start : start + _CHUNK_BYTES]
                if self._checks:
                    checksums.add(chunk)
                write_at(self._descriptor, chunk, offset, self.path)
                offset += len(chunk)
        self._digits[name] = checksums.digits()
        self._missing.remove(name)

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            os.close(self._descriptor)

    def _finish(self) -> None:
        if self._missing:
            raise ValueError(f"{self.path} lacks {len(self._missing)} tensors, among them {min(self._missing)!r}")
        header = self._header()
        write_at(self._descriptor, header, 0, self.path)
        if self._flush:
            os.fsync(self._descriptor)
        last = max((entry.stop for entry in self._entries.values()), default=0)
        self.written = WrittenFile(self._origin + last, zlib.crc32(header))

    def _header(self) -> bytes:
        checksums = f"{self._which}:{''.join(self._digits.values())}" if self._checks else None
        return encode_header(self._entries, self._metadata, checksums)


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of `tensor` in row-major order, in parts of which each is in the CPU's memory."""
    if not tensor.numel():
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        parts: Sequence[Tensor] = [tensor]
    else:
        rows = tensor if tensor.dim() else tensor.unsqueeze(0)
        parts = rows.split(max(1, _COPY_BYTES * len(rows) // (rows.numel() * rows.itemsize)))
    for part in parts:
        local = part.resolve_conj().resolve_neg().to("cpu").contiguous()
        yield local.view(-1).view(torch.uint8).numpy().data


def _runs(result: Tensor, entry: Entry, bounds: Sequence[tuple[int, int]]) -> tuple[Tensor, list[int], list[int]]:
    """Return `result` as bytes, whose last dim is one run of the file, and strides and first index of each dim."""
    partial = [dim for dim, bound in enumerate(bounds) if bound != (0, entry.shape[dim])]
    last = max(partial, default=0)
    strides = [math.prod(entry.shape[dim + 1 :]) * entry.dtype.itemsize for dim in range(len(bounds))]
    outer = [stop - start for start, stop in bounds[:last]]
    starts = [start for start, _ in bounds[:last]]
    run_start = bounds[last][0] * strides[last] if bounds else 0
    return result.view(-1).view(torch.uint8).view(*outer, -1), [*strides[:last], 1], [*starts, run_start]


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(map(operator.mul, left, right))


def _identity(descriptor: int | None) -> tuple[int, ...]:
    if descriptor is None:
        return (0, 0, 0, 0)
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
