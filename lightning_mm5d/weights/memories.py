"""Numbers the memories that recorded operations work on, and says where in them a tensor lies.

A memory is known by its storage: all views of a tensor, and its `.data`, share it. While recording it is a storage of
the meta device, which has a size and no bytes. A real tensor that a recorded operation writes is *adopted*: its
storage gets a number, too, and the contents that it has at that moment are the memory's first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, UntypedStorage
from torch.nn.parameter import is_lazy

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.weights.recorded import Memory, Undefined, View

CPU, META = torch.device("cpu"), torch.device("meta")


class Memories:
    """All memories of one record."""

    def __init__(self) -> None:
        self._storages: list[UntypedStorage] = []  # of the meta device; the index is the memory's number
        self._memories: list[Memory] = []
        self._numbers: dict[int, int] = {}  # by the identity of a storage, which is kept so that it stays unique
        self._adopted: list[UntypedStorage] = []

    def table(self) -> dict[int, Memory]:
        """Every memory by its number, with the size that it has now."""
        return {
            number: replace(memory, n_bytes=self._storages[number].nbytes())
            for number, memory in enumerate(self._memories)
        }

    def number(self, tensor: Tensor) -> int | None:
        """The number of the memory that a tensor lies in, none if it is not known."""
        if is_lazy(tensor) or tensor.layout != torch.strided or is_remote(tensor):
            return None
        return self._numbers.get(id(tensor.untyped_storage()))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a known memory."""
        return self.number(tensor) is not None

    def known(self, tensor: Tensor) -> int:
        """The number of the memory that a tensor lies in."""
        number = self.number(tensor)
        assert number is not None
        return number

    def device(self, tensor: Tensor) -> torch.device:
        """The device that a tensor in a known memory stands for."""
        return self._memories[self.known(tensor)].device

    def view(self, tensor: Tensor) -> View:
        """Where a tensor lies."""
        if tensor.is_neg():
            raise ConfigError(
                "configure_model", "a negated view of a weight", "A recorded tensor has no such views", "Clone it"
            )
        return View(
            memory=self.known(tensor),
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            conjugate=tensor.is_conj(),
        )

    def covered(self, tensor: Tensor) -> bool:
        """Whether a tensor reaches all of its memory."""
        view = self.view(tensor)
        return view.covers(self._storages[view.memory].nbytes())

    def add(self, tensor: Tensor, device: torch.device, *, empty: bool = False) -> None:
        """Number the memory of a meta tensor that an operation made, or left `empty`."""
        self._add(tensor.untyped_storage(), Memory(0, device, undefined=Undefined.EMPTY if empty else None))

    def adopt(self, tensor: Tensor) -> None:
        """Number the memory of a tensor that was there before, with what it holds now; a meta tensor holds nothing."""
        storage = tensor.untyped_storage()
        if tensor.is_meta:
            self._add(storage, Memory(0, CPU, undefined=Undefined.META))
            return
        self._adopted.append(storage)
        self._numbers[id(storage)] = len(self._storages)
        contents = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._add(UntypedStorage(storage.nbytes(), device="meta"), Memory(0, tensor.device, contents))

    def twin(self, tensor: Tensor) -> Tensor:
        """A meta tensor of the same geometry, in the same memory where that is known."""
        if tensor.is_meta:
            return tensor
        if self.holds(tensor):
            view = self.view(tensor)
            return view.tensor(self._storages[view.memory])
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)

    def _add(self, storage: UntypedStorage, memory: Memory) -> None:
        self._numbers[id(storage)] = len(self._storages)
        self._storages.append(storage)
        self._memories.append(memory)
