"""Attention of a rank's queries to keys that are here, and to keys and values that travel around a ring.

All modes build on attention between two shards that are both here: shards that see nothing of each other cost no
kernel. A shard may have no tokens or heads. The mask's tiles tell whether queries see any of the keys.

A ring (Ring Attention, Liu et al. 2023) brings each block of keys and values to every rank. One step of the forward:

1. post the hop that passes this block on and receives the next one;
2. compute attention to this block, and merge it with the earlier blocks by their log-sum-exp.

In the backward the blocks travel again, and each block's gradients follow it one step later: every rank adds its own to
what comes from the previous rank, and the last hop returns them to the rank that holds the keys.

Rings nest: the ranks of one node form an inner ring, and ranks at the same place of all nodes an outer one (the double
ring of LoongTrain, Gu et al. 2024). A block's outer hop is posted before the inner ring runs around, so the slow link
has a whole round of the inner ring's time. Gradients of a round are added up within the node first.

A rank sends blocks on even if it has no use for them, and computes nothing with blocks that its queries do not see.

Shapes: B batch, H query heads, G key heads, S_rank tokens of a rank, Sq queries, Sk keys, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.kernels.kernel import attend, attend_backward, merge
from lightning_mm5d.context_parallel.masks.mask import Mask, Scoring, Tiles
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.sequence import Hop, TokenSplit


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
        scoring: scale and bound of the scores.
    """

    def __init__(self, mask: Mask, scoring: Scoring) -> None:
        self._mask, self._scoring = mask, scoring

    def attend(self, q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return output [B, H, Sq, Dv] and log-sum-exp [B, H, Sq], or None where no query sees any of the keys.

        Args:
            q: [B, H, Sq, D].
            k: [B, G, Sk, D].
            v: [B, G, Sk, Dv].
            q_at: which tokens the queries are, ascending, [Sq].
            k_at: which tokens the keys are, ascending, [Sk].
        """
        tiles = self._tiles(q, k, q_at, k_at)
        return None if tiles is None else attend(q, k, v, tiles, self._scoring)

    def gradients(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_at: Tensor, k_at: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the gradients of `q`, `k` and `v`, or None where no query sees any of the keys.

        Args:
            d_out, out: [B, H, Sq, Dv], of all keys that the queries see anywhere.
            lse: [B, H, Sq], likewise.
            q, k, v, q_at, k_at: as of `attend`.
        """
        tiles = self._tiles(q, k, q_at, k_at)
        return None if tiles is None else attend_backward(d_out, q, k, v, out, lse, tiles, self._scoring)

    def _tiles(self, q: Tensor, k: Tensor, q_at: Tensor, k_at: Tensor) -> Tiles | None:
        if not q.numel() or not k.numel():
            return None
        tiles = self._mask.tiles(q_at, k_at)
        return tiles if tiles.kinds.any() else None


class LocalKeys:
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
        grads = self._local.gradients(d_out, q, k, v, out, lse, self._q_tokens, self._k_tokens)
        return grads or (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))


def nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of queries that see no key."""
    lse = torch.full(q.shape[:3], -torch.inf, dtype=precise(q.dtype), device=q.device)
    return q.new_zeros(*q.shape[:3], v.shape[-1]), lse


def precise(dtype: torch.dtype) -> torch.dtype:
    """The type in which parts of a result are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Visit = Callable[[int, Tensor], "Tensor | None"]


