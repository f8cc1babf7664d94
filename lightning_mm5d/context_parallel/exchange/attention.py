"""Attention over a sequence whose tokens lie on several ranks, and attention to keys that are all on this rank.

In `context_attention` each rank gives the queries, keys and values of its tokens and gets their output. The *mode* says
how ranks reach each other's keys:

- ``allgather``: keys and values are gathered, a few heads at a time;
- ``ring``: they travel around a ring, or around an inner and an outer one (ring.py);
- ``ulysses``: ranks exchange tokens for heads (ulysses.py);
- ``hybrid``: heads among inner ranks, a ring among outer ones.

All ranks together keep as much for the backward as one process would: keys and values of other ranks, and key heads
that several ranks read, travel again.

It refuses (`ValueError`) modes without the groups that they need, and tensors that do not fit the split.

Shapes: B batch, H query heads, G key heads, S_rank tokens of this rank, D width of queries and keys, Dv of values.

Attention of a rank's queries to keys gathered from all ranks, a few heads at a time.

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

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.exchange.ring import Core, Local, LocalKeys, Ring, nothing, precise
from lightning_mm5d.context_parallel.exchange.ulysses import Gather, Heads, SumScattered, within
from lightning_mm5d.context_parallel.masks.mask import Mask, Scoring
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.kept_results import as_one
from lightning_mm5d.sharded.sequence import TokenSplit, joined
from lightning_mm5d.sharded.torch_internals import ends_graph

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
        self._shard, self._all = split.indices(group.index, tokens.device), tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ratio = q.shape[1] // k.shape[1]
        out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=precise(q.dtype), device=q.device)

        def compute(heads: slice, keys: Tensor, values: Tensor) -> None:
            queries = slice(heads.start * ratio, heads.stop * ratio)
            attended = self._local.attend(q[:, queries], keys, values, self._shard, self._all)
            if attended is not None:
                out[:, queries], lse[:, queries] = attended

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
            grads = self._local.gradients(d_out_here, q_here, keys, values, out_here, lse_here, self._shard, self._all)
            dq_here, d_keys, d_values = grads or (0, torch.zeros_like(keys), torch.zeros_like(values))
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
            keys, values = (gather.wait() for gather in coming)
            coming.clear()  # a gather holds what it received as it came and in order
            if following is not None:
                coming = self._post(k, v, following)
            compute(step, keys, values)
            del keys, values

    def _post(self, k: Tensor, v: Tensor, heads: slice) -> list[Gather]:
        return [Gather(self._group, x[:, heads], self._split) for x in (k, v)]


Mode = Literal["allgather", "ring", "ulysses", "hybrid"]


@dataclass(frozen=True)
class ContextGroups:
    """The groups of one context parallel rank.

    Args:
        whole: all R ranks that share a sequence.
        inner: ranks that exchange heads in a hybrid, or those of one node for a double ring.
        outer: one rank of each inner group. A rank's index among all is ``outer.index * inner.size + inner.index``.
    """

    whole: TensorGroup
    inner: TensorGroup | None = None
    outer: TensorGroup | None = None

    @property
    def nested(self) -> tuple[TensorGroup, TensorGroup] | None:
        """Outer and inner group, where there are both."""
        return None if self.outer is None or self.inner is None else (self.outer, self.inner)

    @property
    def is_silent(self) -> bool:
        """Whether a dry run, which computes shapes alone, forbids communication."""
        return any(group.is_silent for group in (self.whole, *(self.nested or ())))


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    split: TokenSplit,
    groups: ContextGroups,
    *,
    mode: Mode,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of this rank's tokens to the whole sequence.

    Gradients are those of this rank's tensors, from the output of all ranks; that of `sinks` is this rank's share of a
    sum over ranks. They cannot be differentiated again.

    Args:
        q: [B, H, S_rank, D].
        k: [B, G, S_rank, D]; H is a multiple of G.
        v: [B, G, S_rank, Dv].
        mask: of the whole sequence.
        split: who holds which tokens.
        groups: of this rank.
        mode: how keys and values are exchanged.
        scale: factor of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sinks: a logit per head that every query sees beside its keys, with a value of zero, [H].

    Returns:
        [B, H, S_rank, Dv]; zero for a query that sees no key.

    Raises:
        ValueError: the mode needs groups that are not given, or shapes and types do not fit.
    """
    q, k, v = _cast(q, k, v)
    _check(q, k, v, split, groups, mode, sinks)
    return _Attention.apply(q, k, v, sinks, *_way(q, k, mask, split, groups, mode, Scoring(scale, softcap)))


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    q_tokens: Tensor | None,
    k_tokens: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of queries to keys that are all on this rank, by the same kernel.

    Args:
        q: [B, H, Sq, D].
        k: [B, G, Sk, D]; H is a multiple of G.
        v: [B, G, Sk, Dv].
        mask: of the whole sequences that these tokens are from.
        q_tokens: which tokens the queries are, ascending, [Sq]; None for 0 to Sq - 1.
        k_tokens: which tokens the keys are, ascending, [Sk]; None for 0 to Sk - 1.
        scale, softcap, sinks: as of `context_attention`.

    Returns:
        [B, H, Sq, Dv]; zero for a query that sees no key.

    Raises:
        ValueError: shapes and types do not fit.
    """
    q, k, v = _cast(q, k, v)
    q_tokens, k_tokens = (
        first_tokens(mask, x.shape[2], x.device) if tokens is None else tokens
        for x, tokens in ((q, q_tokens), (k, k_tokens))
    )
    if (q.shape[2], k.shape[2], v.shape[2]) != (len(q_tokens), len(k_tokens), len(k_tokens)):
        raise ValueError(
            f"q, k, v: got {q.shape[2]}, {k.shape[2]} and {v.shape[2]} tokens. These are numbers of {len(q_tokens)}"
            f" queries and {len(k_tokens)} keys."
        )
    _check_heads(q, k, v, sinks)
    core = LocalKeys(Local(mask, Scoring(scale, softcap)), q_tokens, k_tokens)
    return _Attention.apply(q, k, v, sinks, core, None)


def first_tokens(mask: Mask, size: int, device: torch.device) -> Tensor:
    """Return 0, 1 and so on, int64 ``[size]``: one object, by which the mask knows it again. Do not write to it."""
    return mask.caches.tokens.get(("first", size, device), lambda: torch.arange(size, device=device))


def _cast(*tensors: Tensor) -> Iterator[Tensor]:
    """Autocast decides about types as it does for torch's own attention."""
    kind = tensors[0].device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    is_on = is_on and tensors[0].dtype != torch.float64
    return (x.to(torch.get_autocast_dtype(kind)) if is_on else x for x in tensors)


