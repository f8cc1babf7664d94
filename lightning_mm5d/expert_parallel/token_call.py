"""A call of experts in the graph of the step: where rows leave for them, and where the results arrive.

These are two nodes, so that other products run between them: in the forward those that the block computes before it
uses the results, and in the backward the gradients of the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.expert_parallel.rounds import Wish
from lightning_mm5d.expert_parallel.token_exchange import Arriving, Backward, Record

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Exchange = Callable[[Tensor, Wish], tuple[Arriving, Record | None]]
ExchangeBack = Callable[[Tensor, Record | None], Backward]


class TokenCall:
    """One call of a layer's experts with tokens of this rank.

    Args:
        exchange: has the experts of all ranks compute rows.
        exchange_back: begins to bring gradients of results to the experts, given the record of the forward.
        wish: the forward, without what its rows say.
        again: whether it is computed again in the backward, so that nothing is kept now.
    """

    def __init__(self, exchange: Exchange, exchange_back: ExchangeBack, wish: Wish, *, again: bool) -> None:
        self._exchange, self._exchange_back, self._wish, self._again = exchange, exchange_back, wish, again
        self._results: Arriving | None = None
        self._record: Record | None = None  # where it is kept
        self._backward: Backward | None = None

    def leave(self, rows: Tensor, *, trains: bool, wants: bool) -> None:
        """Bring rows to their experts; the results are under way then."""
        dtype = DTYPES.index(rows.dtype)
        trains = trains and not self._again
        wish = self._wish._replace(trains=int(trains), wants=int(wants), dtype=dtype, width=rows.shape[1])
        self._results, self._record = self._exchange(rows, wish)

    def arrive(self) -> Tensor:
        """Return the results."""
        results, self._results = self._results, None
        assert results is not None
        return results.wait()

    def leave_back(self, gradient: Tensor) -> None:
        """Begin to bring gradients of results to the experts."""
        self._backward = self._exchange_back(gradient, self._record)

    def arrive_back(self) -> Tensor | None:
        """Return the gradients of rows, if anybody wants them."""
        opened, self._backward = self._backward, None
        assert opened is not None
        return opened.end()


class Leave(torch.autograd.Function):
    """Rows leave for their experts; the ticket stands for them in the graph of the step."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, call: TokenCall) -> Tensor:
        call.leave(rows, trains=ctx.needs_input_grad[0], wants=ctx.needs_input_grad[1])
        ctx.call = call
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.call.arrive_back()
        return None, found if ctx.needs_input_grad[1] else None, None


class Arrive(torch.autograd.Function):
    """The results arrive. Of two nodes, the backward runs between them what the forward has computed between them."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, call: TokenCall) -> Tensor:
        ctx.call = call
        # where the layer is computed again in the backward, asking for it has that done first
        ctx.save_for_backward(ticket.new_empty(0))
        return call.arrive()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        ctx.call.leave_back(gradient)
        return gradient.new_zeros(()), None
