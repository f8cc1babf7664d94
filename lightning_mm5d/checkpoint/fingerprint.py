"""What a checkpoint holds, in few words per value: ranks compare it, so that none goes on from another file.

The bits of a tensor are summed as integers, at the speed of memory, so that one changed element shows. Values that are
neither tensors nor plain count by their class alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_LONG = 200  # characters; longer texts count by their checksum


def fingerprint(tree: Any, path: str = "") -> dict[str, Any]:
    """Return a JSON value for each tensor and plain value in nested dicts, lists and tuples, by path."""
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        return {path: _form(tree)}
    found: dict[str, Any] = {} if items else {path: type(tree).__name__}
    for key, value in items:
        found |= fingerprint(value, f"{path}.{key}" if path else key)
    return found


def _form(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONG:
        return f"{len(value)} characters with checksum {zlib.crc32(value.encode()):x}"
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} with bits {_sum_of_bits(value):x}"
    return type(value).__name__


def _sum_of_bits(tensor: Tensor) -> int:
    """Return the sum of the tensor's memory in integers of 8 bytes, modulo 2**64."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    even = len(data) // 8 * 8
    total = int(data[:even].view(torch.int64).sum()) + int.from_bytes(bytes(data[even:].tolist()), "little")
    return total % 2**64
