"""Brings tokens to the ranks that hold their experts, and the results back.

A token goes to each of its experts once: rows are sorted by expert, so that those for one rank lie in a row, and one
all-to-all moves exactly them. Another one brings the results back, which are weighted and added up where the tokens
came from. Gradients take the same way. The experts themselves are the model's own code, called with rows of one expert
each.

The graph of the experts is apart from that of the step: its backward runs between the two exchanges of a backward, also
on a rank whose own step has no part in it. Where a layer is computed again in the backward, the graph is built then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_mm5d.expert_parallel.rounds import Round
from lightning_mm5d.sharded.host_copies import on_device


class Lengths(NamedTuple):
    """Rows that travel between this rank and each rank of its group.

    Attributes:
        sent: for each rank, those for its experts.
        received: from each rank, those for this rank's experts.
        counts: of the received ones for each of this rank's experts, by rank.
        calls: where experts are called one by one, which one each rank called and for how many samples (`Round.calls`).
    """

    sent: list[int]
    received: list[int]
    counts: list[list[int]]
    calls: list[tuple[int, int]]

    def experts(self, device: torch.device) -> Tensor:
        """Return the local expert of each received row."""
        counts = on_device(torch.tensor(self.counts), device)
        experts = torch.arange(counts.shape[1], device=device).repeat(counts.shape[0])
        return experts.repeat_interleave(counts.flatten(), output_size=sum(self.received))


Experts = Callable[[Tensor, Lengths], Tensor | None]  # rows [P, H] that came to results [P, H]; None: none was called


@dataclass(eq=False)
class Record:
    """What a backward needs of the rows that this rank's experts have computed.

    Attributes:
        number: of the record, the same on all ranks of the group.
        lengths: of the exchange.
        rows: that came, as a leaf of the graph.
        results: of the experts; None where none was called.
        wants: whether any rank wants gradients of its rows.
        left: places of the ranks whose backward of it is still to come, of those whose forward it was.
    """

    number: int
    lengths: Lengths
    rows: Tensor
    results: Tensor | None
    wants: bool
    left: frozenset[int]


class TokenGroup:
    """The ranks that share the experts of a layer.

    Args:
        group: their process group.

    Attributes:
        size: number of ranks.
        index: of this rank.
        moved: bytes of rows that this rank has sent to others.
        hand_over: called between the start of an exchange and the wait for it, so that another microbatch is computed
            meanwhile; the same on all ranks that share experts of the stage. None just waits.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.moved = 0
        self.hand_over: Callable[[], None] | None = None

    def begin(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Arriving:
        """Begin to send rows ``[sum(sent), H]`` to each rank in turn; those of each arrive, ``[sum(received), H]``."""
        rows, found = rows.contiguous(), rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(found, rows, list(received), list(sent), group=self._group, async_op=True)
        self.moved += (sum(sent) - sent[self.index]) * rows[:1].nbytes
        return Arriving(self, found, rows, work)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """As `begin`, and wait."""
        return self.begin(rows, sent, received).wait()


class Arriving:
    """Rows that are under way.

    Args:
        group: between whose ranks they travel.
        rows: where they arrive.
        sent: what other ranks read until then.
        work: that ends then.
    """

    def __init__(self, group: TokenGroup, rows: Tensor, sent: Tensor, work: Any) -> None:
        self._group, self._rows = group, rows
        self._under_way: tuple[Tensor, Any] | None = (sent, work)

    def wait(self) -> Tensor:
        """Return the rows when they are there; the first call hands over and waits."""
        if self._under_way is not None:
            if self._group.hand_over is not None:
                self._group.hand_over()
            self._under_way[1].wait()
            self._under_way = None
        return self._rows


def forward(rows: Tensor, lengths: Lengths, group: TokenGroup, experts: Experts) -> Arriving:
    """Return the results of `rows`, in their order, without a graph; they are under way."""
    came = group.exchange(rows, lengths.sent, lengths.received)
    results = experts(came, lengths)
    returned = came if results is None else results
    return group.begin(returned.to(rows.dtype), lengths.received, lengths.sent)


def recorded_forward(
    rows: Tensor, lengths: Lengths, group: TokenGroup, experts: Experts, number: int, found: Round
) -> tuple[Arriving, Record]:
    """Return the results of `rows`, in their order, which are under way, and what the backward needs."""
    came = group.exchange(rows, lengths.sent, lengths.received)
    # hooks of a checkpoint around the layer must not pack what belongs to the tokens of other ranks
    with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
        came = came.requires_grad_(found.wants)
        results = experts(came, lengths)
    returned = came.detach() if results is None else results.detach()
    record = Record(number, lengths, came, results, found.wants, found.wishing)
    return group.begin(returned.to(rows.dtype), lengths.received, lengths.sent), record


class Backward:
    """The backward of a record: gradients of results are under way to the experts from its beginning.

    Args:
        gradient: of the results, in the order of the rows that this rank sent.
        record: of their forward.
        group: the ranks that share the experts.
    """

    def __init__(self, gradient: Tensor, record: Record, group: TokenGroup) -> None:
        self._record, self._group, self._ended = record, group, False
        self._found: Tensor | None = None
        self._came = group.begin(gradient, record.lengths.sent, record.lengths.received)

    def end(self) -> Tensor | None:
        """Give the experts their gradients; return those of the rows that this rank sent, None where nobody wants any.

        The first call does it, collectively. The graph stays where some rank's backward of the record is to come.
        """
        if not self._ended:
            self._ended, self._found = True, self._run()
        return self._found

    def _run(self) -> Tensor | None:
        record, came = self._record, self._came.wait()
        record.rows.grad = None
        if record.results is not None and record.results.requires_grad:
            torch.autograd.backward(record.results, came.to(record.results.dtype), retain_graph=bool(record.left))
        if not record.wants:
            return None
        own = record.rows.grad
        if own is None:
            own = torch.zeros_like(record.rows)
        return self._group.exchange(own, record.lengths.received, record.lengths.sent)


def _itself(tensor: Any) -> Any:
    return tensor
