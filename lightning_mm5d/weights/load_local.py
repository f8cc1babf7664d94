"""Reads what one rank holds of named tensors: of each parameter the ranges of its own shard, and nothing else.

Checkpoints, folders of weights and state dicts are all read through `load_local`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.sharded.shards import Shard
from lightning_mm5d.storage.source import Region, TensorSource


@dataclass(frozen=True)
class Loaded:
    """What came of loading.

    Attributes:
        missing: names of the module that the source has not.
        unexpected: names of the source that the module has not.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def check(self, root: nn.Module) -> None:
        """Raise RuntimeError, in torch's words, where a name is missing or unexpected."""
        if self.missing or self.unexpected:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(root).__name__}: missing keys {self.missing}, "
                f"unexpected keys {self.unexpected}"
            )


def load_local(root: nn.Module, source: TensorSource, plan: Plan, rank: int) -> Loaded:
    """Copy into `root`, in place, what this rank holds of the tensors of `source`.

    A tied tensor is loaded under the first of its names that the source has, and missing where it has none of them.

    Args:
        root: the LightningModule, as it is on this rank: placeholders, and shards or full tensors.
        source: full tensors under the names of the module.
        plan: all stages.
        rank: global rank.

    Raises:
        RuntimeError: shapes are others.
    """
    expected = {name: value for name, value in root.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    there = set(source.names())
    loaded = {id(value) for name, value in expected.items() if name in there}
    done: set[int] = set()
    for name, value in expected.items():
        if name not in there or id(value) in done:
            continue
        done.add(id(value))
        shard = plan.division.shards.get(name)
        check_shape(root, name, source.shape(name), value, shard)
        if is_remote(value):
            continue
        with torch.no_grad():
            for held, region in pieces(value, shard, plan, name, rank):
                held.copy_(source.read(name, region))
    missing = [name for name, value in expected.items() if id(value) not in loaded]
    return Loaded(missing, sorted(there - expected.keys()))


def pieces(
    value: Tensor, shard: Shard | None, plan: Plan, name: str, rank: int
) -> Iterator[tuple[Tensor, Region | None]]:
    """Yield views of a parameter, each with the region of the full tensor that belongs there; None is all of it.

    Example: a shard of rows 0 to 2 and 6 to 8 of a ``[9, 4]`` weight gives ``value[0:2]`` with ``[(0, 2), (0, 4)]``
    and ``value[2:4]`` with ``[(6, 8), (0, 4)]``.
    """
    if shard is None or shard.is_full(value):
        yield value, None
        return
    offset = 0
    for start, stop in shard.ranges[plan.ownership.shard_index(name, rank)]:
        region = [(0, length) for length in value.shape]
        region[shard.dim] = (start, stop)
        yield value.narrow(shard.dim, offset, stop - start), region
        offset += stop - start


def check_shape(root: nn.Module, name: str, found: tuple[int, ...], value: Tensor, shard: Shard | None) -> None:
    """Raise RuntimeError, in torch's words, where a source has a tensor of another shape than the module."""
    shape = list(value.shape)
    if shard is not None:
        shape[shard.dim] = shard.size
    if list(found) != shape:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(root).__name__}: size mismatch for {name}: the checkpoint "
            f"has {tuple(found)}, the model {tuple(shape)}"
        )
