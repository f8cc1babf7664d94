"""The two collectives of ranks that share parameters: a sum of which each rank gets its rows, and their exchange.

Both are exact in the number of bytes for shares of unequal length; the gather pads each share to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.sharded.backends import waits_on_device
from lightning_mm5d.sharded.compressed_collectives import CompressedGather
from lightning_mm5d.sharded.compression import Compression


def gather(
    own: Tensor, lengths: Sequence[int], group: dist.ProcessGroup, compression: Compression | None
) -> Gathered | CompressedGather:
    """Start an all-gather, as `Gathered`; compressed, all ranks get equal rows, the owner too."""
    if compression is None:
        return Gathered(own, lengths, group)
    return CompressedGather(own, lengths, group, compression)


class ScatteredSum:
    """A reduce-scatter that is under way.

    Args:
        sent: flat; for each rank of `group`, in its order, what this rank adds to that rank's sum. It is kept until it
            has left.
        lengths: of what each rank gets, the same on all ranks.
        group: the ranks that share.
    """

    def __init__(self, sent: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        # an all-to-all and a sum in this rank's memory: the bytes of a ring, for any lengths, in one fixed order
        own, self._count = lengths[group.rank()], len(lengths)
        self._sent: Tensor | None = sent
        self._arrived: Tensor | None = sent.new_empty(own * self._count)
        self._total: Tensor | None = None
        self._group = group
        sizes = [own] * self._count
        self._work: Any = dist.all_to_all_single(self._arrived, sent, sizes, list(lengths), group=group, async_op=True)

    def is_there(self) -> bool:
        """Whether `wait` does not hold up the host."""
        return self._arrived is None or waits_on_device(self._arrived.device, self._group) or self._work.is_completed()

    def wait(self) -> Tensor:
        """Return the sum of this rank's chunks over all ranks, and free what was sent and has arrived."""
        if self._total is None:
            self._work.wait()
            assert self._arrived is not None
            self._total = self._arrived.view(self._count, -1).sum(0)
            self._sent = self._arrived = self._work = None  # gloo's work keeps both
        return self._total


class Gathered:
    """An all-gather that is under way.

    Args:
        own: a flat tensor.
        lengths: of the flat tensors of all ranks of `group`, in its order.
        group: the ranks that share.
    """

    def __init__(self, own: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        longest = max(lengths)
        self._lengths = lengths
        self._own = own if own.numel() == longest else torch.cat([own, own.new_empty(longest - own.numel())])
        self._all = own.new_empty(longest * len(lengths))
        self._work: Any = dist.all_gather_single(self._all, self._own, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """Return the flat tensors of all ranks."""
        self._work.wait()
        return [one[:length] for one, length in zip(self._all.chunk(len(self._lengths)), self._lengths, strict=True)]
