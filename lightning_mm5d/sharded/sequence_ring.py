"""A sequence whose shards travel around a ring of ranks, one hop while each shard is worked on.

`ring_gather` gathers: a rank works on the rows that it has while those of the rank before it come. `ring_sum_scattered`
sums and scatters: a rank computes its part of one shard's sum while the sum of that shard so far is on its way to it
(Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models").

Both are outside of autograd's graph. All ranks make the same hops in the same order; shorter shards travel padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.sharded.collectives import TensorGroup, message_device


class Hop:
    """Passes a buffer to the next rank of a ring while another comes from the previous one.

    Args:
        group: the ring.
        sent: contiguous; at least one element, so that all ranks take part in each hop.
        shape: of what is to come.
    """

    def __init__(self, group: TensorGroup, sent: Tensor, shape: Sequence[int]) -> None:
        self._group, self._device, wire = group, sent.device, message_device(sent.device, group.group)
        self._sent = sent.to(wire)  # gloo moves host memory only between two ranks
        self._received = self._sent.new_empty(tuple(shape))
        following, previous = (group.index + 1) % group.size, (group.index - 1) % group.size
        # one batch, or NCCL would wait for one direction before it starts the other
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group.group, group_peer=following),
                dist.P2POp(dist.irecv, self._received, group=group.group, group_peer=previous),
            ]
        )
        group.moved += sent.nbytes

    def wait(self) -> Tensor:
        """Return what came; what was sent may be written to from now on."""
        self._group.wait(*self._works)
        del self._sent, self._works  # the next hop allocates another buffer
        return self._received.to(self._device)


def ring_gather(
    local: Tensor, dim: int, lengths: Sequence[int], group: TensorGroup, use: Callable[[Tensor, int], None]
) -> Tensor:
    """Return the full tensor, as ``group.gather(local, dim, lengths)`` does.

    Args:
        local: this rank's shard.
        dim: along which it is one, negative.
        lengths: of the shards.
        group: the ring.
        use: called with each shard, contiguous, and its start in the full tensor while the next one comes; this rank's
            own first.
    """
    starts, held = _starts(lengths), _padded(local.detach(), dim, max(lengths))
    full = local.new_empty(_shape(local, dim, sum(lengths)))
    for step in range(group.size):
        source = (group.index - step) % group.size
        start, length = starts[source], lengths[source]
        hop = None if step == group.size - 1 else _hop(group, held)
        rows = held.narrow(dim, 0, length).contiguous()
        full.narrow(dim, start, length).copy_(rows)
        use(rows, start)
        if hop is not None:
            held = hop.wait()
    return full


def ring_sum_scattered(
    part: Callable[[int, int], Tensor], dim: int, lengths: Sequence[int], group: TensorGroup
) -> Tensor:
    """Return this rank's shard of a sum over ranks, as ``group.sum_scattered(full, dim, lengths)`` does.

    Args:
        part: given the start and the length of a shard, computes this rank's summand of it.
        dim: along which shards are, negative.
        lengths: of the shards.
        group: the ring.
    """
    starts, longest = _starts(lengths), max(lengths)
    hop: Hop | None = None
    for step in range(group.size - 1):
        target = (group.index - 1 - step) % group.size
        made = part(starts[target], lengths[target])
        # what came takes the sum: a mode may keep `made` for when it is computed again
        sent = _padded(made, dim, longest) if hop is None else _plus(hop.wait(), made, dim)
        hop = _hop(group, sent)
    made = part(starts[group.index], lengths[group.index])
    if hop is None:
        return made
    total = _plus(hop.wait(), made, dim)
    if made.shape[dim] == longest:
        return total
    return total.narrow(dim, 0, made.shape[dim]).clone(memory_format=torch.contiguous_format)


def _hop(group: TensorGroup, sent: Tensor) -> Hop | None:
    return None if group.is_silent or not sent.numel() else Hop(group, sent, sent.shape)


def _plus(came: Tensor, made: Tensor, dim: int) -> Tensor:
    """Add `made` to the rows of `came` that are no padding."""
    came.narrow(dim, 0, made.shape[dim]).add_(made)
    return came


def _padded(x: Tensor, dim: int, longest: int) -> Tensor:
    missing = longest - x.shape[dim]
    return (torch.cat([x, x.new_zeros(_shape(x, dim, missing))], dim) if missing else x).contiguous()


def _starts(lengths: Sequence[int]) -> list[int]:
    return [*accumulate(lengths, initial=0)]


def _shape(x: Tensor, dim: int, length: int) -> list[int]:
    shape = [*x.shape]
    shape[dim] = length
    return shape
