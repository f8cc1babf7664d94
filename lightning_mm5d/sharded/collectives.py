"""Collectives of a tensor parallel group, each with the backward that tensor parallelism needs.

A value is *replicated* (equal on all ranks, and so is its gradient), *sharded* (each rank has a shard along one dim) or
*partial* (the ranks' values add up to it). Each function says what follows for gradients; torch's own differentiable
collectives have other backwards.

Shards may be of unequal lengths: shorter ones travel padded.

A feature may have numbers travel in another way (`Encoding`). All ranks get the same replicated values to the bit then,
too.

Which backend carries tensors between ranks, where its messages live, and which rank warns for all.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_mm5d.sharded.remote_value import same_origin
from lightning_mm5d.sharded.removable import meanwhile
from lightning_mm5d.sharded.torch_internals import (
    all_gather_single,
    is_held_once,
    is_observed,
    is_view,
    reduce_scatter_single,
)


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the backend that carries tensors of `device`, in lower case; None where the group has none.

    Args:
        device: of the tensors.
        group: that this rank is in; None for the default group. It may have one backend for each kind of device, as
            ``cpu:gloo,cuda:nccl``.
    """
    pairs = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return pairs.get(device.type)


def message_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where messages of a group live: on `device`, or in host memory, which is what gloo carries.

    Args:
        device: where this rank computes.
        group: that this rank is in; None for the default group.
    """
    return torch.device("cpu") if backend_of(device, group) in (None, "gloo") else device


def carried(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return `x` as messages of a group are: without gaps, and on a device that one of its backends carries.

    Args:
        x: on any device; NCCL carries none of host memory.
        group: that this rank is in; None for the default group.
    """
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return (x if x.device.type in kinds else x.to(kinds[0])).contiguous()


def waits_on_device(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a device waits for messages by itself; with gloo the host does, and each group has its threads.

    Where devices wait, ranks must issue the messages of all their groups in one order.

    Args:
        device: of the tensors.
        group: as for `backend_of`.
    """
    return backend_of(device, group) not in (None, "gloo")


def of_all_ranks(local: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return what the ranks of a group have, ``[ranks, ...]``; collective.

    Args:
        local: what this rank has, of the same shape and dtype on all of them, where messages of the group live.
        group: as for `backend_of`.
    """
    everywhere = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, local, group)
    return torch.stack(everywhere)


