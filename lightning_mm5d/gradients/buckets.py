"""Buckets: gradients that travel in one message, which is summed over its group in one collective.

`SummedBucket` sums gradients in the memory where backwards have added them, and gives all its ranks the sum.
`RowsBucket` does so with rows of gradients. `ScatteredBucket` gives each rank of a block the rows that it owns.

**Memory.** The gradients of a bucket are views of one flat tensor, which is kept over steps. Backwards add to these
views, so gradients are not copied into a message, and no second copy of them exists. A view that no backward has added
to is no gradient: its version tells, which autograd counts up in host memory.

A flat tensor is used again when nobody holds a view of it. Gradients that are kept over steps stay as they are, and the
bucket gets other memory.

A stream of the device for messages, beside the one that computes; without CUDA there is one order for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import private
from lightning_mm5d.data_parallel.main_parameters import gradient_dtype
from lightning_mm5d.data_parallel.shared_parameters import ScatteredSum, SharedParameter
from lightning_mm5d.plan.plan import Traffic
from lightning_mm5d.plan.sums import Rows
from lightning_mm5d.sharded.collectives import Encoding


class SideStream:
    """The side stream of one rank.

    Args:
        device: where the rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Enter where messages are packed and sent: after what was computed so far, beside what comes."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def reads(self, tensor: Tensor) -> None:
        """Note that the side stream reads a tensor that is let go of before it has done so."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def join(self, results: Iterable[Tensor]) -> None:
        """Let what is computed from now on come after the side stream, and use its `results`."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for result in results:
            result.record_stream(current)


_ALIGNED = 16  # bytes; kernels over many tensors are slow where one begins elsewhere
_holders = private(torch._C, "_storage_Use_Count")


class Flat:
    """Gradients of `parameters` in one flat tensor.

    Args:
        parameters: of one dtype, in one order on all ranks.
        side: the stream on which `pack` and `pack_apart` are called.

    Attributes:
        views: the gradients that `lay` or `pack` has placed.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], side: SideStream) -> None:
        self._parameters, self._side = parameters, side
        unit = max(_ALIGNED // gradient_dtype(parameters[0]).itemsize, 1)
        self._starts = [*accumulate((-(-parameter.numel() // unit) * unit for parameter in parameters), initial=0)]
        # contiguous on all ranks, however a rank lays out a parameter
        self._strides = [torch.empty(parameter.shape, device="meta").stride() for parameter in parameters]
        self._memory: Tensor | None = None
        self.views: list[Tensor] = []

    def lay(self) -> None:
        """Give each parameter without a gradient its view, before a backward."""
        if not self.views or all(parameter.grad is None for parameter in self._parameters):
            self._begin()
        for parameter, view in zip(self._parameters, self.views, strict=True):
            if parameter.grad is None and view._version == 0:
                parameter.grad = view

    def leave(self) -> None:
        """Take back the views that no backward has added to."""
        for parameter, view in zip(self._parameters, self.views, strict=False):
            if parameter.grad is view and view._version == 0:
                parameter.grad = None

    def pack(self) -> tuple[Tensor, list[bool]]:
        """Take the gradients out of their parameters; return all of them, and which of them were there."""
        self.leave()
        gradients = [parameter.grad for parameter in self._parameters]
        if not self.views:
            self._begin()
        assert self._memory is not None
        targets, sources = [], []
        for index, (gradient, view) in enumerate(zip(gradients, self.views, strict=True)):
            start = self._memory.data_ptr() + self._starts[index] * self._memory.element_size()
            is_elsewhere = view.data_ptr() != start and view.numel() > 0  # after `p.grad.data = ...` of a hook
            if is_elsewhere:
                view = self.views[index] = self._cut(self._memory, index)
            if gradient is None and (view._version or is_elsewhere):
                view.zero_()  # somebody has dropped this gradient after a backward
            elif gradient is not None and gradient is not view:
                targets.append(view)
                sources.append(gradient)
                self._side.reads(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        for parameter in self._parameters:
            parameter.grad = None
        return self._memory, [gradient is not None for gradient in gradients]

    def pack_apart(self) -> tuple[Tensor, list[Tensor]]:
        """Take the gradients out of their parameters; return them in memory of their own, and its views."""
        assert self._memory is not None
        memory = torch.zeros_like(self._memory)
        views = self._cut_all(memory)
        for parameter, view in zip(self._parameters, views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                self._side.reads(parameter.grad)
            parameter.grad = None
        return memory, views

    def take(self) -> list[Tensor]:
        """Return the views; from now on only the caller holds them."""
        views, self.views = self.views, []
        return views

    def release(self) -> None:
        """Let go of the memory, which lives as long as somebody holds a gradient in it."""
        self._memory, self.views = None, []

    def _begin(self) -> None:
        """Have memory that is zero and that nobody else holds, and views of it."""
        self.views = []
        first = self._parameters[0]
        if self._memory is not None and self._memory.device == first.device and not _is_held(self._memory):
            self._memory.zero_()
        else:
            self._memory = None  # before there is another one
            self._memory = torch.zeros(self._starts[-1], dtype=gradient_dtype(first), device=first.device)
        self.views = self._cut_all(self._memory)

    def _cut_all(self, memory: Tensor) -> list[Tensor]:
        return [self._cut(memory, index) for index in range(len(self._parameters))]

    def _cut(self, memory: Tensor, index: int) -> Tensor:
        shape = self._parameters[index].shape
        # detached from the flat tensor, so that each counts its own version
        return memory.as_strided(shape, self._strides[index], self._starts[index]).data


def _is_held(memory: Tensor) -> bool:
    """Whether any tensor but `memory` has its storage."""
    storage = memory.untyped_storage()
    return bool(_holders(storage._cdata) > 2)  # the tensor and `storage`


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
        return numel * gradient_dtype(self.parameter).itemsize

    def read(self, rows: Rows) -> list[Tensor]:
        """Return the gradient of `rows` as flat tensors, times the weight."""
        grad = self.parameter.grad
        if grad is None:
            return [self.parameter.new_zeros(self.numel, dtype=gradient_dtype(self.parameter))]
        return [part.reshape(-1) if self.weight == 1.0 else part.reshape(-1) * self.weight for part in rows.of(grad)]

    def write(self, rows: Rows, flat: Tensor) -> None:
        """Take the sum as the gradient of `rows`."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter, dtype=gradient_dtype(self.parameter))
        parts = rows.of(self.parameter.grad)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))