def _way(
    q: Tensor, k: Tensor, mask: Mask, split: TokenSplit, groups: ContextGroups, mode: Mode, scoring: Scoring
) -> tuple[Core, Heads | None]:
    """What computes a call, for all heads of this rank's tokens or, after an exchange, for the heads returned."""
    if groups.is_silent or not split.size:
        return _Shapes(), None
    device = q.device
    local, tokens = Local(mask, scoring), first_tokens(mask, split.size, device)
    if groups.whole.size == 1:
        return LocalKeys(local, tokens, tokens), None
    if mode == "allgather":
        return Gathered(local, split, groups.whole, tokens), None
    if mode == "ring":
        return Ring(local, split, groups.nested or (groups.whole,), device), None
    if mode == "ulysses":
        return LocalKeys(local, tokens, tokens), Heads(groups.whole, split, q.shape[1], k.shape[1])
    assert groups.nested is not None
    outer, inner = groups.nested
    heads = Heads(inner, within(split, inner.size, outer.index), q.shape[1], k.shape[1])
    return Ring(local, joined(split, inner.size), (outer,), device), heads


def _check(
    q: Tensor, k: Tensor, v: Tensor, split: TokenSplit, groups: ContextGroups, mode: str, sinks: Tensor | None
) -> None:
    if mode not in ("allgather", "ring", "ulysses", "hybrid"):
        raise ValueError(f"mode: got {mode!r}. It is one of allgather, ring, ulysses and hybrid.")
    if mode == "hybrid" and groups.nested is None:
        raise ValueError("mode: got 'hybrid' without inner and outer groups. It exchanges heads among inner ranks.")
    whole = groups.whole
    if split.ranks != whole.size:
        raise ValueError(f"split: got one for {split.ranks} ranks. The group has {whole.size}.")
    if groups.nested is not None:
        outer, inner = groups.nested
        if (whole.size, whole.index) != (outer.size * inner.size, outer.index * inner.size + inner.index):
            raise ValueError(
                f"groups: got rank {whole.index} of {whole.size}, {outer.index} of {outer.size} outer and {inner.index}"
                f" of {inner.size} inner ones. Inner ranks are neighbours, as many in each outer rank."
            )
    length = split.lengths[whole.index]
    if not q.shape[2] == k.shape[2] == v.shape[2] == length:
        raise ValueError(
            f"q, k, v: got {q.shape[2]}, {k.shape[2]} and {v.shape[2]} tokens. The split gives this rank {length}."
        )
    _check_heads(q, k, v, sinks)


