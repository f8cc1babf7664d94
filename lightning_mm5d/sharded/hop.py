"""A hop along a ring of ranks, during which something else is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.sharded.backends import message_device
from lightning_mm5d.sharded.collectives import TensorGroup


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
