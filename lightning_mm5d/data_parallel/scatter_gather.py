"""The two collectives of ranks that share parameters: a sum of which each rank gets its rows, and their exchange.

Both are exact in the number of bytes for shares of unequal length; the gather pads each share to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
        chunks: for each rank of `group`, in its order, what this rank adds to that rank's sum: flat tensors of one
            dtype, of the same length on all ranks.
        group: the ranks that share.
    """

    def __init__(self, chunks: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        # an all-to-all and a sum in this rank's memory: the bytes of a ring, for any lengths, in one fixed order
        lengths = [chunk.numel() for chunk in chunks]
        own = lengths[group.rank()]
        self._sent: Tensor | None = torch.cat([*chunks])
        self._arrived: Tensor | None = self._sent.new_empty(own * len(chunks))
        self._count = len(chunks)
        self._total: Tensor | None = None
        sizes = [own] * len(chunks)
        self._work: Any = dist.all_to_all_single(self._arrived, self._sent, sizes, lengths, group=group, async_op=True)

    def free(self) -> None:
        """Sum what has arrived and free its memory, where all of it is there; waits for nobody."""
        if self._total is None and self._work.is_completed():
            self.wait()

    def wait(self) -> Tensor:
        """Return the sum of this rank's chunks over all ranks."""
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
