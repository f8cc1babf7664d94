"""Heads for tokens: from all heads of a rank's tokens to a rank's heads of all tokens, and back; and what moves for it.

DeepSpeed-Ulysses (Jacobs et al. 2023), with numbers of heads and tokens that need not divide. Query heads are assigned
in order; ranks beyond their number have none and still take part. Each rank gets the key heads that its query heads
read: several ranks get the same one where there are few, and its gradients are summed. Where a rank's query heads do
not read its key heads in equal shares, key heads are repeated so that each query head has its own.

Among the inner ranks of a hybrid (USP, Fang and Zhao 2024) "all tokens" are those of the inner ranks together; a ring
does the rest.

`Gather`, `SumScattered` and `AllToAll`, also of the other modes, post a transfer when they are made; ``wait`` returns
what has arrived. Buffers live as long as the object, which gloo needs. All ranks of a group make the same transfers in
the same order, ranks without tokens included.

Tokens come first in what is sent: a token's heads and width then lie next to each other, and putting tokens into the
order of the sequence is one indexed copy of long rows.

Shapes: B batch, H query heads, G key heads, N heads of either kind, S tokens of all ranks, S_rank of one, D width,
R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.data.lazy import on_device
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.sequence import TokenSplit
from lightning_mm5d.sharded.torch_internals import all_gather_single, reduce_scatter_single


class Places(NamedTuple):
    """Where the tokens of a sequence are among the parts of all ranks in a row. None stands for the same order.

    Attributes:
        rows: of each token, its row among the parts, [S].
        tokens: of each row, its token, [rows]; of a row that fills up a part, any.
    """

    rows: Tensor | None
    tokens: Tensor | None

    @staticmethod
    def of(split: TokenSplit, device: torch.device, *, is_padded: bool) -> Places:
        """Return the places of tokens in the parts of `split`, each filled up to the longest where `is_padded`."""
        return split.cached(("places", is_padded, device), lambda: Places._make_of(split, device, is_padded))

    @staticmethod
    def _make_of(split: TokenSplit, device: torch.device, is_padded: bool) -> Places:
        longest, parts, starts, start = max(split.lengths), [], [], 0
        for rank, length in enumerate(split.lengths):
            filled = longest if is_padded else length
            part = torch.zeros(filled, dtype=torch.int64)
            part[:length] = split.indices(rank)
            parts.append(part)
            starts.append(torch.arange(start, start + length))
            start += filled
        tokens, rows = torch.cat(parts), torch.cat(starts)[split.order()]
        same = torch.arange(split.size)
        return Places(
            None if torch.equal(rows, same) else on_device(rows, device),
            None if torch.equal(tokens, same) else on_device(tokens, device),
        )

    def ordered(self, rows: Tensor) -> Tensor:
        """Return the sequence [S, ...] of the parts one after the other, [rows, ...]; a view where it can."""
        return rows if self.rows is None else rows.index_select(0, self.rows)

    def parted(self, sequence: Tensor) -> Tensor:
        """Return the parts one after the other, [rows, ...], of the sequence [S, ...]; a view where it can."""
        return sequence if self.tokens is None else sequence.index_select(0, self.tokens)


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
        self._group, self._split = group, split
        rows, longest = tokens_first(part), max(split.lengths)
        if len(rows) < longest:
            filled = rows.new_empty(longest, *rows.shape[1:])
            filled[: len(rows)] = rows
            rows = filled
        self._sent = rows.contiguous()
        self._rows = rows.new_empty(group.size * longest, *rows.shape[1:])
        self._work = all_gather_single(self._rows, self._sent, group=group.group, async_op=True)
        group.moved += self._rows.nbytes * (group.size - 1) / group.size

    def wait(self) -> Tensor:
        """Return the tensor, [B, N, S, D]."""
        self._group.wait(self._work)
        places = Places.of(self._split, self._rows.device, is_padded=True)
        return heads_first(places.ordered(self._rows)[: self._split.size])


class SumScattered:
    """Sums a tensor of all tokens over ranks; each gets its own tokens.

    Args:
        group: the ranks.
        whole: this rank's summand, [B, N, S, D].
        split: who gets which tokens.
        dtype: in which it is summed.
    """

    def __init__(self, group: TensorGroup, whole: Tensor, split: TokenSplit, dtype: torch.dtype) -> None:
        self._group = group
        places = Places.of(split, whole.device, is_padded=True)
        self._sent = places.parted(tokens_first(whole)).to(dtype).contiguous()
        self._length = split.lengths[group.index]
        self._part = self._sent.new_empty(max(split.lengths), *self._sent.shape[1:])
        self._work = reduce_scatter_single(self._part, self._sent, group=group.group, async_op=True)
        group.moved += self._sent.nbytes * (group.size - 1) / group.size

    def wait(self) -> Tensor:
        """Return the sum for this rank's tokens, [B, N, S_rank, D]."""
        self._group.wait(self._work)
        return heads_first(self._part[: self._length])


