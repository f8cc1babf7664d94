"""Compares the records of a zip archive, as `torch.save` writes it, with their checksums.

`torch.load` does not compare them. It also reads lengths from the entry before each record, which nothing covers, so
that a changed one shifts all numbers of a tensor. Here the record must lie where its entry says and have its checksum.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import IO

ENTRY_START = b"PK\x03\x04"
_ENTRY = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field
_END = b"PK\x05\x06"
_END_BYTES = 22
_IS_FOLDER = 0x10  # among the attributes of a record
_CHUNK_BYTES = 2**20
_UNREADABLE = (
    zipfile.BadZipFile,
    ValueError,
    NotImplementedError,
    LookupError,
    ArithmeticError,
    EOFError,
    struct.error,
)


class ArchiveError(ValueError):
    """An archive is not as it was written; the message says how."""


def verify_archive(file: IO[bytes]) -> None:
    """Compare all records with their checksums.

    The file must consist of records that are not compressed, one after the other from its first byte on, and of their
    list. Archives without any checksums, which `torch.save` writes when told so, pass with that.

    Raises:
        ArchiveError: bytes are missing, added or changed.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - _END_BYTES))
    if not file.read().startswith(_END):
        raise ArchiveError("its list of records does not stand at its end: it is truncated, or something was added")
    try:
        archive = zipfile.ZipFile(file)
    except _UNREADABLE as error:
        raise ArchiveError(f"its list of records is not readable ({error})") from None
    records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    if len({record.filename for record in records}) != len(records):
        raise ArchiveError("a record stands in it twice")
    has_checksums, end = any(record.CRC for record in records), 0
    for record in records:
        if not end <= record.header_offset < archive.start_dir or (end == 0 and record.header_offset):
            raise ArchiveError(f"its record {record.filename!r} does not lie after the one before")
        end = _verify_record(file, record, has_checksums)
    if end > archive.start_dir:
        raise ArchiveError("its last record reaches into the list of records")


def _verify_record(file: IO[bytes], record: zipfile.ZipInfo, has_checksums: bool) -> int:
    """Return where the bytes of a record end."""
    if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
        raise ArchiveError(f"its record {record.filename!r} is compressed, and torch.save writes no such records")
    if (
        record.filename.endswith("/") or record.external_attr & _IS_FOLDER
    ):  # torch reads nothing of it, and says nothing
        raise ArchiveError(f"its record {record.filename!r} is called a folder")
    file.seek(record.header_offset)
    entry = file.read(_ENTRY.size)
    if len(entry) < _ENTRY.size:
        raise ArchiveError(f"its record {record.filename!r} is missing")
    start, name_bytes, extra_bytes = _ENTRY.unpack(entry)
    name = file.read(name_bytes)
    if start != ENTRY_START or name != record.orig_filename.encode():
        raise ArchiveError(f"the entry of its record {record.filename!r} differs from its list of records")
    begin = file.seek(record.header_offset + _ENTRY.size + name_bytes + extra_bytes)
    checksum, left = 0, record.file_size
    while left:
        data = file.read(min(left, _CHUNK_BYTES))
        if not data:
            raise ArchiveError(f"its record {record.filename!r} is shorter than its list of records says")
        checksum, left = zlib.crc32(data, checksum), left - len(data)
    if has_checksums and checksum != record.CRC:
        raise ArchiveError(f"its record {record.filename!r} differs from what was written")
    return begin + record.file_size
