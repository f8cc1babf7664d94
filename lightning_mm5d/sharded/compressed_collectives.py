"""Collectives whose messages are compressed. Sums are computed of decoded numbers, in float32 at least.

An all-reduce is a scatter of encoded numbers, a sum in the memory of the rank that gets them, and a gather of the
encoded sums, which all ranks decode: so all have the same result to the bit, the owner of a sum too. Its bytes are
those of a ring.

Each starts when it is made; `wait` returns the result. All ranks of a group make and wait for them in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.layout.even_split import even_lengths
from lightning_mm5d.sharded.compression import Compression


class CompressedScatter:
    """A reduce-scatter.

    Args:
        chunks: for each rank of `group`, in its order, what this rank adds to that rank's sum: flat tensors of one
            dtype, of the same length on all ranks.
        group: the ranks.
        compression: of the chunks.
        exact: how many of the last numbers of each chunk travel as they are.
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
        exact: int = 0,
        seed: int | None = None,
        arriving: Sequence[int] | None = None,
    ) -> None:
        own = group.rank()
        self._dtype, self._exact, self._compression = chunks[0].dtype, exact, compression
        self._lengths = list(arriving) if arriving is not None else [chunks[own].numel()] * len(chunks)
        seeds = [None if seed is None else seed + own * len(chunks) + place for place in range(len(chunks))]
        parts = [self._encoded(chunk, one) for chunk, one in zip(chunks, seeds, strict=True)]
        data = torch.cat(parts)
        self._sent: Tensor | None = data
        self._sizes = [self._size(length) for length in self._lengths]
        self._arrived = data.new_empty(sum(self._sizes))
        sent = [part.numel() for part in parts]
        self.moved = sum(sent) - sent[own]
        self._work: Any = dist.all_to_all_single(self._arrived, data, self._sizes, sent, group=group, async_op=True)

    def free(self) -> None:
        """Free what has been sent; waits for nobody."""
        if self._sent is not None and self._work.is_completed():
            self._sent = None

    def parts(self) -> list[Tensor]:
        """Wait; return the chunk of each rank, decoded."""
        self._work.wait()
        self._sent = None
        found = []
        for data, length in zip(self._arrived.split(self._sizes), self._lengths, strict=True):
            count = length - self._exact
            size = self._compression.nbytes(count, self._dtype)
            part = self._compression.decode(data[:size], count, self._dtype)
            if self._exact:
                part = torch.cat([part, data[size:].clone().view(self._dtype).to(part.dtype)])
            found.append(part)
        return found

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

    def _encoded(self, chunk: Tensor, seed: int | None) -> Tensor:
        if not self._exact:
            return self._compression.encode(chunk, seed)
        numbers, rest = chunk.split([chunk.numel() - self._exact, self._exact])
        return torch.cat([self._compression.encode(numbers, seed), rest.contiguous().view(torch.uint8)])

    def _size(self, length: int) -> int:
        count = length - self._exact
        return self._compression.nbytes(count, self._dtype) + self._exact * self._dtype.itemsize


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
        self._work: Any = dist.all_gather_single(self._all, self._own, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """Return the flat tensors of all ranks as all ranks get them, that of this rank too."""
        self._work.wait()
        rows = zip(self._all.chunk(len(self._lengths)), self._sizes, self._lengths, strict=True)
        return [
            self._compression.decode(data[:size], length, self._dtype).to(self._dtype) for data, size, length in rows
        ]


class CompressedSum:
    """An all-reduce.

    Args:
        flat: of one dim, of the same length and dtype on all ranks.
        group: the ranks.
        compression: of the numbers.
        exact: how many of the last numbers travel as they are, for instance flags.
        seed: for random rounding, the same on all ranks; None rounds to the nearest.
    """

    def __init__(
        self,
        flat: Tensor,
        group: dist.ProcessGroup,
        compression: Compression,
        *,
        exact: int = 0,
        seed: int | None = None,
    ) -> None:
        self._group, self._compression, self._exact, self._seed = group, compression, exact, seed
        numbers, rest = flat.split([flat.numel() - exact, exact])
        self._lengths, self._dtype = even_lengths(numbers.numel(), group.size()), flat.dtype
        chunks = [torch.cat([part, rest]) if exact else part for part in numbers.split(self._lengths)]
        arriving = [self._lengths[group.rank()] + exact] * group.size()
        self._scatter = CompressedScatter(chunks, group, compression, exact=exact, seed=seed, arriving=arriving)
        self._gather: CompressedGather | None = None
        self._rest = rest

    @property
    def moved(self) -> int:
        """Bytes that this rank has sent to others so far."""
        return self._scatter.moved + (0 if self._gather is None else self._gather.moved)

    def gather(self) -> None:
        """Wait for the summands and send the sum on; a collective, which `wait` calls where nobody did."""
        total = self._scatter.total()
        own, self._rest = total.split([total.numel() - self._exact, self._exact])
        seed = None if self._seed is None else self._seed + self._group.size() ** 2
        # of the dtype of the summands, whose wire both halves take
        self._gather = CompressedGather(own.to(self._dtype), self._lengths, self._group, self._compression, seed=seed)

    def wait(self) -> Tensor:
        """Return the sum, as `flat` was."""
        if self._gather is None:
            self.gather()
        assert self._gather is not None
        return torch.cat([*self._gather.wait(), self._rest.to(self._dtype)])
