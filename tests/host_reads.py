"""Finds where a step makes the host wait for a device: what would do so on a GPU shows on a CPU by its operation.

Counted are reads of values (``item``, ``tolist``, ``bool``, ``nonzero``), copies to the host, and tensors made of
numbers of Python, which a GPU gets by a copy that blocks. Each is named by the function of this package that asks for
it. What users' code and models ask for themselves is left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_mm5d

_ROOT = str(Path(lightning_mm5d.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
aten = torch.ops.aten
_READS = {
    *(aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.unique_dim),
    *(aten._unique, aten._unique2, aten.unique_consecutive, aten.allclose, aten.bincount),
}
_CALLS = {
    *(torch.tensor, torch.as_tensor, torch.from_numpy, torch.frombuffer),
    *(Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.pin_memory, Tensor.new_tensor),
}


class HostReads:
    """Enter around what must not wait.

    Attributes:
        found: how often a function does: ``engine/codec.py messages: tensor``.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._functions, self._operations = _Functions(self.note), _Operations(self.note)

    def note(self, what: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_ROOT):
                self.found[f"{Path(name).relative_to(_ROOT)} {frame.f_code.co_name}: {what}"] += 1
                return
            if name != __file__ and not name.startswith(_TORCH):
                return
            frame = frame.f_back

    def __enter__(self) -> HostReads:
        self._operations.__enter__()
        self._functions.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._functions.__exit__(*exception)
        self._operations.__exit__(*exception)


class _Functions(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _CALLS:
            self._note(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.overloadpacket in _READS:
            self._note(func.overloadpacket.__name__)
        elif func is aten.index.Tensor and any(one is not None and one.dtype == torch.bool for one in args[1]):
            self._note("index by a mask")
        return func(*args, **(kwargs or {}))
