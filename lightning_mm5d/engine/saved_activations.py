"""Keeps in host memory what the autograd graphs of microbatches in flight have saved.

A microbatch takes three phases. (1) Its forward runs under hooks that note each tensor which autograd saves. (2) After
it their storages are copied to the host, each once, and the graph lets go of them; views share the copy of their
storage. (3) While the action before its backward runs they are copied back, and the backward frees them one by one.

A microbatch stays on the device where its backward follows within two actions: it would be fetched before it has left.
So do parameters, buffers, the batch, and what is sent and received, which others keep on the device anyway; and
storages of less than `SMALLEST` bytes.

What an operation in place changes after it was saved fails in the backward, as it does without hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_mm5d.data.waiting import Waiting
from lightning_mm5d.engine.host_memory import HostMemory, Stored

SMALLEST = 1024
"""bytes of a storage that is worth a copy, as in torchtune"""


class Saved:
    """A tensor that autograd saved: as it is, or as a part of a storage on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self._version = tensor._version
        self._stored: Stored | None = None
        self._place: tuple[Any, ...] = ()

    @property
    def is_changed(self) -> bool:
        """Whether an operation in place has changed it since."""
        return self.tensor is not None and self.tensor._version != self._version

    def leave(self, stored: Stored) -> None:
        """Let go of the tensor, whose storage is on the host."""
        tensor = self.tensor
        assert tensor is not None
        self._place = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        self._stored, self.tensor = stored, None

    def unpack(self) -> Tensor:
        """Return the tensor on the device.

        Raises:
            RuntimeError: an operation in place has changed it.
        """
        if self.tensor is not None:
            if self.is_changed:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{self.tensor.dtype}{[*self.tensor.shape]}] is at version {self.tensor._version}; expected "
                    f"version {self._version} instead. torch.autograd.set_detect_anomaly(True) shows the operation"
                )
            return self.tensor
        assert self._stored is not None
        flat, (dtype, *place) = self._stored.take(), self._place
        return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), *place)


class SavedActivations:
    """What the graph of one forward has saved; entered around that forward.

    Args:
        memory: where it goes.
        applies: whether what is saved at the moment belongs to a modality whose activations go there.
    """

    def __init__(self, memory: HostMemory, applies: Callable[[], bool]) -> None:
        self._memory, self._applies = memory, applies
        self._hooks = saved_tensors_hooks(self._pack, Saved.unpack)
        # references that do not keep alive what the graph has freed
        self._saved: list[weakref.ref[Saved]] = []
        self._stored: list[weakref.ref[Stored]] = []

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        if self._applies():
            self._saved.append(weakref.ref(saved))
        return saved

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Note a tensor that something else than the graph keeps; return what gives it."""
        saved = Saved(tensor)
        self._saved.append(weakref.ref(saved))
        return saved.unpack

    def leave(self, stays: Iterable[Tensor], check: Callable[[int], None]) -> None:
        """Begin to copy storages to the host, but for those of the tensors that stay.

        Args:
            stays: tensors that the device keeps.
            check: called before with the number of bytes; may refuse them.
        """
        parts: dict[int, list[Saved]] = {}
        for saved in [one for ref in self._saved if (one := ref()) is not None]:
            address = None if saved.is_changed else _movable(saved.tensor, self._memory.device)
            if address is not None:
                parts.setdefault(address, []).append(saved)
        self._saved.clear()
        for tensor in stays:
            if (address := _address(tensor)) is not None:
                parts.pop(address, None)
        check(sum(_storage(group[0]).nbytes() for group in parts.values()))
        for group in parts.values():
            flat = torch.empty(0, dtype=torch.uint8, device=self._memory.device).set_(_storage(group[0]))
            stored = self._memory.store(flat)
            for saved in group:
                saved.leave(stored)
            self._stored.append(weakref.ref(stored))

    def fetch(self) -> None:
        """Begin to copy back what the graph still needs."""
        for stored in [one for ref in self._stored if (one := ref()) is not None]:
            stored.fetch()


def _storage(saved: Saved) -> Any:
    assert saved.tensor is not None
    return saved.tensor.untyped_storage()


def _address(tensor: Tensor) -> int | None:
    """Address of a tensor's storage; None where it has none that can be read."""
    if isinstance(tensor, Waiting) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor that stands for others, as under vmap
        return None


def _movable(tensor: Tensor | None, device: torch.device) -> int | None:
    """Address of a storage that a copy can stand for; None where there is none."""
    if tensor is None or type(tensor) is not Tensor or tensor.device.type != device.type:
        return None
    address = _address(tensor)
    if address is None or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    return address if tensor.untyped_storage().nbytes() >= SMALLEST else None
