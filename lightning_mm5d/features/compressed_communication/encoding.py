"""Messages that are compressed. Sums are computed of decoded numbers, in float32 at least.

An all-reduce is a scatter of encoded numbers, a sum in the memory of the rank that gets them, and a gather of the
encoded sums, which all ranks decode: so all have the same result to the bit, the owner of a sum too. Its bytes are
those of a ring.

Each starts when it is made; `wait` returns the result. All ranks of a group make and wait for them in one order.

Sums, gathers and exchanges of tensor parallel ranks are compressed where their dtype is wider than the wire's. Maxima,
and what must be exact, never are.

Tensors in fewer bits, as they travel between ranks.

A float8 has a *scale* for each block of 128 neighbours, as DeepSeek-V3 has (arXiv:2412.19437): the largest magnitude of
the block, as float32, in front of the numbers. So one tensor may hold numbers of very different sizes, and the error of
a number is bounded by its own size or that of its block's largest.

Numbers that are not finite stay what they are, each by itself, and finite ones stay finite. The largest numbers of a
dtype, with which models mask scores, are no part of a scale: beside them the others of their block would vanish.

Nothing is converted that would take no fewer bytes for it: integers, complex numbers, dtypes as short as the wire's,
and single numbers, which are shorter than their scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.compressed_communication.fields import Kind, communication_of
from lightning_mm5d.layout.layout import even_lengths
from lightning_mm5d.sharded.collectives import TensorGroup, Wait, owned, waits_on_device, with_length
from lightning_mm5d.sharded.torch_internals import all_gather_single

BLOCK = 128
_LARGEST = 0.99  # of a dtype's largest number: from there on a number is a mask
_NAN = 0x80  # the negative zero; float8_e4m3fn has two codes for what is not finite, and these are the infinities


class Compression(NamedTuple):
    """How numbers travel: a `sharded.collectives.Encoding`.

    Attributes:
        dtype: on the wire: float32, bfloat16, float8_e4m3fn or float8_e5m2.
        is_stochastic: whether numbers are rounded up or down at random, where a seed is given, so that their mean is
            exact.
    """

    dtype: torch.dtype
    is_stochastic: bool = False

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes that `numel` numbers of `dtype` take."""
        plain = numel * dtype.itemsize
        scales = 0 if self.dtype.itemsize > 1 else 4 * -(-numel // BLOCK)
        return min(plain, numel * self.dtype.itemsize + scales) if dtype.is_floating_point else plain

    def saves(self, numel: int, dtype: torch.dtype) -> bool:
        """Return whether `numel` numbers of `dtype` take fewer bytes than they have."""
        return self.nbytes(numel, dtype) < numel * dtype.itemsize

    def changes(self, dtype: torch.dtype) -> bool:
        """Return whether long tensors of `dtype` take fewer bytes than they have."""
        return self.saves(BLOCK, dtype)

    def encode(self, tensor: Tensor, seed: int | None = None) -> Tensor:
        """Return `tensor` as bytes, ``[nbytes]`` of uint8.

        Args:
            tensor: of any shape.
            seed: of random numbers; None rounds to the nearest.
        """
        flat = tensor.detach().reshape(-1)
        if not self.saves(flat.numel(), flat.dtype):
            return flat.contiguous().view(torch.uint8)
        if not self.is_stochastic:
            seed = None
        if self.dtype.itemsize > 1:
            return _narrowed(flat, self.dtype, seed).view(torch.uint8)
        return _scaled(flat, self.dtype, seed)

    def decode(self, data: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return what `encode` wrote of `numel` numbers of `dtype`: flat, and in float32 at least where it is wider."""
        if not self.saves(numel, dtype):
            return data.clone().view(dtype)  # at an address of its own, which its dtype may want
        wide = torch.promote_types(dtype, torch.float32)
        if self.dtype.itemsize > 1:
            return data.clone().view(self.dtype).to(wide)
        return _unscaled(data, numel, self.dtype, dtype)

    def rounded(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as those get it that it is sent to."""
        shape, dtype = tensor.shape, tensor.dtype
        return self.decode(self.encode(tensor), tensor.numel(), dtype).to(dtype).view(shape)

    def group(self, group: dist.ProcessGroup) -> TensorGroup:
        """Return the ranks of `group`, whose traffic is compressed."""
        return CompressedGroup(group, self)

    def summed(self, flat: Tensor, group: dist.ProcessGroup, seed: int) -> CompressedSum:
        """Start to sum a flat tensor in place."""
        return CompressedSum(flat, group, self, seed=seed, in_place=True)

    def scattered(self, chunks: Sequence[Tensor], group: dist.ProcessGroup, seed: int) -> CompressedScatter:
        """Start to sum chunks to the rank of each."""
        return CompressedScatter(chunks, group, self, seed=seed)

    def gathered(self, local: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> CompressedGather:
        """Start to gather flat tensors."""
        return CompressedGather(local, lengths, group, self)

    def encoded(self, meta: Any, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return a payload with tensors as bytes where that is shorter, and what they were in its meta."""
        payload, kinds = list(tensors), []
        for index, tensor in enumerate(tensors):
            if self.saves(tensor.numel(), tensor.dtype):
                payload[index] = self.encode(tensor)
                kinds.append([index, str(tensor.dtype).removeprefix("torch."), *tensor.shape])
        return [kinds, meta], payload

    def decoded(self, meta: Any, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Undo `encoded`."""
        kinds, meta = meta
        for index, name, *shape in kinds:
            dtype = getattr(torch, name)
            tensors[index] = self.decode(tensors[index], math.prod(shape), dtype).to(dtype).view(shape)
        return meta, tensors


def _narrowed(x: Tensor, dtype: torch.dtype, seed: int | None = None) -> Tensor:
    """`x` in a narrower dtype of the same kind; what is finite stays finite."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(x.dtype).max:
        x = torch.where(x.isinf(), x, x.clamp(-limit, limit))
    if seed is None or dtype != torch.bfloat16:
        return x.to(dtype)
    # the upper half of a float32 is a bfloat16, and random bits carry over from the lower half as often as they should
    x = x.float()
    bits = (x.view(torch.int32) + _random(x, seed)) & -0x10000
    return torch.where(x.isnan(), x, bits.view(torch.float32)).to(dtype)


def _scaled(flat: Tensor, dtype: torch.dtype, seed: int | None) -> Tensor:
    """Scales and numbers of float8, as bytes."""
    numel, limit = flat.numel(), _LARGEST * min(torch.finfo(flat.dtype).max, torch.finfo(torch.float32).max)
    x = flat if flat.dtype == torch.float32 else _narrowed(flat, torch.float32)
    x = torch.nn.functional.pad(x, (0, -numel % BLOCK)).view(-1, BLOCK)
    size = x.abs()
    ordinary = size < limit
    largest = torch.where(ordinary, size, 0.0).amax(1, keepdim=True)
    largest = torch.where(largest == 0, 1.0, largest)
    top = torch.finfo(dtype).max
    numbers = torch.where(ordinary, x, 0.0).div_(largest).mul_(top)
    if seed is not None:
        numbers = _drawn(numbers, dtype, seed)
    codes = numbers.to(dtype).view(torch.uint8)
    infinite, nan = (0x7F, _NAN) if dtype == torch.float8_e4m3fn else (0x7C, 0x7F)
    if dtype == torch.float8_e4m3fn:
        codes = torch.where(codes == _NAN, 0, codes)
    signs = (x < 0).to(torch.uint8) << 7
    codes = torch.where(ordinary, codes, torch.where(x.isnan(), nan, signs + infinite))
    # a negative scale: what looks infinite in this block is the largest number
    is_mask = (size >= limit).any(1, keepdim=True) & ~size.isinf().any(1, keepdim=True)
    scales = torch.where(is_mask, -largest, largest)
    return torch.cat([scales.view(-1).view(torch.uint8), codes.to(torch.uint8).view(-1)[:numel]])


def _unscaled(data: Tensor, numel: int, wire: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Undo `_scaled` for what was of `dtype`."""
    blocks = -(-numel // BLOCK)
    scales = data[: 4 * blocks].clone().view(torch.float32).view(-1, 1)
    codes = torch.nn.functional.pad(data[4 * blocks :], (0, -numel % BLOCK)).view(-1, BLOCK)
    x = codes.view(wire).to(torch.float32)
    if wire == torch.float8_e4m3fn:
        infinite = torch.where(codes > _NAN, -torch.inf, torch.inf).to(x.dtype)
        x = torch.where(codes & 0x7F == 0x7F, infinite, x)
        x = torch.where(codes == _NAN, torch.nan, x)
    x = x.div_(torch.finfo(wire).max).mul_(scales.abs())
    x = x.to(torch.promote_types(dtype, torch.float32))
    limits = torch.full_like(scales, torch.inf, dtype=x.dtype).masked_fill_(scales < 0, torch.finfo(dtype).max)
    return x.clamp_(-limits, limits).view(-1)[:numel]


def _drawn(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Finite numbers of float32 rounded at random to numbers that `dtype` has."""
    info = torch.finfo(dtype)
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # of two, at most |x|
    step = power.clamp_(min=info.smallest_normal).mul_(info.eps)
    # halves keep numbers exact that `dtype` has
    draw = (_random(x, seed).float() + 0.5).mul_(2.0**-16)
    return (x / step).add_(draw).floor_().mul_(step).clamp_(-info.max, info.max)


def _random(x: Tensor, seed: int) -> Tensor:
    """Integers below 2**16, from a generator of their own."""
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.empty(x.shape, dtype=torch.int32, device=x.device).random_(0, 1 << 16, generator=generator)


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
        rank = group.rank()
        self._dtype, self._compression = chunks[0].dtype, compression
        self._lengths = list(arriving) if arriving is not None else [chunks[rank].numel()] * len(chunks)
        seeds = [None if seed is None else seed + rank * len(chunks) + place for place in range(len(chunks))]
        parts = [compression.encode(chunk, chunk_seed) for chunk, chunk_seed in zip(chunks, seeds, strict=True)]
        data = torch.cat(parts)
        self._sent: Tensor | None = data
        self._sizes = [compression.nbytes(length, self._dtype) for length in self._lengths]
        self._arrived = data.new_empty(sum(self._sizes))
        sent = [part.numel() for part in parts]
        self.moved = sum(sent) - sent[rank]
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
        local: a flat tensor.
        lengths: of the flat tensors of all ranks of `group`, in its order.
        group: the ranks.
        compression: of all.
        seed: for random rounding, the same on all ranks; None rounds to the nearest.

    Attributes:
        moved: bytes that this rank sends in a ring.
    """

    def __init__(
        self,
        local: Tensor,
        lengths: Sequence[int],
        group: dist.ProcessGroup,
        compression: Compression,
        *,
        seed: int | None = None,
    ) -> None:
        self._dtype, self._lengths, self._compression = local.dtype, lengths, compression
        self._sizes = [compression.nbytes(length, local.dtype) for length in lengths]
        data, longest = compression.encode(local, None if seed is None else seed + group.rank()), max(self._sizes)
        self._padded = torch.nn.functional.pad(data, (0, longest - data.numel()))
        self._all = data.new_empty(longest * len(lengths))
        self.moved = longest * (len(lengths) - 1)
        self._work: Any = all_gather_single(self._all, self._padded, group=group, async_op=True)

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
        chunks = flat.split(self._lengths)
        self._under_way: CompressedScatter | CompressedGather | None
        self._under_way = CompressedScatter(chunks, group, compression, seed=seed)
        self.moved = self._under_way.moved
        self._total = flat if in_place else torch.empty_like(flat)

    def advance(self) -> bool:
        """There is nothing to free."""
        return True

    def summed(self) -> None:
        """Wait for the summands and send the sum on; a collective, which `wait` calls where nobody did."""
        if isinstance(self._under_way, CompressedScatter):
            local_sum = self._under_way.total().to(self._dtype)  # that of the summands, whose wire both halves take
            seed = None if self._seed is None else self._seed + self._group.size() ** 2
            self._under_way = CompressedGather(local_sum, self._lengths, self._group, self._compression, seed=seed)
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
        return self.is_silent or not self._compression.changes(tensor.dtype)

    def start_sum(self, tensor: Tensor, *, in_place: bool = False) -> Wait:
        """See `TensorGroup`; the memory of `tensor` is left alone."""
        if self._sends_plain(tensor):
            return super().start_sum(tensor, in_place=in_place)
        sent = CompressedSum(tensor.detach().reshape(-1), self.group, self._compression)

        def total() -> Tensor:
            self.wait()
            sent.summed()
            self.wait()
            summed = owned(sent.wait().view(tensor.shape))
            self.moved += sent.moved
            return summed

        return total

    def start_gather(self, local: Tensor, dim: int, lengths: Sequence[int], *, exact: bool = False) -> Wait:
        """See `TensorGroup`."""
        if exact or self._sends_plain(local):
            return super().start_gather(local, dim, lengths, exact=exact)
        detached, dim = local.detach(), dim % local.dim()
        unit = math.prod(size for place, size in enumerate(detached.shape) if place != dim)
        gather = CompressedGather(detached, [unit * length for length in lengths], self.group, self._compression)
        self.moved += gather.moved

        def joined() -> Tensor:
            self.wait()
            rows = zip(gather.wait(), lengths, strict=True)
            return torch.cat([flat.view(with_length(detached.shape, dim, length)) for flat, length in rows], dim)

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


def encoding_of(modality: Modality, kind: Kind) -> Compression | None:
    """Return how a modality's traffic of one kind is compressed; None sends tensors as they are."""
    communication = communication_of(modality)
    name = communication.of(kind)
    if name is None:
        return None
    return Compression(getattr(torch, name), communication.stochastic_rounding and kind == "gradients")
