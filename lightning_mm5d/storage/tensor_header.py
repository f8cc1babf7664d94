"""The header of a safetensors file: which tensor has which dtype and shape, and where its bytes are.

The file is: 8 bytes with the header's length (little-endian), the header in JSON, then the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors). A file of ours also has block checksums in the header's metadata: each tensor
is divided into blocks, the last of them shorter, and the CRC-32 of all blocks stand in the order of the tensors' bytes.

It refuses headers that a damaged or hostile file could have, before any memory is taken for tensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

BLOCK_BYTES = 64 * 1024  # a reader verifies whole blocks; smaller ones cost time, larger ones are read for few bytes
HEADER_LIMIT = 100_000_000  # bytes; the safetensors library has the same
METADATA = "__metadata__"
CHECKSUMS = "lightning_mm5d.crc32"  # in the metadata: bytes of a block, a colon, 8 hexadecimal digits for each block
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
        block_bytes: of a block; 0 where the file has no checksums.
        checksums: of each tensor's blocks, by name; empty where the file has none.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    block_bytes: int = 0
    checksums: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def storable(dtype: torch.dtype) -> bool:
    """Return whether a safetensors file can hold tensors of `dtype`."""
    return dtype in _NAMES


def lay_out(specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Entry]:
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


def block_count(entry: Entry) -> int:
    """Return the number of blocks of a tensor."""
    return -(-entry.size // BLOCK_BYTES)


def encode_header(entries: Mapping[str, Entry], metadata: Mapping[str, str], checksums: str | None) -> bytes:
    """Return length and header; the length depends on the lengths of the strings alone.

    Args:
        entries: from `lay_out`.
        metadata: free-form strings.
        checksums: hexadecimal digits of all blocks; None where nobody will verify them.
    """
    own = {} if checksums is None else {CHECKSUMS: f"{BLOCK_BYTES}:{checksums}"}
    tree: dict[str, Any] = {METADATA: {**metadata, **own}}
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
    entries = sorted(((name, _entry(name, value, origin)) for name, value in tree.items()), key=_position)
    end = origin
    for name, entry in entries:
        if entry.start != end:
            raise HeaderError(
                f"the bytes of {name!r} start at {entry.start}, and those of the tensor before end at {end}"
            )
        end = entry.stop
    if end != file_size:
        raise HeaderError(f"its tensors end at byte {end}, but the file has {file_size} bytes")
    return _with_checksums(dict(entries), metadata)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise HeaderError("a name stands twice in the same object")
    return tree


def _position(item: tuple[str, Entry]) -> tuple[int, int]:
    return item[1].start, item[1].stop


def _entry(name: str, value: Any, origin: int) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"the entry of {name!r} does not have dtype, shape and data_offsets")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise HeaderError(f"{name!r} has the dtype {kind!r}, which torch does not have")
    if not (_are_lengths(shape) and _are_lengths(offsets) and len(offsets) == 2 and len(shape) <= _DIMS_LIMIT):
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


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _with_checksums(entries: dict[str, Entry], metadata: dict[str, str]) -> Header:
    """Take the checksums out of the metadata."""
    if CHECKSUMS not in metadata:
        return Header(entries, metadata)
    size, _, digits = metadata.pop(CHECKSUMS).partition(":")
    if size != str(BLOCK_BYTES):
        raise HeaderError(f"its checksums are for blocks of {size!r} bytes, and this version knows {BLOCK_BYTES}")
    counts = {name: block_count(entry) for name, entry in entries.items()}
    try:
        numbers = struct.unpack(f">{sum(counts.values())}I", bytes.fromhex(digits))
    except (ValueError, struct.error):
        raise HeaderError("its checksums are not those of its tensors") from None
    checksums, done = dict[str, tuple[int, ...]](), 0
    for name, count in counts.items():
        checksums[name] = numbers[done : done + count]
        done += count
    return Header(entries, metadata, BLOCK_BYTES, checksums)