Draw = Callable[[Sequence[Piece]], int]


class Sum(Protocol):
    """A message that is under way."""

    @property
    def copies(self) -> bool:
        """Whether it holds copies of gradients, as until its first sum is there."""

    def advance(self) -> bool:
        """Start what comes after it and free what is needed no longer, if no rank must be waited for.

        Returns:
            Whether its second sum, if it has one, is under way.
        """

    def summed(self) -> None:
        """Wait for the first of two sums, and start the second one."""

    def wait(self) -> Tensor:
        """Return the sum as a flat tensor."""


class Bucket(ABC):
    """Gradients that travel in one message.

    Args:
        pieces: of one dtype and encoding, in one order on all ranks.
        group: over which they are summed.
        side: the stream on which messages are packed.
        draw: gives a seed for random rounding, the same on all ranks.

    Attributes:
        came: numbers of the parameters that had a gradient when it started.
        flat: the memory to which backwards add; None where that is no part of a message.
    """

    def __init__(self, pieces: Sequence[Piece], group: dist.ProcessGroup, *, side: SideStream, draw: Draw) -> None:
        self.pieces, self._group = pieces, group
        self.came: list[int] = []
        self.flat: Flat | None = None
        self._encoding, self._side, self._draw = pieces[0].traffic.gradients, side, draw
        self._common = pieces[0].weight if len({piece.weight for piece in pieces}) == 1 else None

    def _seed(self) -> int:
        """Return a seed for random rounding, where anything is rounded so."""
        return 0 if self._encoding is None else self._draw(self.pieces)

    @abstractmethod
    def start(self) -> Sum:
        """Take the gradients out of their parameters, and start to sum them."""

    def start_again(self) -> Sum:
        """Do the same with what backwards have added since `start`."""
        return self.start()

    @abstractmethod
    def take(self, total: Tensor, there: Container[int], rows: dict[int, Tensor]) -> None:
        """Set the gradients of the parameters, or put those of owned rows into `rows` by the parameter's identity.

        Args:
            total: the sum.
            there: numbers of the parameters that have a gradient on any rank.
            rows: of shared parameters.
        """