class Ring:
    """Attention with keys and values that travel; a `Core`.

    Args:
        local: the attention.
        split: who holds which tokens; the last of `groups` runs fastest in it.
        groups: one ring, or an outer and an inner one.
        device: of all tensors.
    """

    def __init__(self, local: Local, split: TokenSplit, groups: Sequence[TensorGroup], device: torch.device) -> None:
        self._local, self._split, self._groups, self._device = local, split, groups, device
        self._home = [group.index for group in groups]
        self._home_tokens = self._tokens(self._part(self._home))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        shapes, dtype = _Shapes(k, v), precise(q.dtype)
        merged: tuple[Tensor, Tensor] | None = None

        def visit(part: int, block: Tensor) -> None:
            nonlocal merged
            keys, values = shapes.unpacked(block, self._split.lengths[part])
            attended = self._local.attend(q, keys, values, self._home_tokens, self._tokens(part))
            if attended is not None:
                attended = attended[0].to(dtype), attended[1]
                merged = attended if merged is None else merge(*merged, *attended)

        self._travel(0, self._home, shapes.packed(k, v, k.dtype), shapes, visit)
        return merged or nothing(q, v)

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        shapes, dtype = _Shapes(k, v), precise(q.dtype)
        dq = torch.zeros_like(q, dtype=dtype)

        def visit(part: int, block: Tensor) -> Tensor:
            length = self._split.lengths[part]
            keys, values = shapes.unpacked(block, length)
            grads = self._local.gradients(d_out, q, keys, values, out, lse, self._home_tokens, self._tokens(part))
            if grads is None:
                return torch.zeros_like(block, dtype=dtype)
            dq.add_(grads[0])
            return shapes.packed(*grads[1:], dtype)

        gradient = self._travel(0, self._home, shapes.packed(k, v, k.dtype), shapes, visit)
        assert gradient is not None
        return dq, *shapes.unpacked(gradient, k.shape[2])

    def _travel(self, level: int, at: list[int], block: Tensor, shapes: _Shapes, visit: Visit) -> Tensor | None:
        """Let the blocks of a ring, and of the rings in it, visit this rank.

        Args:
            level: which of the rings.
            at: whose block is here: an index in each ring.
            block: keys and values.
            shapes: of the blocks.
            visit: is called with each block's part and the block; returns its gradients or, always, None.

        Returns:
            The sum of what all ranks of these rings returned for the block that was here first.
        """
        if level == len(self._groups):
            return visit(self._part(at), block)
        group = self._groups[level]
        gradients: Hop | None = None
        for step in range(group.size):
            here, following = self._moved(at, level, step), self._moved(at, level, step + 1)
            length = shapes.elements(self._split.lengths[self._part(following)])
            blocks = Hop(group, block, (length,)) if step + 1 < group.size else None
            gradient = self._travel(level + 1, here, block, shapes, visit)
            if gradient is not None and group.size > 1:
                if gradients is not None:
                    gradient.add_(gradients.wait())
                gradients = Hop(group, gradient, (length,))
            if blocks is not None:
                block = blocks.wait()
        return gradient if gradients is None else gradients.wait()

    def _moved(self, at: list[int], level: int, steps: int) -> list[int]:
        """The indices, one in each ring, of the rank whose block is here after some steps of one ring."""
        return [*at[:level], (at[level] - steps) % self._groups[level].size, *at[level + 1 :]]

    def _part(self, at: list[int]) -> int:
        part = 0
        for index, group in zip(at, self._groups, strict=True):
            part = part * group.size + index
        return part

    def _tokens(self, part: int) -> Tensor:
        return self._split.indices(part, self._device)


class _Shapes:
    """Packs keys and values, or their gradients, into one buffer."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._batch, self._heads, _, self._width = k.shape
        self._value_width = v.shape[-1]

    def elements(self, length: int) -> int:
        """Elements of the buffer for some tokens: at least one, because nothing cannot be sent."""
        return max(self._batch * self._heads * length * (self._width + self._value_width), 1)

    def packed(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, G, S_rank, D] and [B, G, S_rank, Dv] -> one dim."""
        if not k.numel():
            return k.new_zeros(1, dtype=dtype)
        return torch.cat([k.reshape(-1).to(dtype), v.reshape(-1).to(dtype)])

    def unpacked(self, block: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """One dim -> [B, G, S_rank, D] and [B, G, S_rank, Dv], views."""
        rows = self._batch * self._heads * length
        k = block[: rows * self._width].view(self._batch, self._heads, length, self._width)
        v = block[rows * self._width : rows * (self._width + self._value_width)]
        return k, v.view(self._batch, self._heads, length, self._value_width)
