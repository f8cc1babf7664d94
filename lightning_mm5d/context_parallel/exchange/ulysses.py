"""Heads for tokens: from all heads of a rank's tokens to a rank's heads of all tokens, and back.

DeepSpeed-Ulysses (Jacobs et al. 2023), with numbers of heads and tokens that need not divide. Query heads are assigned
in order; ranks beyond their number have none and still take part. Each rank gets the key heads that its query heads
read: several ranks get the same one where there are few, and its gradients are summed. Where a rank's query heads do
not read its key heads in equal shares, key heads are repeated so that each query head has its own.

Among the inner ranks of a hybrid (USP, Fang and Zhao 2024) "all tokens" are those of the inner ranks together; a ring
does the rest.

Shapes: B batch, H query heads, G key heads, N heads of either kind, S tokens of all ranks, S_rank of one, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor

from lightning_mm5d.context_parallel.exchange.transfers import AllToAll, Places, heads_first, tokens_first
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.sequence import TokenSplit

Range = tuple[int, int]


def joined(split: TokenSplit, size: int) -> TokenSplit:
    """The split of the same tokens over groups of `size` ranks in a row."""
    if size == 1:
        return split

    def make() -> TokenSplit:
        groups = [split.ranges[start : start + size] for start in range(0, split.ranks, size)]
        return TokenSplit.of([sorted(chain(*group)) for group in groups], split.size)

    return split.kept(("joined", size), make)


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

    return split.kept(("within", size, index), make)


class Heads:
    """The division of heads over ranks, and the way there and back.

    Args:
        group: the ranks.
        split: of the tokens over these ranks.
        queries: H.
        keys: G.

    Attributes:
        own: this rank's query heads.
        repeats: whether some key head goes to several ranks.
    """

    def __init__(self, group: TensorGroup, split: TokenSplit, queries: int, keys: int) -> None:
        self._group, self._split = group, split
        least, more = divmod(queries, group.size)
        cuts = [rank * least + min(rank, more) for rank in range(group.size + 1)]
        ratio = queries // keys
        self._queries: list[Range] = list(pairwise(cuts))
        self._keys: list[Range] = [(a // ratio, -(-b // ratio)) if b > a else (0, 0) for a, b in self._queries]
        self._totals = queries, keys
        self.repeats = sum(b - a for a, b in self._keys) > keys
        start, end = self._queries[group.index]
        first, last = self._keys[group.index]
        self.own = slice(start, end)
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
        places = Places.of(self._split, (*queries, *keys)[0].device, is_padded=False)
        found = []
        for x, (transfer, heads) in zip((*queries, *keys), posted, strict=True):
            rows = transfer.wait().view(self._split.size, x.shape[0], heads, x.shape[3])
            found.append(heads_first(places.ordered(rows)))
        if self._reads is not None:
            for index in range(len(queries), len(found)):
                found[index] = torch.cat([found[index][:, head : head + 1] for head in self._reads], 1)
        return found

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
        own = self._split.lengths[self._group.index]
        found = []
        for index, (x, transfer) in enumerate(zip((*queries, *keys), posted, strict=True)):
            is_key = index >= len(queries)
            ranges, batch, width = self._keys if is_key else self._queries, x.shape[0], x.shape[3]
            received = transfer.wait().split([own * batch * (b - a) * width for a, b in ranges])
            parts = [part.view(own, batch, b - a, width) for part, (a, b) in zip(received, ranges, strict=True)]
            if is_key and self.repeats:
                rows = x.new_zeros(own, batch, self._totals[1], width)
                for part, (a, b) in zip(parts, ranges, strict=True):
                    rows[:, :, a:b] += part
            else:
                rows = torch.cat(parts, 2)
            found.append(heads_first(rows))
        return found

    def _post_heads(self, x: Tensor, ranges: Sequence[Range]) -> tuple[AllToAll, int]:
        """Post each rank's heads of this rank's tokens; return the number of this rank's heads as well."""
        batch, _, own, width = x.shape
        first, last = ranges[self._group.index]
        sent = torch.cat([tokens_first(x[:, a:b]).reshape(-1) for a, b in ranges])
        send = [own * batch * (b - a) * width for a, b in ranges]
        receive = [length * batch * (last - first) * width for length in self._split.lengths]
        return AllToAll(self._group, sent, send, receive), last - first

    def _post_tokens(self, x: Tensor, ranges: Sequence[Range]) -> AllToAll:
        """Post each rank's tokens of this rank's heads."""
        batch, heads, _, width = x.shape
        places = Places.of(self._split, x.device, is_padded=False)
        own = self._split.lengths[self._group.index]
        send = [length * batch * heads * width for length in self._split.lengths]
        receive = [own * batch * (b - a) * width for a, b in ranges]
        return AllToAll(self._group, places.parted(tokens_first(x)).reshape(-1), send, receive)

    def _summed(self, x: Tensor) -> Tensor:
        """Return the gradients of key heads, given those of their repetitions."""
        if self._reads is None:
            return x
        first, last = self._keys[self._group.index]
        total = x.new_zeros(x.shape[0], last - first, *x.shape[2:])
        for index, head in enumerate(self._reads):
            total[:, head] += x[:, index]
        return total
