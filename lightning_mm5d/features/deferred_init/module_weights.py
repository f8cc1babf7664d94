"""How the module on each rank comes to the weights that this rank holds, where it was built without memory.

Phases, on all ranks: (1) parameters without memory that other ranks hold become placeholders; (2) the others are made
as on one process, one at a time, from rank 0's random state, and cut to this rank's shards, of which it keeps its own
rows with ``zero_stage=3``; what lies in files is read from there.

It refuses tensors of the meta device that nothing says how to initialise.
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.checkpoint.module_state import load_local
from lightning_mm5d.engine.codec import broadcast_tree
from lightning_mm5d.features.deferred_init.deferred_weights import DeferredWeights, filling, tensors_of
from lightning_mm5d.features.deferred_init.initializers import initialize_meta
from lightning_mm5d.features.deferred_init.pretrained import PretrainedSource
from lightning_mm5d.plan.holdings import Holding, Holdings, narrowed
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import Guard, is_remote
from lightning_mm5d.stage import drop_parameters
from lightning_mm5d.storage.source import TensorSource


class ModuleWeights:
    """The weights of one module on one rank.

    Args:
        module: the LightningModule, before it is cut.
        plan: all stages.
        rank: global rank.
        device: where this rank computes.
        wire: where messages of the default group live.
    """

    def __init__(
        self, module: pl.LightningModule, plan: Plan, rank: int, *, device: torch.device, wire: torch.device
    ) -> None:
        self._module, self._plan, self._rank = module, plan, rank
        self._device, self._wire = device, wire
        stages = (plan.ownership.parameters[key] for key in plan.topology.stages_of(rank))
        self._held = frozenset[str]().union(*stages)
        self._fill, self._holdings = filling(module), Holdings(plan, module)

    def drop_remote(self) -> None:
        """Replace parameters without memory that other ranks hold by placeholders; phase 1."""
        empty = {name for name, parameter in self._module.named_parameters(remove_duplicate=False) if parameter.is_meta}
        guard = Guard(self._plan.ownership.holders)
        drop_parameters(self._module, sorted(empty - self._held), self._device, guard)

    def make(self, weights: DeferredWeights) -> None:
        """Initialise what this rank holds of the recorded weights, and read what lies in files; phase 2, collective.

        Generators are where one process would have them afterwards, unless this process has drawn from them since the
        weights were recorded, or recorded with another state than rank 0.
        """
        own, before = weights.random_state, [generator.get_state() for generator in weights.generators]
        first = broadcast_tree([*own], 0, self._wire) if dist.is_initialized() else own
        weights.materialize(self._module, self._put, random_state=first)
        goes_on = all(map(torch.equal, own, first)) and all(map(torch.equal, own, before))
        for generator, state in zip(weights.generators, () if goes_on else before, strict=False):
            generator.set_state(state)
        if weights.stored:
            self._read(PretrainedSource(weights.stored))

    def _read(self, source: TensorSource) -> None:
        """Give memory to what `source` has, and read what this rank holds of it."""
        there = {*source.names()} & self._module.state_dict(keep_vars=True).keys()
        for names, _, tensor in tensors_of(self._module):
            if tensor.is_meta and not there.isdisjoint(names):
                shape = _kept(self._holding(names, tensor))
                self._fill(names, torch.empty(shape, dtype=tensor.dtype, device=self._device))
        load_local(self._module, source, self._plan, self._rank)

    def _put(self, names: tuple[str, ...], value: Tensor) -> None:
        """Give a tensor without memory what this rank holds of its full value."""
        tensor = _tensor(self._module, names[0])
        if is_remote(tensor):
            return
        value = value.to(tensor.dtype)
        holding = self._holding(names, value)
        if (kept := _kept(holding)) != holding.full:
            cut = value.new_empty(kept)
            for held, full in holding.parts(kept):
                narrowed(cut, held).copy_(narrowed(value, full))
            value = cut
        self._fill(names, value.to(self._device))

    def _holding(self, names: Sequence[str], full: Tensor) -> Holding:
        """What this rank holds of a tensor that it has under any of `names`."""
        name = next((name for name in names if name in self._held), None)
        if name is None:  # every rank has it in full
            shape = tuple(full.shape)
            return Holding(shape, shape, shape, None, 0, None)
        return self._holdings.of(name, self._rank, full.shape)


def _kept(holding: Holding) -> tuple[int, ...]:
    """Return the shape that a rank keeps between steps."""
    return holding.own if holding.rows is not None and holding.rows.stage == 3 else holding.local


def make_in_full(root: nn.Module, recorded: Sequence[DeferredWeights]) -> None:
    """Give all tensors without memory their full values."""
    fill = filling(root)

    def put(names: tuple[str, ...], value: Tensor) -> None:
        fill(names, value.to(_tensor(root, names[0]).dtype))

    for weights in with_unrecorded(root, recorded):
        weights.materialize(root, put)
        stored = weights.stored
        for names, _ in weights.tensors:
            if names[0] in stored:
                put(names, stored[names[0]].read())


def with_unrecorded(root: nn.Module, recorded: Sequence[DeferredWeights]) -> list[DeferredWeights]:
    """Return `recorded`, and how tensors of the meta device are initialised that nobody recorded.

    Raises:
        ConfigError: nothing initialises one of them.
    """
    known = {name for weights in recorded for name in weights.names}
    unknown = [
        names[0]
        for names, kind, tensor in tensors_of(root)
        if kind != "attribute" and tensor.is_meta and known.isdisjoint(names)
    ]
    return [*recorded, *([initialize_meta(root, unknown)] if unknown else [])]


def _tensor(root: nn.Module, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    found = getattr(root.get_submodule(path), attribute)
    assert isinstance(found, Tensor), name
    return found
