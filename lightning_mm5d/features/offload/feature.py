"""What cannot move, what has nothing to move and what has no room is refused or told; what moves is attached to a run.

Parameters of encoders move where nothing trains them. A host must have room for the parameters and states of all its
ranks; the states of an optimizer are taken to be two for each trained element, as AdamW has them. How large saved
activations are shows the first forward (`moves`).

States of optimizers come back when the gradients of a step are there, and leave when the optimizer has stepped. An
optimizer of torch's own that updates each parameter by itself steps on some parameters at a time: the device holds the
states of these, and of the next ones, which are fetched meanwhile. Of any other the device holds all states during its
step, because it may look at several parameters at once or count its calls.

Between steps a state is an ordinary tensor in host memory, which checkpoints read and a load replaces. Small tensors
(step counters) stay, and so do tensors within lists and dicts and those of classes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.features.offload.moves import SMALLEST, HostMemory, Moves, Stored, free_memory, gib, own_names
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.stage import is_placeholder
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.optimization import AroundUpdates

_BY_PARAMETER = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop),
    *(optim.Rprop, optim.SGD),
)


class OffloadedStates(AroundUpdates):
    """States of the optimizers of one rank.

    Args:
        module: the user's module.
        plan: all stages.
        memory: of this rank's host.
        bucket_bytes: bytes of the parameters that an optimizer steps on at a time.
    """

    def __init__(self, module: nn.Module, plan: Plan, memory: HostMemory, bucket_bytes: int) -> None:
        names = {name for name, modality in plan.modalities.items() if "optimizer" in modality.offloads}
        self._memory, self._bucket_bytes = memory, bucket_bytes
        # parameters keep their identity for as long as a run lasts
        self._parameters = {
            id(parameter)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if not names.isdisjoint(plan.partition.users(name))
        }
        self._stored: dict[tuple[int, Any], Stored] = {}
        self._leaving: list[Stored] = []
        self._is_whole = True  # whether the step that runs is on all parameters at once

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Generator[None, None, None]:
        """Keep the states of an optimizer on the host after its step, and during it while nothing needs them."""
        buckets, step = self._buckets(optimizer), optimizer.step
        self._is_whole = not buckets
        if not buckets:
            yield
        else:
            take_away = put(optimizer, "step", lambda closure=None: self._step(optimizer, step, buckets, closure))
            try:
                yield
            finally:
                take_away()
        self.begin([optimizer])

    def ready(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        """Have the states of an optimizer that steps on all parameters at once."""
        if self._is_whole:
            self._arrive(optimizer, self._parameters)

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Keep the states of `optimizers` on the host, also those that a checkpoint has brought."""
        for optimizer in optimizers:
            self._leave(optimizer, self._parameters)
        while self._leaving:
            self._leaving.pop().wait()

    def _step(self, optimizer: Optimizer, step: Callable[..., Any], buckets: list[set[int]], closure: Any) -> Any:
        """What an optimizer's `step` does, some parameters at a time."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        groups = optimizer.param_groups
        self._fetch(optimizer, buckets[0])
        try:
            for bucket, following in zip(buckets, [*buckets[1:], set[int]()], strict=True):
                self._arrive(optimizer, bucket)
                self._fetch(optimizer, following)
                parts = [{**group, "params": [p for p in group["params"] if id(p) in bucket]} for group in groups]
                optimizer.param_groups = [part for part in parts if part["params"]]
                step()
                self._leave(optimizer, bucket)
        finally:
            optimizer.param_groups = groups
        return result

    def _buckets(self, optimizer: Optimizer) -> list[set[int]]:
        """The parameters of an optimizer, as many as it steps on at a time; none where it steps on all at once."""
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        if not self._parameters or type(optimizer) not in _BY_PARAMETER:
            return []
        if any(private(optimizer, name) for name in hooks):  # a user's, which expect one call
            return []
        buckets, size = [set[int]()], 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if is_placeholder(parameter):
                    continue
                if size >= self._bucket_bytes:
                    buckets.append(set())
                    size = 0
                buckets[-1].add(id(parameter))
                size += parameter.numel() * parameter.element_size()
        return buckets if len(buckets) > 1 else []

    def _leave(self, optimizer: Optimizer, parameters: set[int]) -> None:
        for parameter, state in self._states(optimizer, parameters):
            for key, value in state.items():
                if self._is_moved(value) and not self._is_away(parameter, key, value):
                    stored = self._memory.store(value)
                    self._stored[id(parameter), key] = stored
                    self._leaving.append(stored)
                    state[key] = stored.host

    def _fetch(self, optimizer: Optimizer, parameters: set[int]) -> None:
        for place, _ in self._away(optimizer, parameters):
            self._stored[place].fetch()

    def _arrive(self, optimizer: Optimizer, parameters: set[int]) -> None:
        self._fetch(optimizer, parameters)
        for (parameter, key), state in self._away(optimizer, parameters):
            state[key] = self._stored.pop((parameter, key)).take()

    def _away(self, optimizer: Optimizer, parameters: set[int]) -> Iterator[tuple[tuple[int, Any], dict[Any, Any]]]:
        """The places of tensors that are on the host, as in `_stored`, with the states that they are of."""
        for parameter, state in self._states(optimizer, parameters):
            for key, value in state.items():
                if self._is_away(parameter, key, value):
                    yield (id(parameter), key), state

    def _states(self, optimizer: Optimizer, parameters: set[int]) -> Iterator[tuple[Tensor, dict[Any, Any]]]:
        """The states of those of `parameters` whose states move."""
        for parameter, state in getattr(optimizer, "state", {}).items() if self._parameters else ():
            if id(parameter) in parameters and id(parameter) in self._parameters and isinstance(state, dict):
                yield parameter, state

    def _is_away(self, parameter: Tensor, key: Any, value: Any) -> bool:
        stored = self._stored.get((id(parameter), key))
        return stored is not None and stored.host is value

    def _is_moved(self, value: Any) -> bool:
        return (
            type(value) is Tensor
            and value.device.type == self._memory.device.type
            and value.numel() * value.element_size() >= SMALLEST
        )


_STATES = 2


class Offload(Feature):
    """The field `Modality.memory.offload`: what is in host memory between its uses."""

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
        return moves


def _names(plan: Plan, modality: str) -> list[str]:
    return [name for name in plan.shapes if modality in plan.partition.users(name)]


def _check_parameters(module: pl.LightningModule, plan: Plan, modality: str, trained: frozenset[str]) -> None:
    offloads, sharding = plan.modalities[modality].offloads, plan.modalities[modality].sharding
    if "parameters" not in offloads:
        return
    field, got = f"modalities.{modality}.memory.offload", [*offloads]
    others = [kind for kind in offloads if kind != "parameters"] or None
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
    if moving and (sharding.zero_stage or (sharding.dp_shard_size or 1) > 1):
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
            f"modalities.{modality}.memory.offload: {' and '.join(idle)} of {modality} move nothing to host memory, "
            "because it is frozen" + (" and no backward passes through it" if "activations" in idle else ""),
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
                f"Ranks {first} to {last} share a host and would keep {gib(need)} there, and a host has {gib(free)} "
                "free"
            )
            fix = "Leave out 'optimizer' or 'parameters', share states with zero_stage=1, or use more hosts"
            raise ConfigError(f"modalities.{most}.memory.offload", [*plan.modalities[most].offloads], rule, fix)


def _offloaded(plan: Plan, trained: frozenset[str]) -> Iterator[tuple[str, int, int, str]]:
    """Yield parameter, rank, elements that this rank keeps on its host for it, and modality."""
    shards = DataShards(plan)
    for modality, options in plan.modalities.items():
        names = own_names(plan, modality) if "parameters" in options.offloads else ()
        yield from (
            (name, rank, math.prod(shards.local_shape(name, rank)), modality)
            for name in names
            if name not in trained
            for rank in plan.ownership.ranks_holding(name)
        )
        for name in _names(plan, modality) if "optimizer" in options.offloads else ():
            for rank in plan.ownership.ranks_holding(name) if name in trained else ():
                shape, shard = shards.local_shape(name, rank), shards.of(name, rank)
                yield name, rank, _STATES * math.prod(shape if shard is None else shard.own_shape(shape)), modality


FEATURE = Offload
