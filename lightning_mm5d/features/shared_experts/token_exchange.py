"""Brings tokens to the ranks that hold their experts, and the results back.

A token goes to each of its experts once: rows are sorted by expert, so that those for one rank lie in a row, and one
all-to-all moves exactly them. Another one brings the results back, which are weighted and added up where the tokens
came from. Gradients take the same way. The experts themselves are the model's own code, called with rows of one expert
each.

The graph of the experts is apart from that of the step: its backward runs between the two exchanges of a backward, also
on a rank whose own step has no part in it. Where a layer is computed again in the backward, the graph is built then.

A call of experts in the graph of the step: where rows leave for them, and where the results arrive.

These are two nodes, so that other products run between them: in the forward those that the block computes before it
uses the results, and in the backward the gradients of the same ones.

Ranks that share experts agree which layer's tokens travel next.

Replicas run different batches: one has no images, another skips a layer. Each exchange of tokens takes all ranks that
share the experts, so each begins with a *round*: every rank says over host memory what it wants. The first of these
wishes, in the order in which layers run, is what all of them do. A rank that wanted something else *serves*: it has no
tokens of its own, and its experts work for those of the others. A rank at the end of its action serves until all are
there. So nobody waits for a rank that does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_mm5d.config.errors import RankMismatchError
from lightning_mm5d.data.lazy import on_device
from lightning_mm5d.sharded.torch_internals import all_gather_single, ends_graph

END, FORWARD, BACKWARD = range(3)


class Wish(NamedTuple):
    """What a rank wants to do next, in whole numbers.

    Attributes:
        kind: END, FORWARD or BACKWARD.
        layer: place of the experts among those of the stage.
        number: of the record that a backward is for.
        trains: whether backwards may follow.
        wants: whether tokens want a gradient.
        dtype: of tokens, a number.
        width: of a token.
        expert: one more than the number of the expert that is called by itself, with rows of its own; 0 for none.
        batch: the samples of such rows, where they are ``[B, S, H]``; 0 for ``[P, H]``.
        counts: rows for each expert; none of a backward.
    """

    kind: int = END
    layer: int = 0
    number: int = 0
    trains: int = 0
    wants: int = 0
    dtype: int = 0
    width: int = 0
    expert: int = 0
    batch: int = 0
    counts: tuple[int, ...] = ()


_FIELDS = len(Wish._fields) - 1


class Round(NamedTuple):
    """What ranks do together.

    Attributes:
        chosen: the wish that counts.
        trains: whether backwards may follow on any rank.
        wants: whether tokens of any rank want a gradient.
        counts: rows of each rank for each expert, by place in the group.
        wishing: places of the ranks that wanted it; the others serve.
        calls: what each rank called by itself: `Wish.expert` and `Wish.batch`.
    """

    chosen: Wish
    trains: bool
    wants: bool
    counts: tuple[tuple[int, ...], ...]
    wishing: frozenset[int]
    calls: tuple[tuple[int, int], ...]


class Rounds:
    """The rounds of the ranks that run one stage together.

    Args:
        group: these ranks, with messages in host memory.
        max_experts: the largest number of experts of a layer.
        serve: does what others want.

    Attributes:
        place: of this rank in the group.
    """

    def __init__(self, group: dist.ProcessGroup, max_experts: int, serve: Callable[[Round], None]) -> None:
        self._group, self._max_experts, self._serve = group, max_experts, serve
        self._size, self.place = dist.get_world_size(group), dist.get_rank(group)

    def reach(self, wish: Wish, *, forward: bool) -> Round | None:
        """Serve until it is the turn of `wish`; return what ranks do then, None at the end of an action.

        Args:
            wish: of this rank.
            forward: whether the action is a forward.

        Raises:
            RankMismatchError: on all ranks, when they run different actions.
        """
        while True:
            wishes = self._exchanged(wish, forward)
            if all(wish.kind == END for wish in wishes):
                return None
            chosen = min((wish for wish in wishes if wish.kind != END), key=_order(forward))
            nothing = Wish(counts=(0,) * len(chosen.counts))
            agreeing = [wish if wish[:3] == chosen[:3] else nothing for wish in wishes]
            trains, wants = (any(getattr(wish, name) for wish in agreeing) for name in ("trains", "wants"))
            counts = tuple(wish.counts for wish in agreeing)
            wishing = frozenset(place for place, wish in enumerate(agreeing) if wish is not nothing)
            calls = tuple((wish.expert, wish.batch) for wish in agreeing)
            this_round = Round(chosen, trains, wants, counts, wishing, calls)
            if self.place in wishing:
                return this_round
            self._serve(this_round)

    def agree(self, wish: bool) -> bool:
        """Whether all ranks wish something; collective, between actions."""
        wishes = torch.tensor([int(wish)])
        dist.all_reduce(wishes, dist.ReduceOp.MIN, group=self._group)
        return bool(wishes)

    def _exchanged(self, wish: Wish, forward: bool) -> list[Wish]:
        counts = [*wish.counts, *[0] * (self._max_experts - len(wish.counts))]
        sent = torch.tensor([int(forward), *wish[:_FIELDS], *counts])
        came = sent.new_empty(self._size * len(sent))
        all_gather_single(came, sent, group=self._group)
        rows: list[list[int]] = came.view(self._size, -1).tolist()
        if len({row[0] for row in rows}) > 1:
            raise RankMismatchError("ranks that share experts run a forward and a backward at the same time")
        return [Wish._make([*row[1 : _FIELDS + 1], tuple(row[_FIELDS + 1 :])]) for row in rows]


def _order(forward: bool) -> Callable[[Wish], tuple[int, ...]]:
    """The order in which layers run: in a backward from the last to the first, each computed again before."""
    if forward:
        return lambda wish: (wish.layer, wish.number)
    return lambda wish: (-wish.layer, wish.kind, -wish.number)


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
        index: of this rank.
        hand_over: called between the start of an exchange and the wait for it, so that another microbatch is computed
            meanwhile; the same on all ranks that share experts of the stage. None just waits.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.index = dist.get_rank(group)
        self.hand_over: Callable[[], None] | None = None

    def begin(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Arriving:
        """Begin to send rows ``[sum(sent), H]`` to each rank in turn; those of each arrive, ``[sum(received), H]``."""
        rows, arriving = rows.contiguous(), rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(arriving, rows, list(received), list(sent), group=self._group, async_op=True)
        return Arriving(self, arriving, rows, work)

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
    rows: Tensor, lengths: Lengths, group: TokenGroup, experts: Experts, number: int, this_round: Round
) -> tuple[Arriving, Record]:
    """Return the results of `rows`, in their order, which are under way, and what the backward needs."""
    came = group.exchange(rows, lengths.sent, lengths.received)
    # hooks of a checkpoint around the layer must not pack what belongs to the tokens of other ranks
    with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
        came = came.requires_grad_(this_round.wants)
        results = experts(came, lengths)
    returned = came.detach() if results is None else results.detach()
    record = Record(number, lengths, came, results, this_round.wants, this_round.wishing)
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
        self._gradients: Tensor | None = None
        self._came = group.begin(gradient, record.lengths.sent, record.lengths.received)

    def end(self) -> Tensor | None:
        """Give the experts their gradients; return those of the rows that this rank sent, None where nobody wants any.

        The first call does it, collectively. The graph stays where some rank's backward of the record is to come.
        """
        if not self._ended:
            self._ended, self._gradients = True, self._run()
        return self._gradients

    def _run(self) -> Tensor | None:
        record, came = self._record, self._came.wait()
        record.rows.grad = None
        if record.results is not None and record.results.requires_grad:
            torch.autograd.backward(record.results, came.to(record.results.dtype), retain_graph=bool(record.left))
        if not record.wants:
            return None
        gradient = record.rows.grad
        if gradient is None:
            gradient = torch.zeros_like(record.rows)
        return self._group.exchange(gradient, record.lengths.received, record.lengths.sent)


def _itself(tensor: Any) -> Any:
    return tensor


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Exchange = Callable[[Tensor, Wish], tuple[Arriving, Record | None]]
ExchangeBack = Callable[[Tensor, Record | None], Backward]


@dataclass(eq=False)
class TokenCall:
    """One call of a layer's experts with tokens of this rank.

    Attributes:
        exchange: has the experts of all ranks compute rows.
        exchange_back: begins to bring gradients of results to the experts, given the record of the forward.
        wish: the forward, without what its rows say.
        again: whether it is computed again in the backward, so that nothing is kept now.
        results: from where rows leave to where the results arrive.
        record: of the forward, where it is kept.
        opened: the backward, from where gradients leave to where they arrive.
    """

    exchange: Exchange
    exchange_back: ExchangeBack
    wish: Wish
    again: bool
    results: Arriving | None = None
    record: Record | None = None
    opened: Backward | None = None


class Leave(torch.autograd.Function):
    """Rows leave for their experts; the ticket stands for them in the graph of the step."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, call: TokenCall) -> Tensor:
        wants_anchor, wants_rows, _ = ctx.needs_input_grad
        trains, dtype = int(wants_anchor and not call.again), DTYPES.index(rows.dtype)
        wish = call.wish._replace(trains=trains, wants=int(wants_rows), dtype=dtype, width=rows.shape[1])
        call.results, call.record = call.exchange(rows, wish)
        ctx.call = call
        return rows.new_zeros(())

    @staticmethod
    @ends_graph
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        opened, ctx.call.opened = ctx.call.opened, None
        assert opened is not None
        gradients = opened.end()
        return None, gradients if ctx.needs_input_grad[1] else None, None


class Arrive(torch.autograd.Function):
    """The results arrive. Of two nodes, the backward runs between them what the forward has computed between them."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, call: TokenCall) -> Tensor:
        ctx.call = call
        # where the layer is computed again in the backward, asking for it has that done first
        ctx.save_for_backward(ticket.new_empty(0))
        results, call.results = call.results, None
        assert results is not None
        return results.wait()

    @staticmethod
    @ends_graph
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        ctx.call.opened = ctx.call.exchange_back(gradient, ctx.call.record)
        return gradient.new_zeros(()), None
