"""Which tokens of a sequence each rank of a group holds.

A `TokenSplit` is plain data and the same on every rank: for each rank the ranges of its tokens. Results that depend on
a split alone live on it (`kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_mm5d.sharded.host_copies import on_device

Range = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class TokenSplit:
    """The tokens of each rank. Make one with `TokenSplit.of`.

    Attributes:
        ranges: per rank its ascending half-open ranges of tokens, adjacent ones joined; a rank may have none.
        size: tokens of the whole sequence, S. Each is with exactly one rank.
    """

    ranges: tuple[tuple[Range, ...], ...]
    size: int
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.ranges, self.size))

    @staticmethod
    def of(ranges: Sequence[Sequence[Sequence[int]]], size: int) -> TokenSplit:
        """The split with these ranges: ascending per rank and without overlaps; empty and adjacent ones are fine."""
        split = TokenSplit(tuple(_joined(held) for held in ranges), size)
        split._check()
        return split

    @property
    def key(self) -> tuple[tuple[Range, ...], ...]:
        """What tells splits of one size apart: plain integers, the same on every rank and in every process."""
        return self.ranges

    @property
    def ranks(self) -> int:
        """Number of ranks, R."""
        return len(self.ranges)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(end - start for start, end in held) for held in self.ranges)

    def indices(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """int64 ``[S_rank]``: the tokens of a rank, ascending. Kept per device: do not write to it."""
        return self.kept(("indices", rank, torch.device(device)), lambda: on_device(_tokens(self.ranges[rank]), device))

    def order(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 ``[S]``: where each token is when the tokens of all ranks stand in a row, so that
        ``torch.cat(locals)[order]`` is the sequence. Kept per device: do not write to it."""

        def inverse() -> Tensor:
            row = torch.cat([_tokens(held) for held in self.ranges])
            order = torch.empty_like(row).scatter_(0, row, torch.arange(self.size, device="cpu"))
            return on_device(order, device)

        return self.kept(("order", torch.device(device)), inverse)

    def kept(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` made of this split the first time, for as long as the split lives."""
        if name not in self._kept:
            with torch.inference_mode(False):  # autograd may meet it later
                self._kept[name] = make()
        result: T = self._kept[name]
        return result

    def _check(self) -> None:
        tokens = sorted(token_range for held in self.ranges for token_range in held)
        ends = [0, *(end for _, end in tokens)]
        assert ends == [*(start for start, _ in tokens), self.size], (self.ranges, self.size)
        assert all(start < end for start, end in tokens), self.ranges
        assert all(list(held) == sorted(held) for held in self.ranges), self.ranges


def _joined(held: Sequence[Sequence[int]]) -> tuple[Range, ...]:
    joined: list[Range] = []
    for start, end in held:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif start < end:
            joined.append((start, end))
    return tuple(joined)


def _tokens(held: Sequence[Range]) -> Tensor:
    """The tokens of ascending ranges, on CPU with any default device."""
    starts, ends = torch.tensor(held, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    lengths = ends - starts
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device="cpu") + (starts - before).repeat_interleave(lengths)
