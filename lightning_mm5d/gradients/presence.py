"""Which parameters have a gradient on any rank: agreed by all ranks over messages of the host, once for each structure.

A batch without images gives encoders no gradient, and other replicas may have images. A parameter has a gradient if any
rank has one for it, as on one process, and all ranks must know that before an optimizer steps.

Two phases:

1. Each rank sends a digest of what it has, and all get the sum of the digests.
2. Where the sum is new, ranks send what they have. All of them remember what came out under that sum.

A sum is new on all ranks at once, because they remember the same ones: so no rank waits for a second phase alone. What
ranks have is known on the host without waiting for a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_REMEMBERED = 1024  # sums of digests
_DIGEST_BYTES = 12


class Present(NamedTuple):
    """Numbers of parameters.

    Attributes:
        there: those with a gradient on any rank.
        again: those of which any rank got more of a gradient after it was sent.
    """

    there: frozenset[int]
    again: frozenset[int]


class Presence:
    """What all ranks have.

    Args:
        count: of all parameters of the model.
        group: all ranks, with messages in host memory; None for this rank alone.
    """

    def __init__(self, count: int, group: dist.ProcessGroup | None) -> None:
        self._count, self._group = count, group
        self._known: dict[tuple[int, ...], Present] = {}

    def agree(self, there: Iterable[int], again: Iterable[int]) -> Present:
        """Return what any rank has; collective.

        Args:
            there: numbers of the parameters with a gradient on this rank.
            again: numbers of those that got more of it after it was sent.
        """
        if self._group is None:
            return Present(frozenset(there), frozenset(again))
        flags = bytearray(2 * self._count)
        for number in there:
            flags[number] = 1
        for number in again:
            flags[self._count + number] = 1
        sums = torch.tensor(self._digest(bytes(flags)))
        dist.all_reduce(sums, group=self._group)
        key = tuple(sums.tolist())
        if key not in self._known:
            if len(self._known) == _REMEMBERED:
                self._known.clear()
            self._known[key] = self._exchange(flags)
        return self._known[key]

    def latest(self, places: Tensor) -> list[float]:
        """Return the largest of each of some numbers, in host memory, over all ranks; collective."""
        if self._group is not None:
            dist.all_reduce(places, dist.ReduceOp.MAX, self._group)
        return places.tolist()

    def _digest(self, flags: bytes) -> list[int]:
        """Two numbers of 6 bytes, so that the sum over all ranks fits into 8; another rank has others."""
        rank = dist.get_rank(self._group).to_bytes(8, "big")
        digest = hashlib.blake2b(rank + flags, digest_size=_DIGEST_BYTES).digest()
        half = _DIGEST_BYTES // 2
        return [int.from_bytes(digest[:half], "big"), int.from_bytes(digest[half:], "big")]

    def _exchange(self, flags: bytearray) -> Present:
        found = torch.tensor(list(flags), dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        numbers = found.nonzero().flatten().tolist()
        there = frozenset(number for number in numbers if number < self._count)
        return Present(there, frozenset(number - self._count for number in numbers if number >= self._count))
