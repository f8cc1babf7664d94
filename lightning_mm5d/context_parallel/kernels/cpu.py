"""One rectangle of attention in plain steps: for soft-capped scores, which flash kernels do not know.

All is in the dtype of the arguments; autocast is off, it would take their precision back. Scores of a rectangle are
held whole, so rectangles have at most `LONGEST` queries and keys.

Shapes: B batch, H query heads, G key heads, m queries, n keys, D width of queries and keys, Dv width of values. The
queries of the H / G heads that share a key head are folded into one dim of rows, r = H / G * m.
"""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST = 512


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return output [B, H, m, Dv] and log-sum-exp [B, H, m] of these keys.

    Args:
        q: [B, H, m, D].
        k: [B, G, n, D].
        v: [B, G, n, Dv].
        mask: added to scores, [m, n].
        scale: factor of the scores.
        softcap: bound of the scores.
    """
    with torch.autocast(q.device.type, enabled=False):
        scores, _ = _scores(q, k, mask, scale, softcap)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
        out = weights @ v
        return out.view(*q.shape[:3], v.shape[-1]), lse.view(q.shape[:3])


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v`.

    Args:
        d_out, out: [B, H, m, Dv], of whole rows.
        lse: [B, H, m], of whole rows; infinity where a query sees nothing at all.
        q, k, v, mask, scale, softcap: as of `forward`.
    """
    with torch.autocast(q.device.type, enabled=False):
        scores, bent = _scores(q, k, mask, scale, softcap)
        heads = k.shape[1]
        weights = torch.exp(scores - _folded(lse.unsqueeze(-1), heads))
        d_rows = _folded(d_out, heads)
        delta = (d_rows * _folded(out, heads)).sum(-1, keepdim=True)
        dv = weights.mT @ d_rows
        d_scores = weights * (d_rows @ v.mT - delta)
        if bent is not None:
            d_scores *= 1 - bent.square()  # of tanh
        d_scores *= scale
        dq = d_scores @ k
        dk = d_scores.mT @ _folded(q, heads)
        return dq.view(q.shape), dk, dv


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return scores [B, G, r, n], and ``tanh(scores / softcap)`` before the mask where there is a softcap."""
    scores = (_folded(q, k.shape[1]) * scale) @ k.mT
    bent = None
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores = bent * softcap
    if mask is not None:
        scores.unflatten(2, (-1, q.shape[2])).add_(mask)
    return scores, bent


def _folded(x: Tensor, heads: int) -> Tensor:
    """[B, H, m, D] -> [B, G, r, D]."""
    return x.unflatten(1, (heads, -1)).flatten(2, 3)