class SummedBucket(Bucket):
    """Gradients that are summed in one all-reduce, in memory that is kept over steps.

    Args:
        pieces: as for `Bucket`, of whole parameters.
        group: over which they are summed.
        side: as for `Bucket`.
        draw: as for `Bucket`.
    """

    def __init__(self, pieces: Sequence[Piece], group: dist.ProcessGroup, *, side: SideStream, draw: Draw) -> None:
        super().__init__(pieces, group, side=side, draw=draw)
        self.flat = self._flat = Flat([piece.parameter for piece in pieces], side)

    def start(self) -> Sum:
        flat, there = self._flat.pack()
        self.came = [piece.number for piece, is_there in zip(self.pieces, there, strict=True) if is_there]
        if self._common is None:
            torch._foreach_mul_(self._flat.views, [piece.weight for piece in self.pieces])
        return self._sum(flat)

    def start_again(self) -> Sum:
        flat, views = self._flat.pack_apart()
        if self._common is None:
            torch._foreach_mul_(views, [piece.weight for piece in self.pieces])
        return self._sum(flat)

    def _sum(self, flat: Tensor) -> Sum:
        flat = flat if self._common in (None, 1.0) else flat.mul_(self._common)
        return _summed(flat, self._group, self._encoding, self._seed())

    def take(self, total: Tensor, there: Container[int], rows: dict[int, Tensor]) -> None:
        for piece, view in zip(self.pieces, self._flat.take(), strict=True):
            piece.parameter.grad = _laid_out(view, piece.parameter) if piece.number in there else None


def _laid_out(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a gradient in the memory format of its parameter: fused optimizers read both as flat memory."""
    if parameter.is_contiguous():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


class RowsBucket(Bucket):
    """Rows of gradients that are summed in one all-reduce, when all backwards are over.

    Args:
        pieces: as for `Bucket`, of rows.
        group: over which they are summed.
        side: as for `Bucket`.
        draw: as for `Bucket`.
    """

    def __init__(self, pieces: Sequence[Piece], group: dist.ProcessGroup, *, side: SideStream, draw: Draw) -> None:
        super().__init__(pieces, group, side=side, draw=draw)
        self._rows = [(piece, piece.rows) for piece in pieces if piece.rows is not None]

    def start(self) -> Sum:
        self.came = [piece.number for piece in self.pieces if piece.parameter.grad is not None]
        flat = torch.cat([part for piece, rows in self._rows for part in piece.read(rows)])
        return _summed(flat, self._group, self._encoding, self._seed())

    def take(self, total: Tensor, there: Container[int], rows: dict[int, Tensor]) -> None:
        parts = total.split([piece.numel for piece, _ in self._rows])
        for (piece, piece_rows), part in zip(self._rows, parts, strict=True):
            if piece.number in there:
                piece.write(piece_rows, part)


class ScatteredBucket(Bucket):
    """Gradients of shared parameters, which are scattered within a block, and summed over the blocks.

    Args:
        pieces: as for `Bucket`, shared by the same ranks.
        group: the ranks that share, a block.
        across: the ranks that own the same rows, with no other messages than these sums; None where there is one.
        side: as for `Bucket`.
        draw: as for `Bucket`.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        group: dist.ProcessGroup,
        across: dist.ProcessGroup | None,
        *,
        side: SideStream,
        draw: Draw,
    ) -> None:
        super().__init__(pieces, group, side=side, draw=draw)
        self._across = across
        self._shared_pieces = [(piece, piece.shared) for piece in pieces if piece.shared is not None]
        self._numels = [[shared.numel_at(place) for _, shared in self._shared_pieces] for place in range(group.size())]

    def start(self) -> Sum:
        self.came = [piece.number for piece in self.pieces if piece.parameter.grad is not None]
        if self._shared_pieces[0][1].shows_rows:  # on all ranks: tokens came to the rows that this rank owns
            return self._summed_rows()
        sent = self._packed()
        lengths = [sum(numels) for numels in self._numels]
        seed, encoding = self._seed(), self._encoding
        if encoding is None:
            scattered = ScatteredSum(sent, lengths, self._group)
        else:
            scattered = encoding.scattered(sent.split(lengths), self._group, seed)
        return _Scattered(scattered, _summing(self._across, encoding, seed))

    def _packed(self) -> Tensor:
        """What each rank of the block is sent, by rank and parameter; each gradient is freed when it is copied."""
        first, count = self.pieces[0].parameter, len(self._shared_pieces)
        sent = torch.empty(sum(map(sum, self._numels)), dtype=gradient_dtype(first), device=first.device)
        parts = sent.split([numel for numels in self._numels for numel in numels])
        for index, (piece, shared) in enumerate(self._shared_pieces):
            targets, gradient = parts[index::count], piece.parameter.grad
            piece.parameter.grad = None
            if gradient is None:
                torch._foreach_zero_(targets)
                continue
            rows = [shared.shard.rows(gradient, place) for place in range(len(targets))]
            torch._foreach_copy_([target.view(part.shape) for target, part in zip(targets, rows, strict=True)], rows)
            if self._common is None:
                torch._foreach_mul_(targets, piece.weight)
            self._side.reads(gradient)
        return sent if self._common in (None, 1.0) else sent.mul_(self._common)

    def _summed_rows(self) -> Sum:
        parts = list[Tensor]()
        for piece, _ in self._shared_pieces:
            gradient, piece.parameter.grad = piece.parameter.grad, None
            if gradient is None:
                gradient = torch.zeros_like(piece.parameter, dtype=gradient_dtype(piece.parameter))
            parts.append(gradient.reshape(-1) * piece.weight)
            self._side.reads(gradient)
        # the sum over blocks begins in its turn among those of other buckets, which wait for what they scatter
        return _Scattered(_OwnRows(torch.cat(parts)), _summing(self._across, self._encoding, self._seed()))

    def take(self, total: Tensor, there: Container[int], rows: dict[int, Tensor]) -> None:
        parts = total.split([shared.numel_at(shared.shard.place) for _, shared in self._shared_pieces])
        for (piece, shared), part in zip(self._shared_pieces, parts, strict=True):
            if piece.number in there:
                rows[id(piece.parameter)] = part.view(shared.own_rows.shape)


