"""Messages that are compressed. Sums are computed of decoded numbers, in float32 at least.

An all-reduce is a scatter of encoded numbers, a sum in the memory of the rank that gets them, and a gather of the
encoded sums, which all ranks decode: so all have the same result to the bit, the owner of a sum too. Its bytes are
those of a ring.

Each starts when it is made; `wait` returns the result. All ranks of a group make and wait for them in one order.

Sums, gathers and exchanges of tensor parallel ranks are compressed where their dtype is wider than the wire's. Maxima,
and what must be exact, never are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.compressed_communication.compression import Compression
from lightning_mm5d.features.compressed_communication.fields import Kind, communication_of
from lightning_mm5d.layout.even_split import even_lengths
from lightning_mm5d.sharded.backends import waits_on_device
from lightning_mm5d.sharded.collectives import TensorGroup, Wait, owned, with_length
from lightning_mm5d.sharded.renamed import all_gather_single


class CompressedScatter:
    """A reduce-scatter.

    Args:
        chunks: for each rank of `group`, in its order, what this rank adds to that rank's sum: flat tensors of one
            dtype, of the same length on all ranks.
        group: the ranks.
        compression: of the chunks.
        seed: for random rounding, of this sum on all ranks; None rounds to the nearest.
        arriving: lengths of what comes from each rank; unset, those of this rank's own chunk.

    Attributes:
        moved: bytes that this rank sends to others.
    """

    def __init__(
        self,
        chunks: Sequence[Tensor],
        group: dist.ProcessGroup,
        compression: Compression,
        *,
        seed: int | None = None,
        arriving: Sequence[int] | None = None,
    ) -> None:
        own = group.rank()
        self._dtype, self._compression = chunks[0].dtype, compression
        self._lengths = list(arriving) if arriving is not None else [chunks[own].numel()] * len(chunks)
        seeds = [None if seed is None else seed + own * len(chunks) + place for place in range(len(chunks))]
        parts = [compression.encode(chunk, one) for chunk, one in zip(chunks, seeds, strict=True)]
        data = torch.cat(parts)
        self._sent: Tensor | None = data
        self._sizes = [compression.nbytes(length, self._dtype) for length in self._lengths]
        self._arrived = data.new_empty(sum(self._sizes))
        sent = [part.numel() for part in parts]
        self.moved = sum(sent) - sent[own]
        self._group = group
        self._work: Any = dist.all_to_all_single(self._arrived, data, self._sizes, sent, group=group, async_op=True)

    def is_there(self) -> bool:
        """Whether `wait` does not hold up the host."""
        return waits_on_device(self._arrived.device, self._group) or self._work.is_completed()

    def parts(self) -> list[Tensor]:
        """Wait; return the chunk of each rank, decoded."""
        self._work.wait()
        self._sent = None
        pairs = zip(self._arrived.split(self._sizes), self._lengths, strict=True)
        return [self._compression.decode(data, length, self._dtype) for data, length in pairs]

    def total(self) -> Tensor:
        """Wait; return the sum of this rank's chunks over all ranks, in float32 at least."""
        total, *others = self.parts()
        total = total.to(torch.promote_types(total.dtype, torch.float32))
        for other in others:
            total += other
        return total

    def wait(self) -> Tensor:
        """Return the sum of this rank's chunks over all ranks, in their dtype."""
        return self.total().to(self._dtype)


