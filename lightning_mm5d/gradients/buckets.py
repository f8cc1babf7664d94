"""Buckets: gradients that travel in one message, which is summed over its group in one collective.

A flag for each gradient travels with it, so that one that no rank has stays None. The message of a group's last bucket
also says whether a rank got more of a gradient after it was sent.

`SummedBucket` gives all its ranks the sum. `ScatteredBucket` gives each rank of a block the rows that it owns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.data_parallel.scatter_gather import ScatteredSum
from lightning_mm5d.data_parallel.shared_parameters import SharedParameter
from lightning_mm5d.plan.compressions import Traffic
from lightning_mm5d.plan.sums import Rows
from lightning_mm5d.sharded.compressed_collectives import CompressedScatter, CompressedSum
from lightning_mm5d.sharded.compression import Compression


class Piece(NamedTuple):
    """A parameter, or rows of it, as they are packed; one for all its segments, since ranks may cut them otherwise.

    Attributes:
        parameter: as it is on this rank.
        rows: None for all of it.
        weight: what its gradient is multiplied by in the sum.
        number: of the parameter, the same on all ranks.
        shared: what this rank owns of it; None where all is summed on all ranks.
        traffic: how its gradients travel.
    """

    parameter: nn.Parameter
    rows: Rows | None
    weight: float
    number: int
    shared: SharedParameter | None = None
    traffic: Traffic = Traffic()

    @property
    def numel(self) -> int:
        """Number of elements of these rows."""
        if self.rows is None:
            return self.parameter.numel()
        length = sum(segment.length for segment in self.rows.segments)
        return self.parameter.numel() // max(self.parameter.shape[self.rows.dim], 1) * length

    @property
    def size(self) -> int:
        """Bytes of its gradient."""
        numel = self.numel if self.shared is None else torch.Size(self.shared.shape).numel()
        return numel * self.parameter.element_size()

    def read(self, weight: float) -> list[Tensor]:
        """Return what this rank adds to the sum, times `weight`, as flat tensors of `numel` elements."""
        grad = self.parameter.grad
        if grad is None:
            return [self.parameter.new_zeros(self.numel)]
        found = [grad] if self.rows is None else self.rows.of(grad)
        return [rows.reshape(-1) if weight == 1.0 else rows.reshape(-1) * weight for rows in found]

    def write(self, rows: Rows, flat: Tensor) -> None:
        """Take the sum as the gradient of `rows`."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        found = rows.of(self.parameter.grad)
        for own, total in zip(found, flat.split([own.numel() for own in found]), strict=True):
            own.copy_(total.view_as(own))


Draw = Callable[[Sequence[Piece]], int]


class Sum(Protocol):
    """A message that is under way."""

    def advance(self) -> None:
        """Free what is needed no longer; waits for nobody."""

    def summed(self) -> None:
        """Wait for the first of two sums, and start the second one."""

    def wait(self) -> Tensor:
        """Return the sum as a flat tensor, with the flags at its end."""


class Bucket(ABC):
    """Gradients that travel in one message.

    Args:
        pieces: of one dtype and compression, in one order on all ranks.
        is_late: whether it is sent at the end of all backwards, also where its gradients are there earlier.
        draw: gives a seed for random rounding, the same on all ranks.
    """

    def __init__(self, pieces: Sequence[Piece], *, is_late: bool, draw: Draw) -> None:
        self.pieces, self.is_late = pieces, is_late
        self._compression, self._draw = pieces[0].traffic.gradients, draw
        self._all_there: Tensor | None = None

    @torch.no_grad()
    def start(self, *, more: bool) -> Sum:
        """Take the gradients out of their parameters, and start to sum them.

        Args:
            more: whether this rank got more of a gradient that the group sums already.
        """
        present = [piece.parameter.grad is not None for piece in self.pieces]
        started = self._start(self._flags(present, more=more))
        for piece in self.pieces:
            if piece.rows is None:
                piece.parameter.grad = None
        return started

    @abstractmethod
    def _start(self, flags: Tensor) -> Sum: ...

    @abstractmethod
    def take(self, total: Tensor, flags: Sequence[float], rows: dict[int, Tensor]) -> None:
        """Set the gradients of the parameters, or put those of owned rows into `rows` by the parameter's identity.

        Args:
            total: the sum, without flags.
            flags: how many ranks have each gradient, which only has to differ from zero.
            rows: of shared parameters.
        """

    def _flags(self, present: list[bool], *, more: bool) -> Tensor:
        first = self.pieces[0].parameter
        if more or not all(present):
            return torch.tensor([*present, more], dtype=first.dtype, device=first.device)
        if self._all_there is None or self._all_there.device != first.device:
            self._all_there = torch.tensor([*present, False], dtype=first.dtype, device=first.device)
        return self._all_there


