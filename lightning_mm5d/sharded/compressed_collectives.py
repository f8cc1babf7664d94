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
from lightning_mm5d.sharded.backends import waits_on_device
from lightning_mm5d.sharded.compression import Compression


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
        compression: of its numbers.
        seed: for random rounding, the same on all ranks; None rounds to the nearest.
    """

    def __init__(
        self,
        flat: Tensor,
        group: dist.ProcessGroup,
        compression: Compression,
        *,
        seed: int | None = None,
    ) -> None:
        self._group, self._compression, self._seed = group, compression, seed
        self._lengths, self._dtype = even_lengths(flat.numel(), group.size()), flat.dtype
        arriving = [self._lengths[group.rank()]] * group.size()
        self._scatter = CompressedScatter(flat.split(self._lengths), group, compression, seed=seed, arriving=arriving)
        self._gather: CompressedGather | None = None

    @property
    def moved(self) -> int:
        """Bytes that this rank has sent to others so far."""
        return self._scatter.moved + (0 if self._gather is None else self._gather.moved)

    def gather(self) -> None:
        """Wait for the summands and send the sum on; a collective, which `wait` calls where nobody did."""
        own = self._scatter.total()
        seed = None if self._seed is None else self._seed + self._group.size() ** 2
        # of the dtype of the summands, whose wire both halves take
        self._gather = CompressedGather(own.to(self._dtype), self._lengths, self._group, self._compression, seed=seed)

    def wait(self) -> Tensor:
        """Return the sum, as `flat` was."""
        if self._gather is None:
            self.gather()
        assert self._gather is not None
        return torch.cat(self._gather.wait())