class AllToAll:
    """Sends a piece to each rank and receives one from each.

    Args:
        group: the ranks.
        sent: all pieces, one after the other, in one dim.
        send: elements for each rank.
        receive: elements from each rank.
    """

    def __init__(self, group: TensorGroup, sent: Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        self._group, self._sent, self._received = group, sent, sent.new_empty(sum(receive))
        self._work = dist.all_to_all_single(
            self._received, sent, list(receive), list(send), group=group.group, async_op=True
        )
        group.moved += (sum(send) - send[group.index]) * sent.element_size()

    def wait(self) -> Tensor:
        """Return the pieces received, one after the other, in one dim."""
        self._group.wait(self._work)
        return self._received


Range = tuple[int, int]


def joined(split: TokenSplit, size: int) -> TokenSplit:
    """The split of the same tokens over groups of `size` ranks in a row."""
    if size == 1:
        return split

    def make() -> TokenSplit:
        groups = [split.ranges[start : start + size] for start in range(0, split.ranks, size)]
        return TokenSplit.of([sorted(chain(*group)) for group in groups], split.size)

    return split.cached(("joined", size), make)


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
        least, more = divmod(queries, group.size)
        cuts = [rank * least + min(rank, more) for rank in range(group.size + 1)]
        ratio = queries // keys
        self._queries: list[Range] = list(pairwise(cuts))
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
        places = Places.of(self._split, (*queries, *keys)[0].device, is_padded=False)
        local_heads = []
        for x, (transfer, heads) in zip((*queries, *keys), posted, strict=True):
            rows = transfer.wait().view(self._split.size, x.shape[0], heads, x.shape[3])
            local_heads.append(heads_first(places.ordered(rows)))
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
            received = transfer.wait().split([tokens * batch * (b - a) * width for a, b in ranges])
            parts = [part.view(tokens, batch, b - a, width) for part, (a, b) in zip(received, ranges, strict=True)]
            if is_key and self.repeats:
                rows = x.new_zeros(tokens, batch, self._totals[1], width)
                for part, (a, b) in zip(parts, ranges, strict=True):
                    rows[:, :, a:b] += part
            else:
                rows = torch.cat(parts, 2)
            rank_tokens.append(heads_first(rows))
        return rank_tokens

    def _post_heads(self, x: Tensor, ranges: Sequence[Range]) -> tuple[AllToAll, int]:
        """Post each rank's heads of this rank's tokens; return the number of this rank's heads as well."""
        batch, _, tokens, width = x.shape
        first, last = ranges[self._group.index]
        sent = torch.cat([tokens_first(x[:, a:b]).reshape(-1) for a, b in ranges])
        send = [tokens * batch * (b - a) * width for a, b in ranges]
        receive = [length * batch * (last - first) * width for length in self._split.lengths]
        return AllToAll(self._group, sent, send, receive), last - first

    def _post_tokens(self, x: Tensor, ranges: Sequence[Range]) -> AllToAll:
        """Post each rank's tokens of this rank's heads."""
        batch, heads, _, width = x.shape
        places = Places.of(self._split, x.device, is_padded=False)
        tokens = self._split.lengths[self._group.index]
        send = [length * batch * heads * width for length in self._split.lengths]
        receive = [tokens * batch * (b - a) * width for a, b in ranges]
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
