"""What moves between context parallel ranks while something else is computed.

Each class posts its transfer when it is made; ``wait`` returns what has arrived. Buffers live as long as the object,
which gloo needs. All ranks of a group make the same transfers in the same order, ranks without tokens included.

Tokens come first in what is sent: a token's heads and width then lie next to each other, and putting tokens into the
order of the sequence is one indexed copy of long rows.

Shapes: B batch, N heads, S tokens of the sequence, D width, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.renamed import all_gather_single, reduce_scatter_single
from lightning_mm5d.sharded.sequence import TokenSplit


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
        return split.kept(("places", is_padded, device), lambda: Places._make_of(split, device, is_padded))

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
            None if torch.equal(rows, same) else rows.to(device),
            None if torch.equal(tokens, same) else tokens.to(device),
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
        self._own = rows.contiguous()
        self._rows = rows.new_empty(group.size * longest, *rows.shape[1:])
        self._work = all_gather_single(self._rows, self._own, group=group.group, async_op=True)
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
        self._own = places.parted(tokens_first(whole)).to(dtype).contiguous()
        self._length = split.lengths[group.index]
        self._part = self._own.new_empty(max(split.lengths), *self._own.shape[1:])
        self._work = reduce_scatter_single(self._part, self._own, group=group.group, async_op=True)
        group.moved += self._own.nbytes * (group.size - 1) / group.size

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
