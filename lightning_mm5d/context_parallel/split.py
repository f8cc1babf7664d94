"""Which tokens of a sequence each context parallel rank holds.

A split is a plain description, the same on every rank: for each rank the ranges of its tokens. ``uniform`` gives one
stretch each; ``zigzag`` one from either end, which balances a causal mask; ``makespan_min`` looks at the mask: blocks
of queries are dealt out by the (query, key) pairs that the mask allows them (makespan.py), as Cornstarch does for masks
of multimodal sequences.

Equal splits are the same object, so whatever is computed for one can be kept under its identity.

It refuses nothing at run time; assertions are for bugs of this library.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_mm5d.context_parallel.makespan import deal

Range = tuple[int, int]
Distribution = Literal["uniform", "zigzag", "makespan_min"]

BLOCK = 128
LEAST_BLOCKS = 4  # per rank: with fewer there is little to choose from, and blocks get smaller

_known: weakref.WeakValueDictionary[tuple[int, tuple[tuple[Range, ...], ...]], Split] = weakref.WeakValueDictionary()
_making = threading.Lock()


@dataclass(frozen=True, eq=False)
class Split:
    """The tokens of each rank. Make one with `Split.of`: equal splits that are alive together are one object.

    Attributes:
        ranges: per rank its ascending half-open ranges of tokens, adjacent ones joined; a rank may have none.
        size: tokens of the whole sequence, S. Each is with exactly one rank.
    """

    ranges: tuple[tuple[Range, ...], ...]
    size: int
    _kept: dict[object, Tensor] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def of(ranges: Sequence[Sequence[Sequence[int]]], size: int) -> Split:
        """The split with these ranges: ascending per rank and without overlaps; empty and adjacent ones are fine."""
        joined = tuple(_joined(part) for part in ranges)
        with _making:
            found = _known.get((size, joined))
            if found is None:
                found = Split(joined, size)
                found._check()
                _known[size, joined] = found
            return found

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
        return tuple(sum(end - start for start, end in part) for part in self.ranges)

    def indices(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """int64 ``[S_rank]``: the tokens of a rank, ascending. Kept per device: do not write to it."""
        return self._keep(("indices", rank), device, lambda: _tokens(self.ranges[rank]))

    def order(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 ``[S]``: where each token is when the parts of all ranks stand in a row, so that
        ``torch.cat(parts)[order]`` is the sequence. Kept per device: do not write to it."""

        def inverse() -> Tensor:
            row = torch.cat([_tokens(part) for part in self.ranges])
            return torch.empty_like(row).scatter_(0, row, torch.arange(self.size, device="cpu"))

        return self._keep("order", device, inverse)

    def _keep(self, name: object, device: torch.device | str, make: Callable[[], Tensor]) -> Tensor:
        where = (name, torch.device(device))
        if where not in self._kept:
            with torch.inference_mode(False):  # autograd may meet it later
                self._kept[where] = make().to(device)
        return self._kept[where]

    def _check(self) -> None:
        tokens = sorted(token_range for part in self.ranges for token_range in part)
        ends = [0, *(end for _, end in tokens)]
        assert ends == [*(start for start, _ in tokens), self.size], (self.ranges, self.size)
        assert all(start < end for start, end in tokens), self.ranges
        assert all(list(part) == sorted(part) for part in self.ranges), self.ranges


def uniform(size: int, ranks: int) -> Split:
    """One stretch of tokens each, in order of the ranks; lengths differ by at most one."""
    return Split.of([[stretch] for stretch in pairwise(_cuts(size, ranks))], size)


def zigzag(size: int, ranks: int) -> Split:
    """Of 2R stretches, rank i takes number i from either end; tokens per rank differ by at most one."""
    stretches = list(pairwise(_cuts(size, 2 * ranks)))
    return Split.of([[stretches[rank], stretches[-1 - rank]] for rank in range(ranks)], size)


def balanced(work: Tensor | Sequence[int], size: int, ranks: int, block: int = BLOCK) -> Split:
    """Blocks of tokens, dealt out so that the busiest rank has little work.

    Args:
        work: of each block, a whole number, ``[ceil(size / block)]``.
        size: tokens, S.
        ranks: R.
        block: tokens of a block; the last one may have fewer.
    """
    blocks = [(start, min(start + block, size)) for start in range(0, size, block)]
    costs = work.tolist() if isinstance(work, Tensor) else list(work)
    assert len(costs) == len(blocks), (len(costs), size, block)
    return _dealt(blocks, costs, ranks, size)


def by_items(lengths: Sequence[int], costs: Sequence[int], ranks: int) -> Split:
    """Whole items (images, frames, clips of audio), dealt out by their costs; none is cut.

    Args:
        lengths: tokens of each item, in the order in which they stand in the sequence.
        costs: of each item, whole numbers.
        ranks: R. With fewer items than ranks some ranks have none.
    """
    assert len(lengths) == len(costs), (len(lengths), len(costs))
    cuts = [0, *accumulate(lengths)]
    return _dealt(list(pairwise(cuts)), costs, ranks, cuts[-1])


def distribute(how: Distribution, size: int, ranks: int, mask_work: Callable[[int], Tensor]) -> Split:
    """The split that a configuration asks for. Equal masks give the same object without dealing out again.

    Args:
        how: ``uniform``, ``zigzag`` or ``makespan_min``.
        size: tokens, S.
        ranks: R.
        mask_work: int64 work of each block of as many queries as it is called with (a power of two, at most `BLOCK`);
            called for ``makespan_min`` only.
    """
    if how != "makespan_min":
        return _plain(how, size, ranks)
    block = block_of(size, ranks)
    work = mask_work(block)
    assert work.dtype == torch.int64, work.dtype
    return _balanced(size, ranks, block, work.cpu().numpy().tobytes())


def block_of(size: int, ranks: int) -> int:
    """Tokens of a block: `BLOCK`, or the largest power of two that gives each rank `LEAST_BLOCKS`, but at least 1."""
    block = BLOCK
    while block > 1 and -(-size // block) < LEAST_BLOCKS * ranks:
        block //= 2
    return block


@lru_cache(maxsize=64)
def _plain(how: Literal["uniform", "zigzag"], size: int, ranks: int) -> Split:
    return uniform(size, ranks) if how == "uniform" else zigzag(size, ranks)


@lru_cache(maxsize=64)
def _balanced(size: int, ranks: int, block: int, work: bytes) -> Split:
    return balanced(np.frombuffer(work, np.int64).tolist(), size, ranks, block)


def _dealt(pieces: Sequence[Range], costs: Sequence[int], ranks: int, size: int) -> Split:
    """Whole pieces, in order, to the ranks that `deal` finds for them."""
    parts: list[list[Range]] = [[] for _ in range(ranks)]
    for piece, rank in zip(pieces, deal(costs, [end - start for start, end in pieces], ranks), strict=True):
        parts[rank].append(piece)
    return Split.of(parts, size)


def _cuts(size: int, parts: int) -> list[int]:
    """Where `parts` consecutive parts begin and end; the first ones are one longer where the size does not divide."""
    length, more = divmod(size, parts)
    return [index * length + min(index, more) for index in range(parts + 1)]


def _joined(part: Sequence[Sequence[int]]) -> tuple[Range, ...]:
    joined: list[Range] = []
    for start, end in part:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif start < end:
            joined.append((start, end))
    return tuple(joined)


def _tokens(part: Sequence[Range]) -> Tensor:
    """The tokens of ascending ranges, on CPU whatever the default device is."""
    starts, ends = torch.tensor(part, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    lengths = ends - starts
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device="cpu") + (starts - before).repeat_interleave(lengths)