class _OwnRows:
    """Rows that nobody else has gradients of: there is nothing to scatter."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def is_there(self) -> bool:
        """They are here."""
        return True

    def wait(self) -> Tensor:
        return self._flat


class _AllReduced:
    copies = False

    def __init__(self, flat: Tensor, group: dist.ProcessGroup) -> None:
        self._flat = flat
        self._work: Any = dist.all_reduce(flat, group=group, async_op=True)

    def advance(self) -> bool:
        """There is nothing to free."""
        return True

    def summed(self) -> None:
        """There is one sum."""

    def wait(self) -> Tensor:
        self._work.wait()
        return self._flat


def _summed(flat: Tensor, group: dist.ProcessGroup, encoding: Encoding | None, seed: int) -> Sum:
    """Start to sum a flat tensor in place."""
    return _AllReduced(flat, group) if encoding is None else encoding.summed(flat, group, seed)


def _summing(group: dist.ProcessGroup | None, encoding: Encoding | None, seed: int) -> Callable[[Tensor], Sum] | None:
    """How rows are summed over `group`."""
    return None if group is None else lambda flat: _summed(flat, group, encoding, seed)


class _Scattered:
    def __init__(self, scattered: ScatteredSum | _OwnRows, across: Callable[[Tensor], Sum] | None) -> None:
        self._scattered, self._across = scattered, across
        self._flat: Tensor | None = None
        self._work: Sum | None = None

    @property
    def copies(self) -> bool:
        return self._flat is None

    def advance(self) -> bool:
        if self._scattered.is_there():
            self.summed()
        return self._flat is not None

    def summed(self) -> None:
        if self._flat is None:
            self._flat = self._scattered.wait()
            if self._across is not None:
                self._work = self._across(self._flat)

    def wait(self) -> Tensor:
        self.summed()
        assert self._flat is not None
        return self._flat if self._work is None else self._work.wait()


def cut_into_buckets(pieces: Sequence[Piece], most_bytes: int, most: int) -> Iterator[list[Piece]]:
    """Yield `pieces` in lists of at most `most`, and of at most `most_bytes` where they have several."""
    bucket, size = list[Piece](), 0
    for piece in pieces:
        if bucket and (len(bucket) == most or size + piece.size > most_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += piece.size
    if bucket:
        yield bucket