def _check_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q, k, v: got shapes {[*q.shape]}, {[*k.shape]} and {[*v.shape]}. Queries and keys are of one width, keys"
            " and values have equally many heads, and queries a multiple of that."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k, v: got {q.dtype}, {k.dtype} and {v.dtype}. They travel together, so their types are equal."
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks: got shape {[*sinks.shape]}. There is one for each of {q.shape[1]} heads.")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, core: Core, heads: Heads | None
    ) -> Tensor:
        given, dtype = (k, v), q.dtype
        with _types_as_given(q.device.type):
            if heads is not None:
                q, k, v = heads.enter([q], [k, v])
            out, lse = as_one("mm5d.attention", (q, k, v), lambda: core.forward(q, k, v))
            if sinks is not None:
                logits = sinks if heads is None else sinks[heads.query_heads]
                logits = logits.to(lse.dtype).view(-1, 1)
                out = out * torch.sigmoid(lse - logits).unsqueeze(-1)
                lse = torch.logaddexp(lse, logits)
            out = out.to(dtype)
            if heads is not None and heads.repeats:
                k, v = given
            ctx.core, ctx.heads = core, heads
            ctx.save_for_backward(q, k, v, out, lse, sinks)
            return out if heads is None else heads.leave([out], [])[0]

    @staticmethod
    @ends_graph
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        heads, dtype = ctx.heads, q.dtype
        with _types_as_given(q.device.type):
            if heads is not None:
                d_out, *again = heads.enter([d_out], [k, v] if heads.repeats else [])
                k, v = again or (k, v)
            dq, dk, dv = ctx.core.backward(d_out, q, k, v, out, lse)
            d_sinks = None
            if sinks is not None and ctx.needs_input_grad[3]:
                d_sinks, rank_heads = torch.zeros_like(sinks), slice(None) if heads is None else heads.query_heads
                shares = torch.exp(sinks[rank_heads].to(lse.dtype).view(-1, 1) - lse)
                d_sinks[rank_heads] = -(shares * (d_out.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
            if heads is not None:
                if not heads.repeats:  # gradients that are yet to be summed stay precise
                    dk, dv = dk.to(dtype), dv.to(dtype)
                dq, dk, dv = heads.leave([dq.to(dtype)], [dk, dv])
            return dq.to(dtype), dk.to(dtype), dv.to(dtype), d_sinks, None, None


def _types_as_given(kind: str) -> AbstractContextManager[Any]:
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class _Shapes:
    """Values of the right shapes and no communication; a `Core`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return nothing(q, v)

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
