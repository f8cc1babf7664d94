"""A sequence whose tokens are sharded over ranks: the group of a `Sharded`, functions along its dim, and its ring.

Each context parallel rank holds the tokens that a `TokenSplit` gives it, in ascending order; where tensor parallel
ranks shard these further (``sequence_parallel``), each of them holds a stretch of its context parallel rank's tokens.

**Gradients.** A value outside of the layers is full on all ranks, and so is its gradient. A local tensor has R times
the gradient that it would have in one process, R being the context parallel degree. So a parameter that worked on
local tensors gets R times the gradient of this rank's tokens, one that worked on full tensors gets the true gradient,
and for both the *mean* over the R ranks is the true gradient: so gradients are reduced (`Ownership.gradient_weight`),
once a step. The backward multiplies by R where a full tensor was gathered, and divides by R where one was scattered.

**Split.** A `TokenSplit` says which tokens of a sequence each rank of a group holds. It is plain data and the same on
every rank: for each rank the ranges of its tokens. Results that depend on a split alone live on it (`cached`).

**Functions along the sharded dim.** Tokens may lie on any rank (`ShardedSequence`), so a view of several sequences as
one, a stretch of a sequence and a loss over tokens are again sharded tensors. With the rules of `operations` these
carry a step from the last layer to its loss without any rank ever having the full tensor.

**A ring of ranks.** `ring_gather` gathers: a rank works on the rows that it has while those of the rank before it come.
`ring_sum_scattered` sums and scatters: a rank computes its part of one shard's sum while the sum of that shard so far
is on its way to it (Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models").

Both are outside of autograd's graph. All ranks make the same hops in the same order; shorter shards travel padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightning_mm5d.data.lazy import on_device
from lightning_mm5d.layout.layout import even_lengths
from lightning_mm5d.sharded.class_operations import check_targets
from lightning_mm5d.sharded.collectives import TensorGroup, differentiable, message_device, padded, view, with_length
from lightning_mm5d.sharded.kept_results import unseen
from lightning_mm5d.sharded.tensor import Group, Sharded, Sharding, as_sharded, from_local
from lightning_mm5d.sharded.torch_internals import is_view

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
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

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
    def ranks(self) -> int:
        """Number of ranks, R."""
        return len(self.ranges)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(end - start for start, end in held) for held in self.ranges)

    def indices(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """int64 ``[S_rank]``: the tokens of a rank, ascending. Kept per device: do not write to it."""
        return self.cached(
            ("indices", rank, torch.device(device)), lambda: on_device(_tokens(self.ranges[rank]), device)
        )

    def order(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 ``[S]``: where each token is when the tokens of all ranks stand in a row, so that
        ``torch.cat(locals)[order]`` is the sequence. Kept per device: do not write to it."""

        def inverse() -> Tensor:
            row = torch.cat([_tokens(held) for held in self.ranges])
            order = torch.empty_like(row).scatter_(0, row, torch.arange(self.size, device="cpu"))
            return on_device(order, device)

        return self.cached(("order", torch.device(device)), inverse)

    @cached_property
    def _in_order(self) -> bool:
        rows = [piece for held in self.ranges for piece in held]
        return rows == sorted(rows)

    def ordered(self, parts: Tensor, dim: int) -> Tensor:
        """Return the sequence, given the tokens of all ranks in a row along `dim`; a view where it can."""
        return parts if self._in_order else parts.index_select(dim, self.order(parts.device))

    def parted(self, sequence: Tensor, dim: int) -> Tensor:
        """Return the tokens of all ranks in a row, given the sequence; a view where it can."""
        if self._in_order:
            return sequence
        device = sequence.device
        row = self.cached(
            ("row", device), lambda: torch.cat([self.indices(rank, device) for rank in range(self.ranks)])
        )
        return sequence.index_select(dim, row)

    def cached(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` made of this split the first time, for as long as the split lives."""
        if name not in self._memo:
            # autograd may meet it later, and a forward that runs again finds it
            with torch.inference_mode(False), unseen():
                self._memo[name] = make()
        return self._memo[name]

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


@dataclass(eq=False)
class Holders:
    """The ranks that hold the tokens of sequences.

    Attributes:
        ranks: context parallel ranks, or with ``sequence_parallel`` the tensor parallel ranks of each of them, which
            run fastest.
        degree: context parallel degree, R.
        tensor: this rank's tensor parallel ranks, where they shard its tokens; else None.
        averages: whether a leaf is a parameter whose gradient is averaged over ranks at the end of a step.
        finer: the same with `tensor`, where there are tensor parallel ranks and `tensor` is None.
        coarser: the same without `tensor`, where it is not None.
    """

    ranks: TensorGroup
    degree: int
    averages: Callable[[Tensor], bool]
    tensor: TensorGroup | None = None
    finer: Holders | None = None
    coarser: Holders | None = None


class ShardedSequence:
    """A split of one dim over ranks; stands as ``group`` in a `Sharding`.

    Args:
        split: the tokens of each of ``holders.ranks``.
        holders: the ranks.
    """

    def __init__(self, split: TokenSplit, holders: Holders) -> None:
        self.split, self.holders = split, holders
        self.factor = holders.degree
        self._views: dict[Any, ShardedSequence] = {}
        self.index, self.size = holders.ranks.index, holders.ranks.size
        ranges = split.ranges[self.index]
        self._run = ranges[0] if len(ranges) == 1 else None  # tokens that are neighbours need no copy

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return self.split.lengths

    # --- what a `Sharded` asks of its group ---

    def local_of(self, full: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """This rank's tokens of a full tensor, perhaps a view."""
        if self._run is not None:
            return full.narrow(dim, self._run[0], self._run[1] - self._run[0])
        return full.index_select(dim, self.split.indices(self.index, full.device))

    def gather(self, local: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """The full tensor, in the order of tokens, outside of autograd's graph."""
        return self.split.ordered(self.holders.ranks.gather(local, dim, lengths), dim)

    def copied(self, x: Tensor) -> Tensor:
        """The replicated `x` for work on local tensors."""
        if x.is_leaf and self.holders.averages(x):
            return x if self.holders.tensor is None else self.holders.tensor.copied(x)
        ranks, degree = self.holders.ranks, self.factor
        return differentiable(x, view, lambda gradient: ranks.sum(gradient) / degree)

    def scattered(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """This rank's tokens of the replicated `x`; the gradients of all tokens are gathered."""

        def local_copy(x: Tensor) -> Tensor:
            local = self.local_of(x, dim, lengths)
            # never a view: it may be written to, and lets go of the full tensor
            return local.clone(memory_format=torch.contiguous_format) if is_view(local) else local

        return differentiable(x, local_copy, lambda gradient: self.gather(gradient, dim, lengths) / self.factor)

    def gathered(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """The full tensor, for work that all ranks repeat; each takes the gradient of its tokens."""
        return differentiable(
            x,
            lambda x: self.gather(x, dim, lengths),
            lambda gradient: self.local_of(gradient, dim, lengths) * self.factor,
        )

    def mixed(self, x: Tensor, dim: int) -> Tensor:
        """The full tensor of this rank's tokens `x`, for work on all tokens of which each rank keeps its own tokens."""
        ranks, lengths = self.holders.ranks, self.lengths
        if not x.requires_grad:
            return self.gather(x, dim, lengths)

        def summed(gradient: Tensor) -> Tensor:
            return ranks.sum_scattered(self.split.parted(gradient, dim), dim, lengths)

        return differentiable(x, lambda x: self.gather(x, dim, lengths), summed)

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks of what each computed of its tokens, replicated."""
        factor = self.factor
        return differentiable(x, self.holders.ranks.sum, lambda gradient: gradient * factor)

    def merged(self, count: int) -> ShardedSequence:
        """`count` sequences of this kind in a row, as one."""
        size = self.split.size

        def make() -> TokenSplit:
            rows = range(count)
            ranges = [[(row * size + a, row * size + b) for row in rows for a, b in held] for held in self.split.ranges]
            return TokenSplit.of(ranges, count * size)

        return self if count == 1 else self._view(("merged", count), make, self)

    def unmerged(self, count: int) -> ShardedSequence | None:
        """The sequence of which this is `count` in a row; None where it is not."""
        return self if count == 1 else self._views.get(("of", count))

    def narrowed(self, start: int, stop: int) -> tuple[ShardedSequence, slice]:
        """The tokens from `start` to `stop` alone, and the slice of this rank's tokens that they are."""

        def make() -> TokenSplit:
            ranges = [
                [(max(a, start) - start, min(b, stop) - start) for a, b in held if max(a, start) < min(b, stop)]
                for held in self.split.ranges
            ]
            return TokenSplit.of(ranges, stop - start)

        local_ranges = self.split.ranges[self.index]
        first = sum(max(0, min(b, start) - a) for a, b in local_ranges)
        sequence = self._view(("narrowed", start, stop), make)
        return sequence, slice(first, first + sequence.lengths[self.index])

    def description(self) -> Any:
        """Plain values from which a peer makes the same sequence."""
        return [self.split.size, [list(map(list, held)) for held in self.split.ranges]]

    # --- tensor parallel ranks that shard a context parallel rank's tokens ---

    def own_tokens(self, x: Sharded) -> Tensor:
        """This context parallel rank's tokens of `x`: plain, or a `Sharded` over its tensor parallel ranks."""
        tensor = self.holders.tensor
        return x.local if tensor is None else from_local(x.local, x.sharded_dim, self.own_lengths, tensor)

    def wrapped(self, x: Tensor, dim: int) -> Sharded:
        """Undo `own_tokens`, for what was computed of it: sharded along `dim`, which is negative."""
        return from_local(x.local if isinstance(x, Sharded) else x, dim, self.lengths, self)

    @cached_property
    def finer(self) -> ShardedSequence:
        """The same with each context parallel rank's tokens sharded over its tensor parallel ranks."""
        finer = self.holders.finer
        if finer is None:
            return self
        sequence = ShardedSequence(refined(self.split, finer.ranks.size // finer.degree), finer)
        sequence.coarse = self.split  # with what was made of it
        return sequence

    @cached_property
    def coarser(self) -> ShardedSequence:
        """The same with all of a context parallel rank's tokens on each of its tensor parallel ranks."""
        return self if self.holders.coarser is None else ShardedSequence(self.coarse, self.holders.coarser)

    @cached_property
    def coarse(self) -> TokenSplit:
        """The tokens of each context parallel rank."""
        return joined(self.split, self.size // self.holders.degree)

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

    def _view(self, key: Any, make: Callable[[], TokenSplit], base: ShardedSequence | None = None) -> ShardedSequence:
        # one object for one view, so that tensors of it work together
        if key not in self._views:
            self._views[key] = ShardedSequence(make(), self.holders)
            if base is not None:
                self._views[key]._views["of", key[1]] = base
        return self._views[key]


def joined(split: TokenSplit, size: int) -> TokenSplit:
    """The split of the same tokens over groups of `size` ranks in a row."""
    if size == 1:
        return split

    def make() -> TokenSplit:
        groups = [split.ranges[start : start + size] for start in range(0, split.ranks, size)]
        return TokenSplit.of([sorted(chain(*group)) for group in groups], split.size)

    return split.cached(("joined", size), make)


def refined(split: TokenSplit, count: int) -> TokenSplit:
    """The split with each rank's tokens cut into `count` stretches, whose lengths differ by at most one."""
    if count == 1:
        return split
    ranges: list[list[tuple[int, int]]] = []
    for held, length in zip(split.ranges, split.lengths, strict=True):
        pieces = list(held)
        for want in even_lengths(length, count):
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


def is_tokens(group: Group) -> TypeGuard[ShardedSequence]:
    """Whether a group holds a sequence split by tokens."""
    return not isinstance(group, TensorGroup)


def reshaped_sequences(x: Sharded, sizes: Sequence[int]) -> Any:
    """`x` with its sequences in a row as one, ``[B, S, ...]`` as ``[B * S, ...]``, or apart again.

    Args:
        x: of any shape.
        sizes: the shape wanted, of as many elements, without -1.

    Returns:
        A `Sharded`, or NotImplemented where that needs the full tensor.
    """
    local, (dim, _, size, group), shape = x.local, x.sharding, x.shape
    if not is_tokens(group):
        return NotImplemented
    place = len(shape) + dim
    for first in range(place):
        count = math.prod(shape[first:place])
        for at, wanted in enumerate(sizes):
            if wanted == count * size and math.prod(sizes[:at]) == math.prod(shape[:first]):
                return _viewed(local, sizes, at, group.merged(count))
    for at in range(1, len(sizes)):
        for first in range(at):
            count = math.prod(sizes[first:at])
            if count * sizes[at] == size and math.prod(sizes[:first]) == math.prod(shape[:place]):
                apart = group.unmerged(count)
                if apart is not None:
                    return _viewed(local, sizes, at, apart)
    return NotImplemented


def _viewed(local: Tensor, sizes: Sequence[int], at: int, group: ShardedSequence) -> Sharded:
    local_sizes = with_length(sizes, at, group.lengths[group.index])
    return as_sharded(local.reshape(local_sizes), _sharding(at - len(sizes), group))


def narrowed_sequence(sharding: Sharding, entry: Any) -> tuple[Sharding, slice] | None:
    """The sharding of ``x[..., entry, ...]``, `entry` being that of the sharded dim, and the slice of the local tensor.

    None where that needs the full tensor.
    """
    if not isinstance(entry, slice):
        return None
    start, stop, step = entry.indices(sharding.size)
    if (start, stop, step) == (0, sharding.size, 1):
        return sharding, slice(None)
    if not is_tokens(sharding.group) or step != 1 or stop <= start:
        return None
    group, local_slice = sharding.group.narrowed(start, stop)
    return _sharding(sharding.dim, group), local_slice


def cross_entropy_of_tokens(logits: Sharded, target: Tensor, options: Mapping[str, Any]) -> Any:
    """The cross entropy of logits ``[N, C]`` of which each rank holds some rows; replicated.

    Args:
        logits: sharded along their rows.
        target: classes ``[N]`` or probabilities ``[N, C]`` of all rows.
        options: other arguments of ``torch.nn.functional.cross_entropy``.

    Returns:
        The loss, or for ``reduction="none"`` the losses, sharded; NotImplemented where that needs the
            full tensor.
    """
    group, options = logits.sharding.group, dict(options)
    if not is_tokens(group) or target.shape[0] != logits.shape[0] or target.requires_grad:
        return NotImplemented
    if any(options.pop(name, None) is not None for name in ("size_average", "reduce")):
        return NotImplemented
    reduction, weight = options.pop("reduction", "mean"), options.pop("weight", None)
    if reduction not in ("mean", "sum", "none") or (weight is not None and options.get("label_smoothing")):
        return NotImplemented
    rows = group.local_of(target, 0, group.lengths)
    ignored = options.get("ignore_index", -100)
    if target.dim() == 1:  # all of them, or one rank would fail while the others wait for it
        check_targets(target, target != ignored, logits.shape[1])
    losses = F.cross_entropy(logits.local, rows, weight=weight, reduction="none", **options)
    if weight is not None and reduction == "mean" and target.dim() == 1:
        counts = target != ignored
        return group.total(losses.sum()) / weight[torch.where(counts, target, 0)].mul(counts).sum()
    return reduced_losses(losses, target, group, reduction, ignored)


def reduced_losses(
    losses: Tensor, target: Tensor, group: ShardedSequence | None, reduction: str, ignore_index: int
) -> Tensor:
    """Reduce the losses of rows as ``torch.nn.functional.cross_entropy`` does without class weights.

    Args:
        losses: of this rank's rows, 0 where they do not count.
        target: classes ``[N]`` or probabilities ``[N, C]`` of all rows.
        group: holds the rows; None where this rank has all.
        reduction: ``"mean"`` over the rows that count, ``"sum"``, or ``"none"``.
        ignore_index: class of rows that do not count.

    Returns:
        A replicated scalar, or for ``"none"`` the losses, sharded over `group`.
    """
    if reduction == "none":
        return losses if group is None else as_sharded(losses, _sharding(-1, group))
    total = losses.sum() if group is None else group.total(losses.sum())
    if reduction == "sum":
        return total
    return total / (target.shape[0] if target.dim() == 2 else (target != ignore_index).sum())


def _sharding(dim: int, group: ShardedSequence) -> Sharding:
    return Sharding(dim, group.lengths, group.split.size, group)


class Hop:
    """Passes a buffer to the next rank of a ring while another comes from the previous one.

    Args:
        group: the ring.
        sent: contiguous; at least one element, so that all ranks take part in each hop.
        shape: of what is to come.
    """

    def __init__(self, group: TensorGroup, sent: Tensor, shape: Sequence[int]) -> None:
        self._group, self._device, wire = group, sent.device, message_device(sent.device, group.group)
        self._sent = sent.to(wire)  # gloo moves host memory only between two ranks
        self._received = self._sent.new_empty(tuple(shape))
        following, previous = (group.index + 1) % group.size, (group.index - 1) % group.size
        # one batch, or NCCL would wait for one direction before it starts the other
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group.group, group_peer=following),
                dist.P2POp(dist.irecv, self._received, group=group.group, group_peer=previous),
            ]
        )
        group.moved += sent.nbytes

    def wait(self) -> Tensor:
        """Return what came; what was sent may be written to from now on."""
        self._group.wait(*self._works)
        del self._sent, self._works  # the next hop allocates another buffer
        return self._received.to(self._device)


def ring_gather(
    local: Tensor, dim: int, lengths: Sequence[int], group: TensorGroup, use: Callable[[Tensor, int], None]
) -> Tensor:
    """Return the full tensor, as ``group.gather(local, dim, lengths)`` does.

    Args:
        local: this rank's shard.
        dim: along which it is one, negative.
        lengths: of the shards.
        group: the ring.
        use: called with each shard, contiguous, and its start in the full tensor while the next one comes; this rank's
            own first.
    """
    starts, held = [*accumulate(lengths, initial=0)], padded(local.detach(), dim, max(lengths))
    full = local.new_empty(with_length(local.shape, dim, sum(lengths)))
    for step in range(group.size):
        source = (group.index - step) % group.size
        start, length = starts[source], lengths[source]
        hop = None if step == group.size - 1 else _hop(group, held)
        rows = held.narrow(dim, 0, length).contiguous()
        full.narrow(dim, start, length).copy_(rows)
        use(rows, start)
        if hop is not None:
            held = hop.wait()
    return full


def ring_sum_scattered(
    part: Callable[[int, int], Tensor], dim: int, lengths: Sequence[int], group: TensorGroup
) -> Tensor:
    """Return this rank's shard of a sum over ranks, as ``group.sum_scattered(full, dim, lengths)`` does.

    Args:
        part: given the start and the length of a shard, computes this rank's summand of it.
        dim: along which shards are, negative.
        lengths: of the shards.
        group: the ring.
    """
    starts, longest = [*accumulate(lengths, initial=0)], max(lengths)
    hop: Hop | None = None
    for step in range(group.size - 1):
        target = (group.index - 1 - step) % group.size
        summand = part(starts[target], lengths[target])
        # what came takes the sum: a mode may keep `summand` for when it is computed again
        sent = padded(summand, dim, longest) if hop is None else _plus(hop.wait(), summand, dim)
        hop = _hop(group, sent)
    summand = part(starts[group.index], lengths[group.index])
    if hop is None:
        return summand
    total = _plus(hop.wait(), summand, dim)
    if summand.shape[dim] == longest:
        return total
    return total.narrow(dim, 0, summand.shape[dim]).clone(memory_format=torch.contiguous_format)


def _hop(group: TensorGroup, sent: Tensor) -> Hop | None:
    return None if group.is_silent or not sent.numel() else Hop(group, sent, sent.shape)


def _plus(came: Tensor, summand: Tensor, dim: int) -> Tensor:
    """Add `summand` to the rows of `came` that are no padding."""
    came.narrow(dim, 0, summand.shape[dim]).add_(summand)
    return came
