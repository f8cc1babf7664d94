"""Counts the bytes of the tensors without memory that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Meter:
    """Counts storages, each once.

    Attributes:
        now: bytes that are alive.
        most: the largest number of them at a time; set it to 0 to begin again.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def watch(self, _: Any, __: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Count what an operation made, as `FakeTensors` reports it."""
        for one in made:
            storage = one.untyped_storage()
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.most = max(self.most, self.now)

    def _free(self, address: int) -> None:
        self.now -= self._sizes.pop(address)
