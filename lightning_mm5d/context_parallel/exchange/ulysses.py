"""Heads for tokens: from all heads of a rank's tokens to a rank's heads of all tokens, and back; and what moves for it.

DeepSpeed-Ulysses (Jacobs et al. 2023), with numbers of heads and tokens that need not divide. Query heads are assigned
in order; ranks beyond their number have none and still take part. Each rank gets the key heads that its query heads
read: several ranks get the same one where there are few, and its gradients are summed. Where a rank's query heads do
not read its key heads in equal shares, key heads are repeated so that each query head has its own.

Among the inner ranks of a hybrid (USP, Fang and Zhao 2024) "all tokens" are those of the inner ranks together; a ring
does the rest.

`Gather` and `SumScattered`, of another mode, post a transfer when they are made; ``wait`` returns what has arrived. All
ranks of a group make the same transfers in the same order, ranks without tokens included.

Tokens come first in what is sent: a token's heads and width then lie next to each other, and putting tokens into the
order of the sequence is one indexed copy of long rows.

Shapes: B batch, H query heads, G key heads, N heads of either kind, S tokens of all ranks, S_rank of one, D width,
R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mm5d.layout.layout import even_ranges
from lightning_mm5d.sharded.collectives import TensorGroup, Wait
from lightning_mm5d.sharded.sequence import Range, TokenSplit


def tokens_first(x: Tensor) -> Tensor:
    """[B, N, S, D] -> [S, B, N, D], a view."""
    return x.permute(2, 0, 1, 3)


def heads_first(rows: Tensor) -> Tensor:
    """[S, B, N, D] -> [B, N, S, D], a view."""
    return rows.permute(1, 2, 0, 3)


class Gather:
    """Collects a tensor of all tokens from the parts of all ranks.

    Args:
        group: the ranks.
        part: this rank's tokens, [B, N, S_rank, D].
        split: who holds which tokens.
    """

    def __init__(self, group: TensorGroup, part: Tensor, split: TokenSplit) -> None:
        self._split = split
        self._rows = group.start_gather(tokens_first(part), 0, split.lengths)

    def wait(self) -> Tensor:
        """Return the tensor, [B, N, S, D]."""
        return heads_first(self._split.ordered(self._rows(), 0))


class SumScattered:
    """Sums a tensor of all tokens over ranks; each gets its own tokens.

    Args:
        group: the ranks.
        whole: this rank's summand, [B, N, S, D].
        split: who gets which tokens.
        dtype: in which it is summed.
    """

    def __init__(self, group: TensorGroup, whole: Tensor, split: TokenSplit, dtype: torch.dtype) -> None:
        self._rows = group.start_sum_scattered(split.parted(tokens_first(whole), 0).to(dtype), 0, split.lengths)

    def wait(self) -> Tensor:
        """Return the sum for this rank's tokens, [B, N, S_rank, D]."""
        return heads_first(self._rows())


def within(split: TokenSplit, size: int, index: int) -> TokenSplit:
    """The split of the tokens of one group of `size` ranks over these ranks, counted among these tokens."""
    if size == split.ranks:
        return split

    def make() -> TokenSplit:
        ranks = split.ranges[index * size : (index + 1) * size]
        parts: list[list[Range]] = [[] for _ in ranks]
        at = 0
        for start, end, rank in sorted((*tokens, rank) for rank, part in enumerate(ranks) for tokens in part):
            parts[rank].append((at, at + end - start))
            at += end - start
        return TokenSplit.of(parts, at)

    return split.cached(("within", size, index), make)


