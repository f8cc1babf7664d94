"""Functions along the sharded dim of tensors that are sharded by tokens.

Tokens may lie on any rank (`ShardedSequence`), so a view of several sequences as one, a stretch of a sequence and a
loss over tokens are again sharded tensors. With the rules of `operations` these carry a step from the last layer to its
loss without any rank ever having the full tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mm5d.sharded.class_operations import check_targets
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.tensor import Group, Sharded, Sharding, as_sharded

if TYPE_CHECKING:
    from lightning_mm5d.sharded.sequence import ShardedSequence as Tokens


def is_tokens(group: Group) -> TypeGuard[Tokens]:
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


def _viewed(local: Tensor, sizes: Sequence[int], at: int, group: Tokens) -> Sharded:
    local_sizes = [*sizes]
    local_sizes[at] = group.lengths[group.index]
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
    group, own = sharding.group.narrowed(start, stop)
    return _sharding(sharding.dim, group), own


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


def reduced_losses(losses: Tensor, target: Tensor, group: Tokens | None, reduction: str, ignore_index: int) -> Tensor:
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


def _sharding(dim: int, group: Tokens) -> Sharding:
    return Sharding(dim, group.lengths, group.split.size, group)
