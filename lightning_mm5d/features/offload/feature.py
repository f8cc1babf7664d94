"""What cannot move, what has nothing to move and what has no room is refused or told; what moves is attached to a run.

Parameters of encoders move where nothing trains them. A host must have room for the parameters and states of all its
ranks; the states of an optimizer are taken to be two for each trained element, as AdamW has them. How large saved
activations are shows the first forward (`moves`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.offload.host_memory import HostMemory, free_memory
from lightning_mm5d.features.offload.moves import Moves, own_names
from lightning_mm5d.features.offload.offloaded_states import OffloadedStates
from lightning_mm5d.plan.data_shards import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.trainer.feature import Attached, Feature, Running

_STATES = 2


class Offload(Feature):
    """The field `Modality.offload`: what is in host memory between its uses."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._bucket_bytes: int = fields["bucket_bytes"]

    def needs_schedule(self, plan: Plan) -> bool:
        """Whether parameters travel along a schedule."""
        return any("parameters" in modality.offloads for modality in plan.modalities.values())

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse what cannot be offloaded, and warn of what has nothing to offload.

        Raises:
            ConfigError: ``parameters`` of a modality of which all are trained, that computes the loss, or with manual
                optimization; more of anything than the memory of a host.
        """
        if not any(modality.offloads for modality in plan.modalities.values()):
            return
        flags = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
        trained = frozenset(name for name, flag in flags.items() if flag)
        for modality in plan.modalities:
            _check_parameters(module, plan, modality, trained)
            _check_use(plan, modality, trained)
        _check_room(module, plan, trained)

    def attach(self, running: Running) -> Attached | None:
        """Move what is named, from now on until the run ends."""
        plan = running.plan
        kinds = {kind for modality in plan.modalities.values() for kind in modality.offloads}
        if not kinds:
            return None
        memory = HostMemory(running.device, min(plan.layout.ranks_per_node, plan.layout.size))
        if "optimizer" in kinds:
            running.optimization.around.append(OffloadedStates(running.module, plan, memory, self._bucket_bytes))
        if kinds == {"optimizer"}:
            return None
        moves = Moves(plan, running.runtime, memory)
        running.engine.around.append(moves)
        moves.rest()
        return _Offloaded(moves)


class _Offloaded(Attached):
    def __init__(self, moves: Moves) -> None:
        self._moves = moves

    def remove(self) -> None:
        """Let go of what is on the host."""
        self._moves.end()


def _names(plan: Plan, modality: str) -> list[str]:
    owners = plan.partition.owners
    return [name for name in plan.shapes if any(key.modality == modality for key in owners.get(name, ()))]


def _check_parameters(module: pl.LightningModule, plan: Plan, modality: str, trained: frozenset[str]) -> None:
    offloads = plan.modalities[modality].offloads
    if "parameters" not in offloads:
        return
    field, got = f"modalities.{modality}.offload", [*offloads]
    others = [one for one in offloads if one != "parameters"] or None
    if modality == plan.partition.loss_modality:
        rule = "Parameters are on the host between the uses of a frozen encoder, and these are used all through a step"
        raise ConfigError(field, got, rule, f"Use {others}")
    names = _names(plan, modality)
    moving = [name for name in names if name in trained]
    if len(moving) == len(names):
        rule = (
            "Frozen parameters are on the host between the uses of an encoder, and all "
            f"{len(names)} parameters of {modality} are trained"
        )
        raise ConfigError(field, got, rule, f"Use {others}, or freeze them with requires_grad_(False)")
    if moving and (plan.modalities[modality].zero_stage or (plan.modalities[modality].dp_shard_size or 1) > 1):
        rule = (
            f"Ranks share nothing of a modality whose parameters are on the host, and {len(moving)} of {len(names)} "
            f"parameters of {modality} are trained, {moving[0]} among them"
        )
        raise ConfigError(field, got, rule, f"Use {others}, zero_stage=0, or freeze all with requires_grad_(False)")
    if not module.automatic_optimization:
        rule = "Parameters travel along a schedule, and manual optimization runs its own backward without one"
        raise ConfigError(field, got, rule, f"Use {others}, or automatic optimization")


def _check_use(plan: Plan, modality: str, trained: frozenset[str]) -> None:
    """Warn of what moves nothing."""
    offloads = plan.modalities[modality].offloads
    if not trained or not trained.isdisjoint(_names(plan, modality)):
        return
    keys = {plan.topology.stage_of[cut.name] for cut in plan.partition.stages[modality]}
    trains = plan.graphs.trains(trained)
    runs_alone = all(len(plan.topology.members[key]) == 1 for key in keys)
    idle = ["optimizer"] if "optimizer" in offloads else []
    if "activations" in offloads and runs_alone and not any(any(trains[key]) for key in keys):
        idle.append("activations")
    if idle:
        rank_zero_warn(
            f"modalities.{modality}.offload: {' and '.join(idle)} of {modality} move nothing to host memory, because "
            "it is frozen" + (" and no backward passes through it" if "activations" in idle else ""),
            stacklevel=5,
        )


def _check_room(module: pl.LightningModule, plan: Plan, trained: frozenset[str]) -> None:
    free = free_memory()
    if free is None:
        return
    layout, sizes = plan.layout, {name: p.element_size() for name, p in module.named_parameters(remove_duplicate=False)}
    needs: dict[int, dict[str, int]] = {}
    for name, rank, elements, modality in _offloaded(plan, trained):
        parts = needs.setdefault(rank // layout.ranks_per_node, {})
        parts[modality] = parts.get(modality, 0) + elements * sizes.get(name, 0)
    for host, by_modality in sorted(needs.items()):
        need, (most, _) = sum(by_modality.values()), max(by_modality.items(), key=lambda item: item[1])
        if need > free:
            first = host * layout.ranks_per_node
            last = min(first + layout.ranks_per_node, layout.size) - 1
            rule = (
                f"Ranks {first} to {last} share a host and would keep {_gib(need)} there, and a host has {_gib(free)} "
                "free"
            )
            fix = "Leave out 'optimizer' or 'parameters', share states with zero_stage=1, or use more hosts"
            raise ConfigError(f"modalities.{most}.offload", [*plan.modalities[most].offloads], rule, fix)


def _offloaded(plan: Plan, trained: frozenset[str]) -> Iterator[tuple[str, int, int, str]]:
    """Yield parameter, rank, elements that this rank keeps on its host for it, and modality."""
    shards = DataShards(plan)
    for modality, options in plan.modalities.items():
        names = own_names(plan, modality) if "parameters" in options.offloads else ()
        yield from (
            (name, rank, _elements(shards.local_shape(name, rank)), modality)
            for name in names
            if name not in trained
            for rank in plan.ownership.ranks_holding(name)
        )
        for name in _names(plan, modality) if "optimizer" in options.offloads else ():
            for rank in plan.ownership.ranks_holding(name) if name in trained else ():
                shape, shard = shards.local_shape(name, rank), shards.of(name, rank)
                yield name, rank, _STATES * _elements(shape if shard is None else shard.own_shape(shape)), modality


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


FEATURE = Offload