class CompressedGather:
    """An all-gather.

    Args:
        own: a flat tensor.
        lengths: of the flat tensors of all ranks of `group`, in its order.
        group: the ranks.
        compression: of all.
        seed: for random rounding, the same on all ranks; None rounds to the nearest.

    Attributes:
        moved: bytes that this rank sends in a ring.
    """

    def __init__(
        self,
        own: Tensor,
        lengths: Sequence[int],
        group: dist.ProcessGroup,
        compression: Compression,
        *,
        seed: int | None = None,
    ) -> None:
        self._dtype, self._lengths, self._compression = own.dtype, lengths, compression
        self._sizes = [compression.nbytes(length, own.dtype) for length in lengths]
        data, longest = compression.encode(own, None if seed is None else seed + group.rank()), max(self._sizes)
        self._own = torch.nn.functional.pad(data, (0, longest - data.numel()))
        self._all = data.new_empty(longest * len(lengths))
        self.moved = longest * (len(lengths) - 1)
        self._work: Any = all_gather_single(self._all, self._own, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """Return the flat tensors of all ranks as all ranks get them, that of this rank too."""
        self._work.wait()
        rows = zip(self._all.chunk(len(self._lengths)), self._sizes, self._lengths, strict=True)
        return [
            self._compression.decode(data[:size], length, self._dtype).to(self._dtype) for data, size, length in rows
        ]


class CompressedSum:
    """An all-reduce, with the phases of a bucket's (`gradients.buckets.Sum`).

    Args:
        flat: of one dim, of the same length and dtype on all ranks.
        group: the ranks.
        compression: of its numbers.
        seed: for random rounding, the same on all ranks; None rounds to the nearest.
        in_place: whether the sum takes the memory of `flat`.

    Attributes:
        moved: bytes that this rank has sent to others so far.
    """

    copies = False

    def __init__(
        self,
        flat: Tensor,
        group: dist.ProcessGroup,
        compression: Compression,
        *,
        seed: int | None = None,
        in_place: bool = False,
    ) -> None:
        self._group, self._compression, self._seed = group, compression, seed
        self._lengths, self._dtype = even_lengths(flat.numel(), group.size()), flat.dtype
        arriving = [self._lengths[group.rank()]] * group.size()
        chunks = flat.split(self._lengths)
        self._under_way: CompressedScatter | CompressedGather | None
        self._under_way = CompressedScatter(chunks, group, compression, seed=seed, arriving=arriving)
        self.moved = self._under_way.moved
        self._total = flat if in_place else torch.empty_like(flat)

    def advance(self) -> bool:
        """There is nothing to free."""
        return True

    def summed(self) -> None:
        """Wait for the summands and send the sum on; a collective, which `wait` calls where nobody did."""
        if isinstance(self._under_way, CompressedScatter):
            own = self._under_way.total().to(self._dtype)  # that of the summands, whose wire both halves take
            seed = None if self._seed is None else self._seed + self._group.size() ** 2
            self._under_way = CompressedGather(own, self._lengths, self._group, self._compression, seed=seed)
            self.moved += self._under_way.moved

    def wait(self) -> Tensor:
        """Return the sum, as `flat` was."""
        self.summed()
        if isinstance(self._under_way, CompressedGather):
            torch.cat(self._under_way.wait(), out=self._total)
            self._under_way = None
        return self._total


class CompressedGroup(TensorGroup):
    """The ranks that share layers, whose traffic is compressed.

    Args:
        group: their process group.
        compression: of what they sum, gather and exchange.
    """

    def __init__(self, group: dist.ProcessGroup, compression: Compression) -> None:
        super().__init__(group)
        self._compression = compression

    def _sends_plain(self, tensor: Tensor) -> bool:
        """Whether `tensor` travels as it is: decided by its dtype, which all ranks share."""
        return self.is_silent or not self._compression.narrows(tensor.dtype)

    def start_sum(self, tensor: Tensor, *, in_place: bool = False) -> Wait:
        """See `TensorGroup`; the memory of `tensor` is left alone."""
        if self._sends_plain(tensor):
            return super().start_sum(tensor, in_place=in_place)
        sent = CompressedSum(tensor.detach().reshape(-1), self.group, self._compression)

        def total() -> Tensor:
            self.wait()
            sent.summed()
            self.wait()
            found = owned(sent.wait().view(tensor.shape))
            self.moved += sent.moved
            return found

        return total

    def start_gather(self, local: Tensor, dim: int, lengths: Sequence[int], *, exact: bool = False) -> Wait:
        """See `TensorGroup`."""
        if exact or self._sends_plain(local):
            return super().start_gather(local, dim, lengths, exact=exact)
        own, dim = local.detach(), dim % local.dim()
        unit = math.prod(size for place, size in enumerate(own.shape) if place != dim)
        found = CompressedGather(own, [unit * length for length in lengths], self.group, self._compression)
        self.moved += found.moved

        def joined() -> Tensor:
            self.wait()
            rows = zip(found.wait(), lengths, strict=True)
            return torch.cat([flat.view(with_length(own.shape, dim, length)) for flat, length in rows], dim)

        return joined

    def start_sum_scattered(self, full: Tensor, dim: int, lengths: Sequence[int]) -> Wait:
        """See `TensorGroup`."""
        if self._sends_plain(full):
            return super().start_sum_scattered(full, dim, lengths)
        pieces = full.detach().split(list(lengths), dim)
        scattered = CompressedScatter([piece.reshape(-1) for piece in pieces], self.group, self._compression)
        self.moved += scattered.moved

        def shard() -> Tensor:
            self.wait()
            return owned(scattered.wait().view(pieces[self.index].shape))

        return shard

    def exchange(self, local: Tensor, source: int, before: Sequence[int], target: int, after: Sequence[int]) -> Tensor:
        """See `TensorGroup`."""
        if self._sends_plain(local):
            return super().exchange(local, source, before, target, after)
        shape = with_length(local.shape, target, after[self.index])
        unit = math.prod(size for dim, size in enumerate(shape) if dim != source % local.dim())
        parts = [piece.reshape(-1) for piece in local.detach().split(list(after), target)]
        counts = [unit * length for length in before]
        exchanged = CompressedScatter(parts, self.group, self._compression, arriving=counts)
        self.moved += exchanged.moved
        self.wait()
        came = zip(exchanged.parts(), before, strict=True)
        return torch.cat([row.to(local.dtype).view(with_length(shape, source, n)) for row, n in came], source)


class CompressedEncoding(Compression):
    """A compression, as the core has numbers travel (`sharded.collectives.Encoding`)."""

    def changes(self, dtype: torch.dtype) -> bool:
        """Return whether long tensors of `dtype` take fewer bytes than they have."""
        return self.narrows(dtype)

    def group(self, group: dist.ProcessGroup) -> TensorGroup:
        """Return the ranks of `group`, whose traffic is compressed."""
        return CompressedGroup(group, self)

    def summed(self, flat: Tensor, group: dist.ProcessGroup, seed: int) -> CompressedSum:
        """Start to sum a flat tensor in place."""
        return CompressedSum(flat, group, self, seed=seed, in_place=True)

    def scattered(self, chunks: Sequence[Tensor], group: dist.ProcessGroup, seed: int) -> CompressedScatter:
        """Start to sum chunks to the rank of each."""
        return CompressedScatter(chunks, group, self, seed=seed)

    def gathered(self, own: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> CompressedGather:
        """Start to gather flat tensors."""
        return CompressedGather(own, lengths, group, self)

    def encoded(self, meta: Any, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return a payload with tensors as bytes where that is shorter, and what they were in its meta."""
        found, kinds = list(tensors), []
        for index, tensor in enumerate(tensors):
            if self.saves(tensor.numel(), tensor.dtype):
                found[index] = self.encode(tensor)
                kinds.append([index, str(tensor.dtype).removeprefix("torch."), *tensor.shape])
        return [kinds, meta], found

    def decoded(self, meta: Any, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Undo `encoded`."""
        kinds, meta = meta
        for index, name, *shape in kinds:
            dtype = getattr(torch, name)
            tensors[index] = self.decode(tensors[index], math.prod(shape), dtype).to(dtype).view(shape)
        return meta, tensors


def encoding_of(modality: Modality, kind: Kind) -> CompressedEncoding | None:
    """Return how a modality's traffic of one kind is compressed; None sends tensors as they are."""
    communication = communication_of(modality)
    name = communication.of(kind)
    if name is None:
        return None
    return CompressedEncoding(getattr(torch, name), communication.stochastic_rounding and kind == "gradients")
