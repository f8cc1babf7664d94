"""Finds where a step makes the host wait for a device: what would do so on a GPU shows on a CPU by its operation.

`HostReads` counts what this package asks for; `PretendedDevice` what models ask for, and no copy on the host answers.

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
from torch.utils.weak import WeakTensorKeyDictionary

import lightning_mm5d
from lightning_mm5d.sharded.host_copies import HostCopies

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


_QUESTIONS = {
    *(Tensor.__bool__, Tensor.__index__, Tensor.__int__, Tensor.__float__, Tensor.__format__),
    *(Tensor.item, Tensor.tolist),
}


class PretendedDevice(HostCopies):
    """What the host knows of tensors of a device that is the CPU itself: all tensors but those of the loader.

    Attributes:
        found: how often a question waits for the device: ``masking_utils.py:344: __bool__``.
        answered: questions that the host knows the answer of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.answered = 0
        self._here = WeakTensorKeyDictionary()

    def moved(self, x: Tensor) -> Tensor:
        """A tensor of the loader on the device."""
        copy = x.clone()
        self._here[x] = True
        if not x.is_floating_point():  # as those that `HostCopies` follows to a device
            self.note(copy, x)
        return copy

    def is_here(self, x: Tensor) -> bool:
        return x in self._here

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS and not self.is_here(args[0]):
            place = _asking()
            if self.find(args[0]) is not None:
                self.answered += 1
            elif place:
                self.found[f"{place}: {func.__name__}"] += 1
        return super().__torch_function__(func, types, args, kwargs)


def _asking() -> str:
    """The innermost line outside of torch and this file; empty where it is this package's, see `HostReads`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_ROOT):
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