class Heads:
    """The division of heads over ranks, and the way there and back.

    Args:
        group: the ranks.
        split: of the tokens over these ranks.
        queries: H.
        keys: G.

    Attributes:
        query_heads: this rank's query heads.
        repeats: whether some key head goes to several ranks.
    """

    def __init__(self, group: TensorGroup, split: TokenSplit, queries: int, keys: int) -> None:
        self._group, self._split = group, split
        ratio = queries // keys
        self._queries: list[Range] = even_ranges(queries, group.size)
        self._keys: list[Range] = [(a // ratio, -(-b // ratio)) if b > a else (0, 0) for a, b in self._queries]
        self._totals = queries, keys
        self.repeats = sum(b - a for a, b in self._keys) > keys
        start, end = self._queries[group.index]
        first, last = self._keys[group.index]
        self.query_heads = slice(start, end)
        reads = [head // ratio - first for head in range(start, end)]  # of each own query head, its key head
        count = last - first
        is_even = count == 0 or (len(reads) % count == 0 and reads == sorted([*range(count)] * (len(reads) // count)))
        self._reads = None if is_even else reads

    def enter(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Tensor]:
        """Exchange tokens for heads.

        Args:
            queries: values of query heads, each [B, H, S_rank, D].
            keys: values of key heads, each [B, G, S_rank, D].

        Returns:
            Of each, in this order, this rank's heads, [B, N, S, D].
        """
        posted = [self._post_heads(x, self._queries) for x in queries]
        posted += [self._post_heads(x, self._keys) for x in keys]
        local_heads = []
        for x, (transfer, heads) in zip((*queries, *keys), posted, strict=True):
            rows = transfer().view(self._split.size, x.shape[0], heads, x.shape[3])
            local_heads.append(heads_first(self._split.ordered(rows, 0)))
        if self._reads is not None:
            for index in range(len(queries), len(local_heads)):
                local_heads[index] = torch.cat([local_heads[index][:, head : head + 1] for head in self._reads], 1)
        return local_heads

    def leave(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Tensor]:
        """Exchange heads for tokens.

        Args:
            queries: values of this rank's query heads, each [B, N, S, D].
            keys: gradients of this rank's key heads, each [B, N, S, D]; those of heads on several ranks are summed.

        Returns:
            Of each, in this order, all heads of this rank's tokens: [B, H, S_rank, D] or [B, G, S_rank, D].
        """
        posted = [self._post_tokens(x, self._queries) for x in queries]
        posted += [self._post_tokens(self._summed(x), self._keys) for x in keys]
        tokens = self._split.lengths[self._group.index]
        rank_tokens = []
        for index, (x, transfer) in enumerate(zip((*queries, *keys), posted, strict=True)):
            is_key = index >= len(queries)
            ranges, batch, width = self._keys if is_key else self._queries, x.shape[0], x.shape[3]
            received = transfer().split([tokens * batch * (b - a) * width for a, b in ranges])
            parts = [part.view(tokens, batch, b - a, width) for part, (a, b) in zip(received, ranges, strict=True)]
            if is_key and self.repeats:
                rows = x.new_zeros(tokens, batch, self._totals[1], width)
                for part, (a, b) in zip(parts, ranges, strict=True):
                    rows[:, :, a:b] += part
            else:
                rows = torch.cat(parts, 2)
            rank_tokens.append(heads_first(rows))
        return rank_tokens

    def _post_heads(self, x: Tensor, ranges: Sequence[Range]) -> tuple[Wait, int]:
        """Post each rank's heads of this rank's tokens; return the number of this rank's heads as well."""
        batch, _, tokens, width = x.shape
        first, last = ranges[self._group.index]
        sent = torch.cat([tokens_first(x[:, a:b]).reshape(-1) for a, b in ranges])
        send = [tokens * batch * (b - a) * width for a, b in ranges]
        receive = [length * batch * (last - first) * width for length in self._split.lengths]
        return self._group.start_all_to_all(sent, send, receive), last - first

    def _post_tokens(self, x: Tensor, ranges: Sequence[Range]) -> Wait:
        """Post each rank's tokens of this rank's heads."""
        batch, heads, _, width = x.shape
        tokens = self._split.lengths[self._group.index]
        send = [length * batch * heads * width for length in self._split.lengths]
        receive = [tokens * batch * (b - a) * width for a, b in ranges]
        sent = self._split.parted(tokens_first(x), 0).reshape(-1)
        return self._group.start_all_to_all(sent, send, receive)

    def _summed(self, x: Tensor) -> Tensor:
        """Return the gradients of key heads, given those of their repetitions."""
        if self._reads is None:
            return x
        first, last = self._keys[self._group.index]
        total = x.new_zeros(x.shape[0], last - first, *x.shape[2:])
        for index, head in enumerate(self._reads):
            total[:, head] += x[:, index]
        return total
