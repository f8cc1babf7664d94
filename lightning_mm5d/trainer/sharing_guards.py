"""Refuses uses of parameters that replicas share, where a rank shows rows of its own in place of full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data_parallel.shared_parameters import Closed, SharedParameter, SharedParameters
from lightning_mm5d.gradients.parameter_hooks import has_hooks
from lightning_mm5d.plan.holdings import DataShard, DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import Guard
from lightning_mm5d.sharded.removable import Removable


def check_shared(module: pl.LightningModule, plan: Plan) -> None:
    """Refuse modules that do with parameters what cannot be done with rows of them.

    Raises:
        ConfigError: manual optimization; hooks on shared parameters; sparse gradients of them.
    """
    shards = DataShards(plan)
    if not shards.exist:
        return
    if not module.automatic_optimization:
        rule = "Manual optimization runs its own backward, and ranks that share parameters gather them for a step"
        fix = f"Use automatic optimization, or {'ep_size=1' if plan.experts else 'zero_stage=0'}"
        raise ConfigError("automatic_optimization", False, rule, fix)
    sparse = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding) and part.sparse}
    for name, parameter in module.named_parameters():
        ranks = plan.ownership.ranks_holding(name) if name in plan.partition.owners else ()
        shard = next(filter(None, (shards.of(name, rank) for rank in ranks)), None)
        if shard is None:
            continue
        if has_hooks(parameter):
            raise hooked(name, shard)
        if id(parameter) in sparse:
            rule = "Ranks that share a parameter sum gradients of its rows, which are dense"
            raise ConfigError(f"{name}.sparse", True, rule, "Use sparse=False, or zero_stage=0")


def hooked(name: str, shard: DataShard) -> ConfigError:
    """Return the error for a hook on the shared parameter `name`."""
    other = "ep_size=1" if shard.of_experts else "zero_stage=0"
    return ConfigError(
        f"{name}.register_hook",
        "a hook on the gradient",
        "Ranks that share a parameter have the gradients of their rows alone",
        f"Register a hook on a module, change gradients by element in on_before_optimizer_step, or use {other}",
    )


class SharingGuards(Removable):
    """Refuses calls and state dicts of modules while they show rows, until `remove`.

    Args:
        module: of this rank.
        shared: its shared parameters.
        guard: of the values that other ranks have.
    """

    def __init__(self, module: nn.Module, shared: SharedParameters, guard: Guard) -> None:
        self._guard = guard
        for path, part in module.named_modules():
            held = [
                (f"{path}.{name}" if path else name, one)
                for name, parameter in part.named_parameters(recurse=False)
                if (one := shared.get(parameter)) is not None
            ]
            if held:
                self._watch(part, held)

    def _watch(self, part: nn.Module, held: Sequence[tuple[str, SharedParameter]]) -> None:
        def refuse_call(_: nn.Module, args: Any) -> None:
            for name, one in held:
                if not one.is_whole and not self._guard.shows_full:
                    raise self._guard.error(name, "A call outside of a step")

        def refuse_state(_: nn.Module, prefix: str, keep_vars: bool) -> None:
            for name, one in held:
                is_cut = not one.is_whole or isinstance(one.parameter, Closed)
                if not keep_vars and is_cut and not self._guard.shows_full:
                    raise self._guard.error(name, "state_dict()")

        self.changes.callback(part.register_forward_pre_hook(refuse_call).remove)
        self.changes.callback(part.register_state_dict_pre_hook(refuse_state).remove)
