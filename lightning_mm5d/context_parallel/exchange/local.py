"""Attention of queries to keys that are both on this rank; shards that see nothing of each other cost no kernel.

All modes build on it. A shard may have no tokens or heads. The mask's tiles tell whether queries see any of the keys.

Shapes: B batch, H query heads, G key heads, Sq queries, Sk keys, D width of queries and keys, Dv width of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.kernels.kernel import attend, attend_backward

if TYPE_CHECKING:
    from lightning_mm5d.context_parallel.masks.mask import Mask
    from lightning_mm5d.context_parallel.masks.tiles import Tiles


class Core(Protocol):
    """Attention of the queries of this rank to the keys of all ranks that take part.

    Results may be more precise than the inputs; gradients of keys and values are those of this rank's keys, from the
    queries of all.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return output [B, H, Sq, Dv] and log-sum-exp [B, H, Sq]."""

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of `q`, `k` and `v`."""


class Local:
    """Attention between two shards that are both here.

    Args:
        mask: of the whole sequence.
        scale: factor of the scores.
        softcap: bound of the scores.
    """

    def __init__(self, mask: Mask, scale: float, softcap: float | None) -> None:
        self._mask = mask
        self._scale, self._softcap = scale, softcap

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, q_tokens: Tensor, k_tokens: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return output [B, H, Sq, Dv] and log-sum-exp [B, H, Sq], or None where no query sees any of the keys.

        Args:
            q: [B, H, Sq, D].
            k: [B, G, Sk, D].
            v: [B, G, Sk, Dv].
            q_tokens: which tokens the queries are, ascending, [Sq].
            k_tokens: which tokens the keys are, ascending, [Sk].
        """
        tiles = self._tiles(q, k, q_tokens, k_tokens)
        return None if tiles is None else attend(q, k, v, tiles, scale=self._scale, softcap=self._softcap)

    def gradients(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_tokens: Tensor,
        k_tokens: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the gradients of `q`, `k` and `v`, or None where no query sees any of the keys.

        Args:
            d_out, out: [B, H, Sq, Dv], of all keys that the queries see anywhere.
            lse: [B, H, Sq], likewise.
            q, k, v, q_tokens, k_tokens: as of `attend`.
        """
        tiles = self._tiles(q, k, q_tokens, k_tokens)
        if tiles is None:
            return None
        return attend_backward(d_out, q, k, v, out, lse, tiles, scale=self._scale, softcap=self._softcap)

    def _tiles(self, q: Tensor, k: Tensor, q_tokens: Tensor, k_tokens: Tensor) -> Tiles | None:
        if not q.numel() or not k.numel():
            return None
        tiles = self._mask.tiles(q_tokens, k_tokens)
        return tiles if tiles.kinds.any() else None


class Alone:
    """Attention with no keys but those that are here; a `Core`.

    Args:
        local: the attention.
        q_tokens: which tokens the queries are, ascending, [Sq].
        k_tokens: which tokens the keys are, ascending, [Sk].
    """

    def __init__(self, local: Local, q_tokens: Tensor, k_tokens: Tensor) -> None:
        self._local, self._q_tokens, self._k_tokens = local, q_tokens, k_tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._local.attend(q, k, v, self._q_tokens, self._k_tokens) or nothing(q, v)

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = self._local.gradients(d_out, q, k, v, out, lse, self._q_tokens, self._k_tokens)
        return found or (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))


def nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of queries that see no key."""
    lse = torch.full(q.shape[:3], -torch.inf, dtype=precise(q.dtype), device=q.device)
    return q.new_zeros(*q.shape[:3], v.shape[-1]), lse


def precise(dtype: torch.dtype) -> torch.dtype:
    """The type in which parts of a result are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32
