"""Attention of a rank's queries to keys gathered from all ranks, a few heads at a time.

Forward, for each step of some heads:

1. post the all-gather of the next step's keys and values;
2. compute this step's attention.

The backward gathers keys and values again in the same way. It sums and scatters (reduce-scatter) their gradients while
it computes the next step. Llama 3 was trained with
gathered keys (Grattafiori et al. 2024, section 3.3.2), all heads at once; here a step takes one key head with its
queries, or as many as `STEP_BYTES` hold, because small messages and small kernels cost more than their memory is worth.
At most two steps' full keys and values are held at a time.

Shapes: B batch, H query heads, G key heads, S tokens of the sequence, S_rank of this rank, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.exchange.local import Local, precise
from lightning_mm5d.context_parallel.exchange.transfers import Gather, SumScattered
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.token_split import TokenSplit

STEP_BYTES = 8 * 2**20


class Gathered:
    """Attention with gathered keys and values; a `Core`.

    Args:
        local: the attention.
        split: who holds which tokens.
        group: the ranks.
        tokens: all of them, [S].
    """

    def __init__(self, local: Local, split: TokenSplit, group: TensorGroup, tokens: Tensor) -> None:
        self._local, self._split, self._group = local, split, group
        self._own, self._all = split.indices(group.index, tokens.device), tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ratio = q.shape[1] // k.shape[1]
        out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=precise(q.dtype), device=q.device)

        def compute(heads: slice, keys: Tensor, values: Tensor) -> None:
            queries = slice(heads.start * ratio, heads.stop * ratio)
            found = self._local.attend(q[:, queries], keys, values, self._own, self._all)
            if found is not None:
                out[:, queries], lse[:, queries] = found

        self._each_step(k, v, compute)
        return out, lse

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ratio, dtype = q.shape[1] // k.shape[1], precise(q.dtype)
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)
        under_way: list[tuple[slice, SumScattered, SumScattered]] = []

        def scattered(whole: Tensor) -> SumScattered:
            return SumScattered(self._group, whole, self._split, dtype)

        def land() -> None:
            heads, keys, values = under_way.pop()
            dk[:, heads], dv[:, heads] = keys.wait(), values.wait()

        def compute(heads: slice, keys: Tensor, values: Tensor) -> None:
            queries = slice(heads.start * ratio, heads.stop * ratio)
            d_out_here, q_here, out_here, lse_here = (x[:, queries] for x in (d_out, q, out, lse))
            found = self._local.gradients(d_out_here, q_here, keys, values, out_here, lse_here, self._own, self._all)
            dq_here, d_keys, d_values = found or (0, torch.zeros_like(keys), torch.zeros_like(values))
            dq[:, queries] = dq_here
            if under_way:
                land()
            under_way.append((heads, scattered(d_keys), scattered(d_values)))

        self._each_step(k, v, compute)
        land()
        return dq, dk, dv

    def _each_step(self, k: Tensor, v: Tensor, compute: Callable[[slice, Tensor, Tensor], None]) -> None:
        """Call ``compute(heads, keys, values)`` with the full keys and values of some heads, for all heads in turn."""
        heads = k.shape[1]
        a_head = self._split.size * k.shape[0] * (k.shape[3] + v.shape[3]) * k.element_size()
        at_once = min(max(STEP_BYTES // a_head, 1), heads)
        steps = [slice(start, min(start + at_once, heads)) for start in range(0, heads, at_once)]
        coming = self._post(k, v, steps[0])
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            keys, values = (one.wait() for one in coming)
            coming.clear()  # a gather holds what it received as it came and in order
            if following is not None:
                coming = self._post(k, v, following)
            compute(step, keys, values)
            del keys, values

    def _post(self, k: Tensor, v: Tensor, heads: slice) -> list[Gather]:
        return [Gather(self._group, x[:, heads], self._split) for x in (k, v)]
