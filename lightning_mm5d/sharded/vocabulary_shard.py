"""This rank's part of logits, for losses that a user writes over shards of the vocabulary.

Such a loss is the same code in every layout: where a rank has all classes, its shard is the full tensor, and sums over
ranks return their argument. Where context parallel ranks share the tokens, logits are gathered, and the shard is the
full tensor too.

Rows of zeros after those of a head's weight, so that its products have sizes that kernels of GPUs want.

They exist within a product alone. No parameter has them, and their columns are cut off before anybody sees the logits.

C classes of this rank, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.collectives import TensorGroup, copy, reduce
from lightning_mm5d.sharded.tensor import NotYetComputed, Sharded


@dataclass(frozen=True)
class Columns:
    """The classes of each tensor parallel rank, one after the other.

    Attributes:
        lengths: their number on each rank.
        group: the ranks.
        multiple: of which the number of columns in a product is one, with columns of zeros that are cut off again.
    """

    lengths: tuple[int, ...]
    group: TensorGroup
    multiple: int = 1


def padded_rows(x: Tensor, multiple: int) -> Tensor:
    """Return `x` ``[C, ...]`` with zeros after its rows, up to a multiple of `multiple`; itself where it is one."""
    missing = -x.shape[0] % multiple
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, missing)) if missing else x


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, multiple: int) -> Tensor:
    """Return ``x @ weight.T + bias``: ``[..., C]``, a view of a product with padded rows where C is no multiple.

    Args:
        x: ``[..., D]``.
        weight: ``[C, D]``.
        bias: ``[C]``.
        multiple: of which the number of rows in the product is one.
    """
    found = F.linear(x, padded_rows(weight, multiple), None if bias is None else padded_rows(bias, multiple))
    return without_padding(found, -1, weight.shape[0])


def without_padding(x: Tensor, dim: int, length: int) -> Tensor:
    """Return the first `length` entries of `x` along `dim`, a view; `x` itself where these are all."""
    return x if x.shape[dim] == length else x.narrow(dim, 0, length)


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """The classes of one rank. Made by `vocabulary_shard`.

    Attributes:
        logits: of this rank's classes, ``[..., stop - start]``: a plain tensor, to which gradients flow.
        start: first class of this rank.
        stop: the class after its last one.
        size: number of classes of all ranks.
    """

    logits: Tensor
    start: int
    stop: int
    size: int
    _group: TensorGroup | None = None

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' `x`, equal on all of them; its gradient is that of each summand."""
        return x if self._group is None else reduce(x, self._group)

    def max(self, x: Tensor) -> Tensor:
        """Return the maximum over the ranks' `x`, element by element and without a gradient."""
        return x.detach() if self._group is None else self._group.max(x)

    def copy(self, x: Tensor) -> Tensor:
        """Return `x`, equal on all ranks, for work on `logits`: its gradients, which are partial, are summed."""
        return x if self._group is None else copy(x, self._group)


def vocabulary_shard(logits: Tensor) -> VocabularyShard:
    """Return this rank's classes of `logits`, their range, and sums over the ranks that share the vocabulary.

    All ranks that share it must call the same of its methods in the same order. The loss that comes of it must be equal
    on all of them.

    Args:
        logits: as a head returned them, ``[..., C]``; on one process any tensor.

    Raises:
        ConfigError: `logits` is no tensor.
    """
    if not isinstance(logits, Tensor):
        rule = "It takes the logits of a head, a tensor with the classes in its last dim"
        raise ConfigError("vocabulary_shard", type(logits).__name__, rule, "Pass output.logits")
    if isinstance(logits, NotYetComputed):
        logits = logits.computed()
    if not isinstance(logits, Sharded):
        return VocabularyShard(logits=logits, start=0, stop=logits.shape[-1], size=logits.shape[-1])
    dim, lengths, size, group = logits.sharding
    if dim != -1 or not isinstance(group, TensorGroup):
        return vocabulary_shard(logits.full())
    start = sum(lengths[: group.index])
    return VocabularyShard(logits=logits.local, start=start, stop=start + lengths[group.index], size=size, _group=group)
