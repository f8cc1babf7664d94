"""Reads what one rank holds of named tensors: of each parameter its own shard and rows, and nothing else.

Checkpoints, folders of weights and state dicts are all read through `load_local`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_mm5d.plan.holdings import Holding, Holdings, narrowed
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import is_remote
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
    there, holdings = set(source.names()), Holdings(plan, root)
    loaded = {id(value) for name, value in expected.items() if name in there}
    done: set[int] = set()
    for name, value in expected.items():
        if name not in there or id(value) in done:
            continue
        done.add(id(value))
        check_shape(root, name, source.shape(name), holdings.full_shape(name, value.shape))
        if is_remote(value):
            continue
        with torch.no_grad():
            for held, region in pieces(value, holdings.of(name, rank, value.shape)):
                held.copy_(source.read(name, region))
    missing = [name for name, value in expected.items() if id(value) not in loaded]
    return Loaded(missing, sorted(there - expected.keys()))


def pieces(value: Tensor, holding: Holding) -> Iterator[tuple[Tensor, Region | None]]:
    """Yield views of a tensor, each with the region of the full one that belongs there; None is all of it.

    Example: a shard of rows 0 to 2 and 6 to 8 of a ``[9, 4]`` weight gives ``value[0:2]`` with ``[(0, 2), (0, 4)]``
    and ``value[2:4]`` with ``[(6, 8), (0, 4)]``.
    """
    if value.shape == holding.full:
        yield value, None
        return
    for held, full in holding.parts(value.shape):
        yield narrowed(value, held), list(full)


def check_shape(root: nn.Module, name: str, found: tuple[int, ...], expected: Sequence[int]) -> None:
    """Raise RuntimeError, in torch's words, where a source has a tensor of another shape than the module."""
    if tuple(found) != tuple(expected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(root).__name__}: size mismatch for {name}: the checkpoint "
            f"has {tuple(found)}, the model {tuple(expected)}"
        )