class SummedBucket(Bucket):
    """Gradients that are summed in one all-reduce.

    Args:
        pieces: as for `Bucket`.
        group: over which they are summed.
        is_late: as for `Bucket`.
        draw: as for `Bucket`.
    """

    def __init__(self, pieces: Sequence[Piece], group: dist.ProcessGroup, *, is_late: bool, draw: Draw) -> None:
        super().__init__(pieces, is_late=is_late, draw=draw)
        self._group = group
        self._common = pieces[0].weight if len({piece.weight for piece in pieces}) == 1 else None
        self._numels = [piece.numel for piece in pieces]

    def _start(self, flags: Tensor) -> Sum:
        packed: list[Tensor] = []
        for piece in self.pieces:
            grad, weight = piece.parameter.grad, 1.0 if self._common is not None else piece.weight
            if grad is not None and piece.rows is None and weight == 1.0:  # most of them, and there may be thousands
                packed.append(grad.reshape(-1))
            else:
                packed += piece.read(weight)
        flat = torch.cat([*packed, flags])
        flat = flat if self._common in (None, 1.0) else flat.mul_(self._common)
        if self._compression is None:
            return _AllReduced(flat, self._group)
        return _Compressed(
            CompressedSum(flat, self._group, self._compression, exact=flags.numel(), seed=self._draw(self.pieces))
        )

    def take(self, total: Tensor, flags: Sequence[float], rows: dict[int, Tensor]) -> None:
        for piece, flag, part in zip(self.pieces, flags, total.split(self._numels), strict=True):
            if flag and piece.rows is None:
                piece.parameter.grad = part.view_as(piece.parameter)  # a view: the bucket is not copied
            elif flag and piece.rows is not None:
                piece.write(piece.rows, part)


class ScatteredBucket(Bucket):
    """Gradients of shared parameters, which are scattered within a block, and summed over the blocks.

    Args:
        pieces: as for `Bucket`, shared by the same ranks.
        block: the ranks that share.
        across: the ranks that own the same rows; None where there is one.
        is_late: as for `Bucket`.
        draw: as for `Bucket`.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        block: dist.ProcessGroup,
        across: dist.ProcessGroup | None,
        *,
        is_late: bool,
        draw: Draw,
    ) -> None:
        super().__init__(pieces, is_late=is_late, draw=draw)
        self._block, self._across = block, across
        self._own = [(piece, piece.shared) for piece in pieces if piece.shared is not None]

    def _start(self, flags: Tensor) -> Sum:
        chunks = []
        for place in range(self._block.size()):
            for piece, shared in self._own:
                gradient = piece.parameter.grad
                if gradient is None:
                    chunks.append(flags.new_zeros(shared.numel_at(place)))
                else:
                    part = shared.shard.rows(gradient, place).reshape(-1)
                    chunks.append(part if piece.weight == 1.0 else part * piece.weight)
            chunks.append(flags)
        lengths = [
            len(self._own) + 1 + sum(one.numel_at(at) for _, one in self._own) for at in range(self._block.size())
        ]
        parts, compression, exact = torch.cat(chunks).split(lengths), self._compression, flags.numel()
        if compression is None:
            return _Scattered(ScatteredSum(parts, self._block), _summing(self._across))
        seed = self._draw(self.pieces)
        scattered = CompressedScatter(parts, self._block, compression, exact=exact, seed=seed)
        return _Scattered(scattered, _summing(self._across, compression, exact, seed))

    def take(self, total: Tensor, flags: Sequence[float], rows: dict[int, Tensor]) -> None:
        lengths = [shared.numel_at(shared.shard.place) for _, shared in self._own]
        for (piece, shared), flag, part in zip(self._own, flags, total.split(lengths), strict=True):
            if flag:
                rows[id(piece.parameter)] = part.view(shared.own.shape)


class _AllReduced:
    def __init__(self, flat: Tensor, group: dist.ProcessGroup) -> None:
        self._flat = flat
        self._work: Any = dist.all_reduce(flat, group=group, async_op=True)

    def advance(self) -> None:
        """There is nothing to free."""

    def summed(self) -> None:
        """There is one sum."""

    def wait(self) -> Tensor:
        self._work.wait()
        return self._flat


class _Compressed:
    def __init__(self, total: CompressedSum) -> None:
        self._total = total

    def advance(self) -> None:
        """There is nothing to free."""

    def summed(self) -> None:
        self._total.gather()

    def wait(self) -> Tensor:
        return self._total.wait()


def _summing(
    group: dist.ProcessGroup | None, compression: Compression | None = None, exact: int = 0, seed: int | None = None
) -> Callable[[Tensor], Sum] | None:
    """How rows are summed over `group`."""
    if group is None:
        return None
    if compression is None:
        return lambda flat: _AllReduced(flat, group)
    return lambda flat: _Compressed(CompressedSum(flat, group, compression, exact=exact, seed=seed))


class _Scattered:
    def __init__(self, scattered: ScatteredSum | CompressedScatter, across: Callable[[Tensor], Sum] | None) -> None:
        self._scattered, self._across = scattered, across
        self._flat: Tensor | None = None
        self._work: Sum | None = None

    def advance(self) -> None:
        self._scattered.free()

    def summed(self) -> None:
        self._flat = self._scattered.wait()
        if self._across is not None:
            self._work = self._across(self._flat)

    def wait(self) -> Tensor:
        assert self._flat is not None, "summed within the block first"
        return self._flat if self._work is None else self._work.wait()


def cut_into_buckets(pieces: Sequence[Piece], most_bytes: int, most: int) -> Iterator[list[Piece]]:
    """Yield `pieces` in lists of at most `most`, and of at most `most_bytes` where they have several."""
    found, size = list[Piece](), 0
    for piece in pieces:
        if found and (len(found) == most or size + piece.size > most_bytes):
            yield found
            found, size = [], 0
        found.append(piece)
        size += piece.size
    if found:
        yield found
