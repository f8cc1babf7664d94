"""What becomes of a module whose weights are not gathered after a run: it keeps this rank's shards.

A following run of the same layout in the same processes goes on with them. Everything else is refused by name: another
layout, another process, and any use of the module without a trainer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import FEATURES
from lightning_mm5d.config.groups import value_of
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout import Layout
from lightning_mm5d.partition.parts import tensors_of
from lightning_mm5d.plan.holdings import DataShards, Holdings
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import Guard, Origin, is_remote, make_placeholder
from lightning_mm5d.sharded.removable import Removable

_ATTRIBUTE = "_mm5d_kept_shards"
_FIX = (
    "Call trainer.save_checkpoint on all ranks after the first run, and give a new module's run its path as ckpt_path; "
    'or use checkpoint="full"'
)


@dataclass(frozen=True, eq=False)
class KeptShards(Removable):
    """What a module that keeps shards is a part of.

    Attributes:
        plan: of the run that left them; None in a process that only waited for the ranks.
        process: that holds them.
    """

    plan: Plan | None
    process: int

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptShards:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": None, "process": self.process}

    def guard(self, module: nn.Module, plan: Plan) -> None:
        """Refuse calls of modules with shards and their state dicts, which would have the values of one rank."""
        where, holdings = Guard(plan.ownership.holders), Holdings(plan, module)
        for name, tensor in tensors_of(module):
            if is_remote(tensor) or tensor.shape == holdings.full_shape(name, tensor.shape):
                continue

            def refuse_call(_: nn.Module, args: Any, name: str = name) -> None:
                raise where.error(name, "A call without a trainer")

            owner = module.get_submodule(name.rpartition(".")[0])
            self.changes.callback(owner.register_forward_pre_hook(refuse_call).remove)
            self.changes.callback(refuse_state(owner, name, where))


def refuse_state(owner: nn.Module, name: str, guard: Guard) -> Callable[[], None]:
    """Refuse state dicts of `owner`, which would hold this rank's shard of the tensor `name`; return what ends it."""

    def refuse(_: nn.Module, prefix: str, keep_vars: bool) -> None:
        # checkpoints are collected of the parameters themselves
        if not keep_vars and not guard.shows_full:
            raise guard.error(name, "state_dict()")

    return owner.register_state_dict_pre_hook(refuse).remove


def keep_shards(module: nn.Module, plan: Plan) -> None:
    """Note that `module` keeps the shards that a run of `plan` has left in this process."""
    shards = KeptShards(plan, os.getpid())
    shards.guard(module, plan)
    vars(module)[_ATTRIBUTE] = shards


def has_rows(module: nn.Module, plan: Plan, rank: int) -> bool:
    """Whether the module has own rows of any parameter, as between the steps of a run with ``zero_stage=3``."""
    return bool(_rows(module, plan, rank))


def lose_rows(module: nn.Module, plan: Plan, rank: int) -> None:
    """Turn parameters of which this rank has rows or a shard into placeholders: no rank is left to send the others."""
    guard = Guard(plan.ownership.holders)
    named = [(name, parameter) for name, parameter in module.named_parameters() if name in plan.division.shards]
    shards = [(name, parameter, plan.shapes[name]) for name, parameter in named if not is_remote(parameter)]
    for name, parameter, shape in (*_rows(module, plan, rank), *shards):
        parameter.grad = None
        make_placeholder(parameter, shape, Origin(name, guard))


def _rows(module: nn.Module, plan: Plan, rank: int) -> list[tuple[str, nn.Parameter, tuple[int, ...]]]:
    """Return the parameters of which this rank has rows, with their names and full shapes."""
    if not DataShards(plan).exist:
        return []
    holdings, parameters = Holdings(plan, module), []
    for name, parameter in module.named_parameters():
        if not is_remote(parameter):
            holding = holdings.of(name, rank, parameter.shape)
            if holding.rows is not None and parameter.shape == holding.owned:
                parameters.append((name, parameter, holding.full))
    return parameters


def left_elsewhere(module: nn.Module) -> None:
    """Note that the weights of `module` are in processes that this one has started, and which have ended."""
    vars(module)[_ATTRIBUTE] = KeptShards(None, -1)


def has_kept_shards(module: nn.Module) -> bool:
    """Whether a run has left shards in `module`, in this process or in others."""
    return _ATTRIBUTE in vars(module)


def release_shards(module: nn.Module) -> bool:
    """Give the shards to a run that begins; return whether there are any."""
    shards = vars(module).pop(_ATTRIBUTE, None)
    if shards is not None:
        shards.remove()
    return shards is not None


def refuse_other_processes(module: nn.Module, *, starts_processes: bool) -> None:
    """Refuse a module whose shards other processes than those of the next run hold.

    Raises:
        ConfigError: they are in processes that have ended, or the next run starts others.
    """
    shards: KeptShards | None = vars(module).get(_ATTRIBUTE)
    if shards is not None and (starts_processes or shards.process != os.getpid()):
        rule = 'With checkpoint="sharded" weights stay in the processes of their ranks, and the next run has others'
        raise ConfigError("module", "a module whose weights the last run left in other processes", rule, _FIX)


def kept_plan(
    module: nn.Module,
    layout: Layout,
    modalities: Mapping[str, Modality],
    *,
    v_shaped: bool,
    main_params: str | None = None,
) -> Plan | None:
    """Return the plan whose shards `module` keeps; None where it keeps none.

    Raises:
        ConfigError: they are those of another layout, or in another process.
    """
    shards: KeptShards | None = vars(module).get(_ATTRIBUTE)
    if shards is None:
        return None
    refuse_other_processes(module, starts_processes=False)
    assert shards.plan is not None
    if (shards.plan.layout, shards.plan.modalities, shards.plan.v_shaped) != (layout, modalities, v_shaped):
        rule = 'With checkpoint="sharded" each rank keeps the shards of its layout after a run, and this is another one'
        raise ConfigError("modalities", _named(modalities), rule, f"Use {_named(shards.plan.modalities)}. {_FIX}")
    if shards.plan.main_params != main_params:
        rule = 'With checkpoint="sharded" each rank keeps the shards of its run, and this one has other main parameters'
        raise ConfigError("numerics.main_params", main_params, rule, f"Use {shards.plan.main_params!r}. {_FIX}")
    return shards.plan


def _named(modalities: Mapping[str, Modality]) -> dict[str, Any]:
    sizes = ["dp_size", "tp_size", "pp_size", "cp_size", "zero_stage", "dp_shard_size", "ep_size", "expert_tp_size"]
    return {
        name: {size: value_of(modality, size) for size in sizes}
        | {field: value for feature in FEATURES for field, value in feature.used_fields(modality).items()}
        for name, modality in modalities.items()
    }
