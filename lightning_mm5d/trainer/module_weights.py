"""How the module on each rank comes to the weights that this rank holds, before it is cut.

Phases, on all ranks: (1) tensors with memory get the values of rank 0; (2) parameters without memory that other ranks
hold become placeholders; (3) the others are made as on one process, one at a time, from rank 0's random state, and cut
to this rank's shards; (4) weights in files and state dicts take their place. A module that kept its shards after a run
has phase 4 alone.

It refuses tensors of the meta device that nothing says how to initialise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.checkpoint.module_state import equalize, tensors_of
from lightning_mm5d.checkpoint.shard_shapes import local_shape
from lightning_mm5d.engine.codec import broadcast_tree
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import Guard, is_remote
from lightning_mm5d.stage import drop_parameters
from lightning_mm5d.storage.source import TensorSource
from lightning_mm5d.weights import DeferredWeights
from lightning_mm5d.weights.initializers import initialize_meta
from lightning_mm5d.weights.load_local import load_local
from lightning_mm5d.weights.pretrained import PretrainedSource


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

    def share(self) -> None:
        """Give all ranks the tensors of rank 0 that have memory, phase 1; collective."""
        equalize(self._module, self._wire)

    def drop_remote(self) -> None:
        """Replace parameters without memory that other ranks hold by placeholders; phase 2."""
        empty = {name for name, parameter in self._module.named_parameters(remove_duplicate=False) if parameter.is_meta}
        guard = Guard(self._plan.ownership.holders)
        drop_parameters(self._module, sorted(empty - self._held), self._device, guard)

    def make(self, weights: DeferredWeights) -> None:
        """Initialise what this rank holds of the recorded weights, and read what lies in files; phase 3, collective.

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
            self.load(PretrainedSource(weights.stored), strict=False)

    def load(self, source: TensorSource, *, strict: bool) -> None:
        """Read what this rank holds of `source`, phase 4; raise RuntimeError where names or shapes are others."""
        there = {*source.names()} & self._module.state_dict(keep_vars=True).keys()
        for name, tensor in tensors_of(self._module):
            if name in there and tensor.is_meta:
                shard = self._plan.division.shards.get(name) if name in self._held else None
                index = 0 if shard is None else self._plan.ownership.shard_index(name, self._rank)
                shape = tensor.shape if shard is None else local_shape(tensor.shape, shard, index)
                fill(self._module, [name], tensor, torch.empty(shape, dtype=tensor.dtype, device=self._device))
        loaded = load_local(self._module, source, self._plan, self._rank)
        if strict:
            loaded.check(self._module)

    def _put(self, names: tuple[str, ...], value: Tensor) -> None:
        """Give a tensor without memory what this rank holds of its full value."""
        tensors = [(name, tensor) for name in names if (tensor := _tensor(self._module, name)) is not None]
        name, tensor = next((one for one in tensors if one[0] in self._held), tensors[0])
        if is_remote(tensor):
            return
        shard = self._plan.division.shards.get(name)
        value = value.to(tensor.dtype)
        if shard is not None and name in self._held:
            value = shard.cut(value, self._plan.ownership.shard_index(name, self._rank))
        fill(self._module, [name for name, _ in tensors], tensor, value.to(self._device))


def has_memory(root: nn.Module) -> bool:
    """Whether all parameters and buffers have memory, here or on other ranks."""
    return not any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()))


def make_in_full(root: nn.Module, recorded: Sequence[DeferredWeights]) -> None:
    """Give all tensors without memory their full values."""

    def put(names: tuple[str, ...], value: Tensor) -> None:
        tensor = _tensor(root, names[0])
        if tensor is not None:
            fill(root, names, tensor, value.to(tensor.dtype))

    for weights in with_unrecorded(root, recorded):
        weights.materialize(root, put)
        for name, recipe in weights.stored.items():
            if (tensor := _tensor(root, name)) is not None and tensor.is_meta:
                put((name,), recipe.read(None))


def with_unrecorded(root: nn.Module, recorded: Sequence[DeferredWeights]) -> list[DeferredWeights]:
    """Return `recorded`, and how tensors of the meta device are initialised that nobody recorded.

    Raises:
        ConfigError: nothing initialises one of them.
    """
    known = {name for weights in recorded for name in weights.names}
    unknown = [name for name, tensor in tensors_of(root) if tensor.is_meta and name not in known]
    return [*recorded, *([initialize_meta(root, unknown)] if unknown else [])]


def fill(root: nn.Module, names: Iterable[str], tensor: Tensor, value: Tensor) -> None:
    """Give a parameter or buffer without memory its value, in place, or under `names` where it cannot be changed."""
    made: Any = value
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(value, requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))
    try:
        torch.utils.swap_tensors(tensor, made)
    except RuntimeError:  # something has a weak reference to it
        for name in names:
            path, _, attribute = name.rpartition(".")
            owner = root.get_submodule(path)
            (owner._parameters if attribute in owner._parameters else owner._buffers)[attribute] = made


def _tensor(root: nn.Module, name: str) -> Tensor | None:
    path, _, attribute = name.rpartition(".")
    owner = root.get_submodule(path)
    found = owner._parameters.get(attribute)
    return found if found is not None else owner._buffers.get(attribute)
