"""What identifies the samples of a batch: a digest of each of its fields, equal in every process that read the same.

Values on a device are not read, which would wait for it: there shapes and dtypes tell. Of a large tensor some elements
do. Objects without a value that is the same in every process are left out; of these, tensors and arrays that their
attributes hold are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mm5d.data.microbatch import leaves

_WHOLE = 1 << 15  # elements of a tensor up to which all are read, and as many of a larger one
_STRIDE = 2654435761  # a prime, so that no row or column of a tensor is passed over (D. Knuth's multiplicative hash)
_DEPTH = 3  # of objects in objects
_PLAIN = str | bytes | bool | int | float | complex | None


def digests(batch: Any) -> dict[str, list[str]]:
    """Return by path, as ``"batch['images']"``, the digest of each field and what it is, as ``"float32[8, 3]"``."""
    found: dict[str, list[str]] = {}
    for path, value in _fields(batch):
        digest = hashlib.blake2b(digest_size=8)
        if (form := _add(value, digest)) is not None:
            found[path] = [digest.hexdigest(), form]
    return found


def _fields(node: Any, name: str = "batch", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for path, value in leaves(node):
        where = name + "".join(f"[{step!r}]" for step in path)
        if isinstance(value, Tensor | np.ndarray | np.generic | list | tuple | set | frozenset | _PLAIN):
            yield where, value
        elif depth < _DEPTH and hasattr(value, "__dict__") and not isinstance(value, type):
            for attribute, inner in vars(value).items():
                for inside, part in _fields(inner, f"{where}.{attribute}", depth + 1):
                    if isinstance(part, Tensor | np.ndarray):
                        yield inside, part


def _add(value: Any, digest: Any) -> str | None:
    """Add a value to a digest; return what it is, None where it has no stable value."""
    if isinstance(value, Tensor):
        form = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        digest.update(form.encode())
        if value.device.type == "cpu" and value.layout == torch.strided and not value.is_quantized:
            digest.update(_bytes(value.detach()))
    elif isinstance(value, np.ndarray | np.generic):
        form = f"{value.dtype}{list(value.shape)}"
        digest.update(form.encode())
        if not value.dtype.hasobject:
            flat = np.asarray(value).reshape(-1)
            digest.update((flat if flat.size <= _WHOLE else flat[_some(flat.size).numpy()]).tobytes())
    elif isinstance(value, list | tuple | set | frozenset):
        form = f"{type(value).__name__} of {len(value)}"
        digest.update(form.encode())
        for one in sorted(value, key=repr) if isinstance(value, set | frozenset) else value:
            _add(one, digest)
    elif isinstance(value, _PLAIN):
        form = type(value).__name__
        digest.update(f"{form} {value!r};".encode())
    else:
        return None
    return form


def _bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor in host memory, of some elements where it is large."""
    with torch._C.DisableTorchFunctionSubclass():
        flat = tensor.resolve_conj().resolve_neg().reshape(-1)
        flat = (flat if flat.numel() <= _WHOLE else flat[_some(flat.numel())]).contiguous()
        return flat.view(torch.uint8).numpy().tobytes()


def _some(count: int) -> Tensor:
    """Return the indices of the elements that are read of so many, spread evenly."""
    return torch.arange(_WHOLE) * _STRIDE % count
