"""This rank's part of logits, for losses that a user writes over shards of the vocabulary.

Such a loss is the same code in every layout: where a rank has all classes, its shard is the full tensor, and sums over
ranks return their argument. Where context parallel ranks share the tokens, logits are gathered, and the shard is the
full tensor too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.collectives import TensorGroup, copy, reduce
from lightning_mm5d.sharded.tensor import NotYetComputed, Sharded


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
