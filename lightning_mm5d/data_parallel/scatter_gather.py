"""The two collectives of ranks that share parameters: a sum of which each rank gets its rows, and their exchange.

Devices that order messages, as NCCL's do, sum in their own reduce-scatter. Over gloo, which has none of its own, a sum
is an all-to-all and an addition in this rank's memory: the bytes of a ring for shares of any lengths. The gather pads
each share to the longest, and so does the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_mm5d.sharded.backends import waits_on_device
from lightning_mm5d.sharded.collectives import Encoding
from lightning_mm5d.sharded.renamed import all_gather_single, reduce_scatter_single


def gather(own: Tensor, lengths: Sequence[int], group: dist.ProcessGroup, encoding: Encoding | None) -> Any:
    """Start an all-gather, as `Gathered`; encoded, all ranks get equal rows, the owner too."""
    return Gathered(own, lengths, group) if encoding is None else encoding.gathered(own, lengths, group)


class ScatteredSum:
    """A reduce-scatter that is under way.

    Args:
        sent: flat; for each rank of `group`, in its order, what this rank adds to that rank's sum. It is kept until it
            has left.
        lengths: of what each rank gets, the same on all ranks.
        group: the ranks that share.
    """

    def __init__(self, sent: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        self._length, self._count = lengths[group.rank()], len(lengths)
        self._is_ordered = waits_on_device(sent.device, group)
        self._total: Tensor | None = None
        self._work: Any
        if self._is_ordered:
            longest = max(lengths)
            if min(lengths) < longest:
                sent = torch.cat([F.pad(one, (0, longest - one.numel())) for one in sent.split(list(lengths))])
            arrived = sent.new_empty(longest)
            self._work = reduce_scatter_single(arrived, sent, group, async_op=True)
        else:
            arrived = sent.new_empty(self._length * self._count)
            sizes = [self._length] * self._count
            self._work = dist.all_to_all_single(arrived, sent, sizes, list(lengths), group=group, async_op=True)
        self._sent: Tensor | None = sent
        self._arrived: Tensor | None = arrived

    def is_there(self) -> bool:
        """Whether `wait` does not hold up the host."""
        return self._is_ordered or self._arrived is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """Return the sum of this rank's chunks over all ranks, and free what was sent and has arrived."""
        if self._total is None:
            self._work.wait()
            assert self._arrived is not None
            if self._is_ordered:
                self._total = self._arrived[: self._length]
            else:
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
        self._work: Any = all_gather_single(self._all, self._own, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """Return the flat tensors of all ranks."""
        self._work.wait()
        return [one[:length] for one, length in zip(self._all.chunk(len(self._lengths)), self._lengths, strict=True)]