def warn_on_first_rank(message: str) -> None:
    """Warn on rank 0, or in a process without other ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(message, stacklevel=3)


OfTensor = Callable[[Tensor], Tensor]
Wait = Callable[[], Tensor]  # waits for a collective, once, and returns its result


class Encoding(Protocol):
    """How a feature has numbers travel between ranks in another way than as they are.

    Those that are equal, and as text too, have numbers travel in one way. What a collective returns has started.
    """

    def changes(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of `dtype` travel in another way."""

    def group(self, group: dist.ProcessGroup) -> TensorGroup:
        """Return the ranks of `group`, whose sums, gathers and exchanges are encoded."""

    def summed(self, flat: Tensor, group: dist.ProcessGroup, seed: int) -> Any:
        """Sum a flat tensor in place; return a `gradients.buckets.Sum`. The seed is the same on all ranks."""

    def scattered(self, chunks: Sequence[Tensor], group: dist.ProcessGroup, seed: int) -> Any:
        """Sum chunks to the rank of each, as a `ScatteredSum` of `data_parallel`, which returns a flat one."""

    def gathered(self, local: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Any:
        """Gather flat tensors, as a `Gathered` of `data_parallel`; all ranks get equal ones, the owner too."""

    def encoded(self, meta: Any, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return a payload as it travels."""

    def decoded(self, meta: Any, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return the payload that has been encoded."""


class TensorGroup:
    """The ranks that share each layer of one stage.

    Args:
        group: their process group.

    Attributes:
        group: the process group.
        size: number of ranks.
        index: of this rank among them.
        factor: 1, since a local tensor has the gradient of its entries of the full one.
        moved: bytes that this rank has sent in a ring: ``2 (n - 1) / n`` of what is summed, ``(n - 1) / n`` of what is
            gathered or summed and scattered.
        is_silent: whether collectives return values of the right shape without communicating; for runs on one rank
            that only ask for shapes.
        hand_over: called between the start of a collective and the wait for it, so that something else is computed
            meanwhile; the same on all ranks of the group. None just waits.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.factor = 1
        self.size = dist.get_world_size(group)
        self.index = dist.get_rank(group)
        self.moved = 0.0
        self.is_silent = False
        self.hand_over: Callable[[], None] | None = None

    def wait(self, *works: Any) -> None:
        """Wait for what has been started on the group, after `hand_over`."""
        if self.hand_over is not None:
            self.hand_over()
        for work in works:
            work.wait()

    def sum(self, tensor: Tensor, *, in_place: bool = False) -> Tensor:
        """Return the sum over ranks.

        Args:
            tensor: the summand.
            in_place: lets the sum take the memory of `tensor`, which is then of no use; else `tensor` stays as it is.
        """
        return self.start_sum(tensor, in_place=in_place)()

    def start_sum(self, tensor: Tensor, *, in_place: bool = False) -> Wait:
        """Start `sum`; return what waits for it. All ranks wait in the order in which they start."""
        if in_place and tensor.is_contiguous():
            result = owned(tensor.detach())
        else:
            result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.is_silent:
            return lambda: result
        work = dist.all_reduce(result, group=self.group, async_op=True)
        self.moved += 2 * result.nbytes * (self.size - 1) / self.size
        return self._after(work, lambda: result)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over ranks."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not self.is_silent:
            self.wait(dist.all_reduce(result, dist.ReduceOp.MAX, group=self.group, async_op=True))
            self.moved += 2 * result.nbytes * (self.size - 1) / self.size
        return result

    def gather(self, local: Tensor, dim: int, lengths: Sequence[int], *, exact: bool = False) -> Tensor:
        """Return the full tensor: the shards of all ranks in a row along `dim`, where they are `lengths` long.

        Args:
            local: this rank's shard.
            dim: along which it is one.
            lengths: of the shards.
            exact: whether numbers travel as they are, whatever the group does otherwise.
        """
        return self.start_gather(local, dim, lengths, exact=exact)()

    def start_gather(self, local: Tensor, dim: int, lengths: Sequence[int], *, exact: bool = False) -> Wait:
        """Start `gather`; return what waits for it. All ranks wait in the order in which they start."""
        longest, dim = max(lengths), dim % local.dim()
        sent, work = padded(local.detach(), dim, longest), None
        shards = sent.new_empty(self.size, *sent.shape)
        if not self.is_silent:
            work = all_gather_single(shards.flatten(0, 1), sent, group=self.group, async_op=True)
            self.moved += shards.nbytes * (self.size - 1) / self.size

        def full() -> Tensor:
            if any(length != longest for length in lengths):
                return torch.cat(
                    [shard.narrow(dim, 0, length) for shard, length in zip(shards, lengths, strict=True)], dim
                )
            return owned(shards.movedim(0, dim).flatten(dim, dim + 1))

        return self._after(work, full, sent)

    def sum_scattered(self, full: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """Return this rank's shard along `dim` of the sum over ranks; the shards are `lengths` long."""
        return self.start_sum_scattered(full, dim, lengths)()

    def start_sum_scattered(self, full: Tensor, dim: int, lengths: Sequence[int]) -> Wait:
        """Start `sum_scattered`; return what waits for it. All ranks wait in the order in which they start."""
        longest, dim = max(lengths), dim % full.dim()
        full = full.detach()
        if any(length != longest for length in lengths):
            shards = full.new_empty(self.size, *with_length(full.shape, dim, longest))
            for shard, piece, length in zip(shards, full.split(list(lengths), dim), lengths, strict=True):
                shard.narrow(dim, 0, length).copy_(piece)
                shard.narrow(dim, length, longest - length).zero_()
        else:
            shards = full.unflatten(dim, (self.size, longest)).movedim(dim, 0).contiguous()
        local = shards.new_empty(shards.shape[1:])
        work, sent = None, shards.flatten(0, 1)
        if not self.is_silent:
            work = reduce_scatter_single(local, sent, group=self.group, async_op=True)
            self.moved += shards.nbytes * (self.size - 1) / self.size
        return self._after(work, lambda: owned(local.narrow(dim, 0, lengths[self.index]).contiguous()), sent)

    def local_of(self, full: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """Return this rank's shard of a replicated tensor, a view."""
        start = sum(lengths[: self.index])
        return full.narrow(dim, start, lengths[self.index])

    def exchange(self, local: Tensor, source: int, before: Sequence[int], target: int, after: Sequence[int]) -> Tensor:
        """Return the shard along `target`, `after` long, of what is sharded along `source`, `before` long."""
        pieces = local.detach().split(list(after), target)
        shape = with_length(local.shape, target, after[self.index])
        unit = math.prod(size for dim, size in enumerate(shape) if dim != source % local.dim())
        counts = [unit * length for length in before]
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        received = self.start_all_to_all(sent, [piece.numel() for piece in pieces], counts)()
        rows = zip(received.split(counts), before, strict=True)
        return torch.cat([row.view(with_length(shape, source, length)) for row, length in rows], source)

    def start_all_to_all(self, sent: Tensor, send: Sequence[int], receive: Sequence[int]) -> Wait:
        """Start to send a piece to each rank and to receive one from each; return what waits for these.

        Args:
            sent: all pieces, one after the other, in one dim, as what is received.
            send: elements for each rank.
            receive: elements from each rank.
        """
        received, work = sent.new_empty(sum(receive)), None
        if not self.is_silent:
            work = dist.all_to_all_single(received, sent, list(receive), list(send), group=self.group, async_op=True)
            self.moved += (sent.numel() - send[self.index]) * sent.element_size()
        return self._after(work, lambda: received, sent)

    # --- what a `Sharded` asks of its group, in autograd's graph ---

    def copied(self, x: Tensor) -> Tensor:
        """Return the replicated `x` for work on sharded weights; its gradients, which are partial, are summed."""
        return differentiable(x, view, partial(_summed, self))

    def scattered(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """Return this rank's shard of the replicated `x`; the gradients of all shards are gathered."""

        def local(x: Tensor) -> Tensor:
            # a copy, never a view: it may be written to, and lets go of the full tensor
            return self.local_of(x, dim, lengths).clone(memory_format=torch.contiguous_format)

        return differentiable(x, local, lambda gradient: self.gather(gradient, dim, lengths))

    def gathered(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """Return the sharded `x` in full, for work that all ranks repeat; each takes the gradient of its shard."""
        return differentiable(
            x, lambda x: self.gather(x, dim, lengths), lambda gradient: self.local_of(gradient, dim, lengths)
        )

    def _after(self, work: Any, result: Wait, *sent: Tensor) -> Wait:
        """Return what waits for `work`, if any, and then returns ``result()``; it keeps what is `sent` until then."""

        def wait() -> Tensor:
            if work is not None:
                self.wait(work)
            _ = sent
            return result()

        return wait

    def description(self) -> None:
        """What a peer needs to know to find its own group of this kind: nothing."""


_JOINS_S = 2.0


def join_late(flags: Tensor, group: dist.ProcessGroup | None) -> None:
    """Take part in an `all_reduce` of maxima in which other ranks may wait; wait for them, but two seconds at most."""
    work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=True)
    end = time.monotonic() + _JOINS_S
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01)


def with_length(shape: Sequence[int], dim: int, length: int) -> list[int]:
    """`shape` with another length of one dim."""
    new_shape = [*shape]
    new_shape[dim] = length
    return new_shape


def padded(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` without gaps in memory, and with zeros after it along `dim` up to a length."""
    missing = length - x.shape[dim]
    return (torch.cat([x, x.new_zeros(with_length(x.shape, dim, missing))], dim) if missing else x).contiguous()


def owned(x: Tensor) -> Tensor:
    """`x`, but no view: autograd forbids writes to views that a function returns, and models write to hidden states."""
    return x.new_empty(0).set_(x) if is_view(x) else x  # type: ignore[call-overload]


def dry_run(groups: Iterable[TensorGroup]) -> AbstractContextManager[None]:
    """Let no group communicate meanwhile."""
    return _all_meanwhile(groups, is_silent=True)


def in_one_piece(groups: Iterable[TensorGroup]) -> AbstractContextManager[None]:
    """Let no group hand over meanwhile."""
    return _all_meanwhile(groups, hand_over=None)


@contextmanager
def _all_meanwhile(groups: Iterable[TensorGroup], **values: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(meanwhile(group, **values))
        yield


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: OfTensor, backward: OfTensor) -> Tensor:
        ctx.backward_of = backward
        return forward(x)

    @staticmethod
    @once_differentiable  # collectives in a backward are outside of its graph
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward_of(gradient[0]), None, None


def differentiable(x: Tensor, forward: OfTensor, backward: OfTensor) -> Tensor:
    """Return ``forward(x)``; the gradient of `x` is ``backward`` of that of the result."""
    return same_origin(_Differentiable.apply(x, forward, backward), x)


def view(x: Tensor) -> Tensor:
    """Return `x` as another tensor, as the forward of an autograd function must."""
    return x.view_as(x)


def reduce(x: Tensor, group: TensorGroup, *, is_fresh: bool = False) -> Tensor:
    """Return the sum of the partial `x`, replicated; the gradient of the sum is that of each rank's summand.

    Args:
        x: the summand.
        group: the ranks.
        is_fresh: whether nobody but the caller holds `x`, and nothing that computed it keeps it for its backward; the
            sum then takes its memory.
    """
    in_place = is_fresh and not is_observed()  # a mode may keep `x` for when it is computed again
    return differentiable(x, lambda x: group.sum(x, in_place=in_place), lambda gradient: gradient)


def _summed(group: TensorGroup, gradient: Tensor) -> Tensor:
    return group.sum(gradient, in_place=is_held_once(gradient))


def reduce_scatter(x: Tensor, dim: int, lengths: Sequence[int], group: TensorGroup) -> Tensor:
    """Return this rank's shard of the sum of the partial `x`; the gradients of all shards are gathered."""
    return differentiable(
        x, lambda x: group.sum_scattered(x, dim, lengths), lambda gradient: group.gather(gradient, dim, lengths)
    )


def exchange(
    x: Tensor, source: int, before: Sequence[int], target: int, after: Sequence[int], group: TensorGroup
) -> Tensor:
    """Return this rank's shard along `target` of an `x` sharded along `source`; gradients go the way back."""
    return differentiable(
        x,
        lambda x: group.exchange(x, source, before, target, after),
        lambda gradient: group.exchange(gradient, target, after, source, before),
    )
