"""A sequence whose tokens lie on several ranks, as the division of a tensor that acts as the whole.

Each context parallel rank holds the tokens that a `TokenSplit` gives it, in ascending order; where tensor parallel
ranks divide these among themselves (``sequence_parallel``), each of them holds a stretch of its rank's tokens.

**Gradients.** A value outside of the layers is whole on all ranks, and so is its gradient. A rank's part of a divided
value has R times the gradient that it would have in one process, R being the context parallel degree. So the gradient
of a parameter that worked on parts is R times what this rank's tokens say, that of a parameter that worked on whole
values is the true one, and for both, and for what is used either way, the *mean* over the R ranks is the true gradient:
that is how gradients are reduced (`Ownership.gradient_weight`), once a step. Where a whole value becomes parts or parts
become a whole, the factor is put in or taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.sharded.collectives import TensorGroup, copy
from lightning_mm5d.sharded.tensor import Sharded, from_local
from lightning_mm5d.sharded.token_split import TokenSplit


@dataclass(eq=False)
class Holders:
    """Who holds the parts of sequences.

    Attributes:
        ranks: those with parts: context parallel ranks, or with ``sequence_parallel`` the tensor parallel ranks of each
            of them, which run fastest.
        degree: context parallel degree, R.
        tensor: this rank's tensor parallel ranks, where they divide its tokens; else None.
        averages: whether the gradient of a leaf is that of a parameter whose mean over ranks is taken in the end.
        finer: those with `tensor`, where there are tensor parallel ranks and these are without.
        coarser: those without, where these are with.
    """

    ranks: TensorGroup
    degree: int
    averages: Callable[[Tensor], bool]
    tensor: TensorGroup | None = None
    finer: Holders | None = None
    coarser: Holders | None = None


class ShardedSequence:
    """A split of one dim over ranks; stands as ``group`` in the division of a `Sharded`.

    Args:
        split: the tokens of each of ``holders.ranks``.
        holders: who they are.
    """

    def __init__(self, split: TokenSplit, holders: Holders) -> None:
        self.split, self.holders = split, holders
        self.factor = holders.degree
        self._views: dict[Any, ShardedSequence] = {}
        self.index, self.size = holders.ranks.index, holders.ranks.size
        parts = split.ranges[self.index]
        self._run = parts[0] if len(parts) == 1 else None  # tokens that are neighbours need no copy

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return self.split.lengths

    # --- what a divided tensor asks of its group ---

    def part(self, whole: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """This rank's part of a whole tensor, perhaps a view."""
        if self._run is not None:
            return whole.narrow(dim, self._run[0], self._run[1] - self._run[0])
        return whole.index_select(dim, self.split.indices(self.index, whole.device))

    def gather(self, part: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """The whole, in the order of tokens."""
        found = self.holders.ranks.gather(part, dim, lengths)
        return found if self._in_order else found.index_select(dim, self.split.order(part.device))

    def copied(self, x: Tensor) -> Tensor:
        """What is whole on every rank, for work on parts."""
        if x.is_leaf and self.holders.averages(x):
            return x if self.holders.tensor is None else copy(x, self.holders.tensor)
        return _Copied.apply(x, self)

    def scattered(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """This rank's part of a whole value; the gradient is that of all parts, gathered."""
        return _Scattered.apply(x, dim, self)

    def gathered(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """The whole, for work that all ranks do alike; each takes its part's gradient."""
        return _Gathered.apply(x, dim, self)

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks of what each computed of its part, whole on every rank."""
        return _Total.apply(x, self)

    def merged(self, count: int) -> ShardedSequence:
        """`count` sequences of this kind in a row, as one."""
        size = self.split.size

        def make() -> TokenSplit:
            parts = self.split.ranges
            rows = range(count)
            ranges = [[(row * size + a, row * size + b) for row in rows for a, b in part] for part in parts]
            return TokenSplit.of(ranges, count * size)

        return self if count == 1 else self._view(("merged", count), make, self)

    def unmerged(self, count: int) -> ShardedSequence | None:
        """The sequence of which this is `count` in a row; None where it is not."""
        return self if count == 1 else self._views.get(("of", count))

    def narrowed(self, start: int, stop: int) -> tuple[ShardedSequence, slice]:
        """The tokens from `start` to `stop` alone, and where they are in this rank's part."""

        def make() -> TokenSplit:
            ranges = [
                [(max(a, start) - start, min(b, stop) - start) for a, b in part if max(a, start) < min(b, stop)]
                for part in self.split.ranges
            ]
            return TokenSplit.of(ranges, stop - start)

        own = self.split.ranges[self.index]
        first = sum(max(0, min(b, start) - a) for a, b in own)
        found = self._view(("narrowed", start, stop), make)
        return found, slice(first, first + found.lengths[self.index])

    def description(self) -> Any:
        """Plain values from which a peer makes the same sequence."""
        return [self.split.size, [list(map(list, part)) for part in self.split.ranges]]

    # --- tensor parallel ranks that divide a context parallel rank's tokens ---

    def local(self, x: Sharded) -> Tensor:
        """This context parallel rank's tokens of `x`: plain, or a `Sharded` over its tensor parallel ranks."""
        tensor = self.holders.tensor
        return x.part if tensor is None else from_local(x.part, x.sharded_dim, self.own_lengths, tensor)

    def wrapped(self, x: Tensor, dim: int) -> Sharded:
        """Undo `local`, for what was computed of it: divided along `dim`, which is negative."""
        part = x.part if isinstance(x, Sharded) else x
        return from_local(part, dim, self.lengths, self)

    @cached_property
    def finer(self) -> ShardedSequence:
        """The same with each context parallel rank's tokens divided over its tensor parallel ranks."""
        finer = self.holders.finer
        if finer is None:
            return self
        return ShardedSequence(refined(self.split, finer.ranks.size // finer.degree), finer)

    @cached_property
    def whole_of_rank(self) -> ShardedSequence:
        """The same with each context parallel rank's tokens whole on its tensor parallel ranks."""
        return self if self.holders.coarser is None else ShardedSequence(self.coarse, self.holders.coarser)

    @cached_property
    def coarse(self) -> TokenSplit:
        """The tokens of each context parallel rank."""
        count = self.size // self.holders.degree
        if count == 1:
            return self.split
        parts = self.split.ranges
        rows = [parts[first : first + count] for first in range(0, len(parts), count)]
        return TokenSplit.of([[piece for part in row for piece in part] for row in rows], self.split.size)

    @property
    def own_size(self) -> int:
        """Tokens of this context parallel rank."""
        return sum(self.own_lengths)

    @cached_property
    def own_lengths(self) -> tuple[int, ...]:
        """Tokens of each tensor parallel rank of this context parallel rank."""
        count = self.size // self.holders.degree
        first = self.index - self.index % count
        return self.lengths[first : first + count]

    @cached_property
    def _in_order(self) -> bool:
        rows = [piece for part in self.split.ranges for piece in part]
        return rows == sorted(rows)

    def _view(self, key: Any, make: Callable[[], TokenSplit], base: ShardedSequence | None = None) -> ShardedSequence:
        # one object for one view, so that tensors of it work together
        if key not in self._views:
            self._views[key] = ShardedSequence(make(), self.holders)
            if base is not None:
                self._views[key]._views["of", key[1]] = base
        return self._views[key]


def refined(split: TokenSplit, parts: int) -> TokenSplit:
    """The split with each rank's tokens cut into `parts` stretches of tokens, whose lengths differ by at most one."""
    if parts == 1:
        return split
    ranges: list[list[tuple[int, int]]] = []
    for part, length in zip(split.ranges, split.lengths, strict=True):
        wanted = [length // parts + (index < length % parts) for index in range(parts)]
        pieces = list(part)
        for want in wanted:
            taken: list[tuple[int, int]] = []
            while want:
                start, stop = pieces.pop(0)
                end = min(stop, start + want)
                taken.append((start, end))
                want -= end - start
                if end < stop:
                    pieces.insert(0, (end, stop))
            ranges.append(taken)
    return TokenSplit.of(ranges, split.size)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: ShardedSequence) -> Tensor:
        ctx.holders = sequence.holders
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.holders.ranks.sum(gradient[0]) / ctx.holders.degree, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sequence: ShardedSequence) -> Tensor:
        ctx.dim, ctx.sequence = dim, sequence
        part = sequence.part(x, dim, sequence.lengths)
        # never a view: it may be written to, and lets go of the whole
        return part.clone(memory_format=torch.contiguous_format) if part._is_view() else part

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        sequence = ctx.sequence
        whole = sequence.gather(gradient[0], ctx.dim, sequence.lengths)
        return whole / sequence.holders.degree, None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sequence: ShardedSequence) -> Tensor:
        ctx.dim, ctx.sequence = dim, sequence
        return sequence.gather(x, dim, sequence.lengths)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        sequence = ctx.sequence
        return sequence.part(gradient[0], ctx.dim, sequence.lengths) * sequence.holders.degree, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: ShardedSequence) -> Tensor:
        ctx.degree = sequence.holders.degree
        return sequence.holders.ranks.sum(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient[0] * ctx.degree, None
