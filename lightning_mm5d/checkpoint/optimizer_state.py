"""Optimizer state as one process would have it, collected from all ranks and loaded into any layout.

State is saved by the position that the parameter has in the user's own groups. State that is shaped as the local
tensor, or as this rank's own rows of it, is sharded as the parameter is; any other, such as a step count, is equal on
all ranks of the parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mm5d.checkpoint.module_state import HOST, in_host_memory, pieces
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.engine.codec import receive_tree, send_tree
from lightning_mm5d.plan.holdings import Holding, Holdings, narrowed
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.stage.remote import is_placeholder
from lightning_mm5d.storage.files import StateDictSource, TensorSource


class StoredStates(Mapping[int, dict[str, Any]], ABC):
    """The states of an optimizer's parameters by position, of which a tensor is read when it is asked for."""

    @abstractmethod
    def check(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> None:
        """Compare the parameters in each group of `optimizer` with those that were saved.

        Args:
            optimizer: that gets the states.
            groups: that were saved.
            names: of the parameters of `optimizer`, by identity.

        Raises:
            ConfigError: they are others.
        """

    @abstractmethod
    def parts(self, index: int) -> tuple[TensorSource, Mapping[str, str], Mapping[str, Any]]:
        """Return a source, the names of one parameter's tensors in it by key, and other values by key."""


def drop_remote_state(optimizer: Optimizer) -> None:
    """Free what an optimizer keeps for parameters of other ranks; some make state when they are constructed.

    The parameters themselves stay in its groups: every optimizer skips parameters without a gradient, and code that
    looks at the groups sees those of one process.
    """
    for parameter in [p for p in optimizer.state if is_placeholder(p)]:
        del optimizer.state[parameter]


def collect_optimizer(
    optimizer: Optimizer, root: nn.Module, plan: Plan, rank: int, device: torch.device
) -> dict[str, Any]:
    """Return the state dict that the optimizer would have on one process, on rank 0; collective.

    The states of one parameter at a time are gathered, into host memory.

    Args:
        optimizer: of the parameters of `root`, also remote ones. Its state is that of local tensors, also after
            `restore_full`.
        root: the LightningModule.
        plan: all stages.
        rank: global rank.
        device: where messages live.
    """
    names, holdings = names_of(root), Holdings(plan, root)
    full = optimizer.state_dict()
    if not optimizer.param_groups:  # what Lightning has in place of an optimizer where there is none
        return full
    state: dict[int, Any] = {}
    for group, saved in zip(optimizer.param_groups, full["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            name = names.get(id(parameter))
            found_by_rank: dict[int, Any] = {}
            for keeper in (0,) if name is None else holdings.keepers(name):  # rank 0 has what has no name
                rank_state = full["state"].get(index) if rank == keeper else None
                if keeper != 0 and rank == keeper:
                    send_tree(rank_state, 0, device)
                elif keeper != 0 and rank == 0:
                    rank_state = in_host_memory(receive_tree(keeper, device))
                if rank == 0 and rank_state:
                    found_by_rank[keeper] = rank_state
            if found_by_rank:
                held = {} if name is None else {k: holdings.of(name, k, parameter.shape) for k in found_by_rank}
                is_cut = any(holding.owned != holding.full for holding in held.values())
                state[index] = _merged(found_by_rank, held) if is_cut else next(iter(found_by_rank.values()))
    return {**full, "state": state}


def load_optimizers(
    optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], root: nn.Module, plan: Plan, rank: int
) -> None:
    """Load what this rank holds of state dicts of one process, one for each of `optimizers`, as `load_optimizer` does.

    Raises:
        ConfigError: there is another number of states.
    """
    if len(states) != len(optimizers):
        rule = f"A checkpoint holds a state for each optimizer, and there are {len(optimizers)}"
        raise ConfigError("checkpoint.optimizer_states", len(states), rule, "Load a checkpoint of this module")
    for optimizer, state in zip(optimizers, states, strict=True):
        load_optimizer(optimizer, state, root, plan, rank)


def load_optimizer(optimizer: Optimizer, full: Mapping[str, Any], root: nn.Module, plan: Plan, rank: int) -> None:
    """Load what this rank holds of a state dict of one process.

    Args:
        optimizer: of the parameters of `root`.
        full: what `collect_optimizer` returns.
        root: the LightningModule, as it is on this rank.
        plan: all stages.
        rank: global rank.

    Raises:
        ValueError: the groups are not those that it was saved from.
    """
    if not optimizer.param_groups:
        return
    names, holdings, states = names_of(root), Holdings(plan, root), full["state"]
    if isinstance(states, StoredStates):
        states.check(optimizer, full["param_groups"], names)
    state = {}
    for group, saved in zip(optimizer.param_groups, full["param_groups"], strict=False):
        for parameter, index in zip(group["params"], saved["params"], strict=False):
            if index in states and not is_placeholder(parameter):
                name = names.get(id(parameter))
                holding = None if name is None else holdings.of(name, rank, parameter.shape)
                state[index] = _local_state(states, index, holding)
    optimizer.load_state_dict({**full, "state": state})


def _local_state(states: Mapping[int, Any], index: int, holding: Holding | None) -> dict[str, Any]:
    """Return what this rank holds of the state of one parameter."""
    if isinstance(states, StoredStates):
        source, keys, rest = states.parts(index)
    else:
        source = StateDictSource(states[index])
        keys = {key: key for key in source.names()}
        rest = {key: value for key, value in states[index].items() if key not in keys}
    local_state = dict(rest)
    for key, stored in keys.items():
        if holding is None or holding.owned == holding.full or source.shape(stored) != holding.full:
            local_state[key] = source.read(stored)
            continue
        local_state[key] = torch.empty(holding.owned, dtype=source.dtype(stored))
        for held, region in pieces(local_state[key], holding):
            held.copy_(source.read(stored, region))
    return local_state


def _merged(states: Mapping[int, Mapping[str, Any]], held: Mapping[int, Holding]) -> dict[str, Any]:
    """Return the state of a full parameter out of that of the ranks that keep it; zeros for ranks without state."""
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for state in states.values() for key in state):
        values = {rank: state[key] for rank, state in states.items() if state.get(key) is not None}
        tensors = {rank: value for rank, value in values.items() if isinstance(value, Tensor)}
        if tensors and all(value.shape == held[rank].owned for rank, value in tensors.items()):
            shape = next(iter(held.values())).full
            merged[key] = next(iter(tensors.values())).new_zeros(shape, device=HOST)
            for rank, value in tensors.items():
                for local, full in held[rank].parts(held[rank].owned):
                    narrowed(merged[key], full).copy_(narrowed(value, local))
        else:
            merged[key] = next(iter(values.values()), None)
    return merged


def names_of(root: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter, by identity."""
    return {id(parameter): name for name, parameter in root.named_parameters()}
