"""The module of one rank: without the parameters of other ranks, its layers sharded, its callables patched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_mm5d.config.features import part_of
from lightning_mm5d.context_parallel.hooks.apply import ContextParallel
from lightning_mm5d.context_parallel.hooks.layer_attention import Interface
from lightning_mm5d.context_parallel.hooks.layer_tensors import Ranks
from lightning_mm5d.engine.run_groups import RunGroups
from lightning_mm5d.expert_parallel import Experts
from lightning_mm5d.partition.compiled import is_compiled, is_compiled_in_place
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.host_copies import HostCopies
from lightning_mm5d.sharded.remote_value import Guard
from lightning_mm5d.sharded.removable import Removable
from lightning_mm5d.sharded.torch_internals import writes_counted
from lightning_mm5d.stage import Patches, Runtime, StageView, TorchEncoders, drop_parameters, views
from lightning_mm5d.tensor_parallel.apply import TensorParallel
from lightning_mm5d.trainer.feature import Feature
from lightning_mm5d.trainer.kept_shards import refuse_state


class CutModule(Removable):
    """Cuts a module down to the stages of one rank, until `remove`.

    Phases: (1) parameters that this rank does not hold become placeholders; (2) layers are sharded over tensor parallel
    ranks; (3) features stand before layers, as to compile them; (4) sequences are sharded over context parallel
    ranks; (5) what features stand before is patched, then other
    callables; (6) the hidden states between layers are sharded, with ``sequence_parallel``.

    Args:
        module: full or as this rank holds it, and equal on all ranks.
        plan: all stages.
        groups: of this rank.
        rank: global rank.
        device: where this rank computes.
        splits_backward: whether the schedule may split backwards.
        features: of the strategy.

    Attributes:
        views: this rank's stages.
        runtime: what runs of the module need.
        experts: that this rank shares; None without any.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        plan: Plan,
        groups: RunGroups,
        *,
        rank: int,
        device: torch.device,
        splits_backward: bool,
        features: Sequence[Feature],
    ) -> None:
        self._module, self._plan, self._groups, self._rank, self._device = module, plan, groups, rank, device
        stages = {key: plan.ownership.parameters[key] for key in plan.topology.stages_of(rank)}
        held = frozenset[str]().union(*stages.values())
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        guard = Guard(plan.ownership.holders, module.parameters)
        drop_parameters(module, [name for name in names if name not in held], device, guard)
        self._tensor: TensorParallel | None = None
        if groups.tensor:
            sharded = [name for name, group in plan.division.groups.items() if group in groups.tensor]
            for name in sharded:
                if name in held and name in plan.division.shards:
                    self.changes.callback(refuse_state(module.get_submodule(name.rpartition(".")[0]), name, guard))
            self._tensor = TensorParallel(
                module,
                plan.division,
                groups.tensor,
                lines=groups.lines,
                rings=[
                    name for name, modality in plan.modalities.items() if modality.tensor.sequence_parallel == "ring"
                ],
                holds=held.__contains__,
                device=device,
            )
            self.changes.callback(self._tensor.remove)
        encoders = TorchEncoders(module, () if self._tensor is None else plan.division.roles)
        self.changes.callback(encoders.remove)
        every = views(plan.partition, plan.topology.members, plan.topology.consumes, plan.topology.consumers)
        self.views: dict[StageKey, StageView] = {key: every[key] for key in stages}
        layers = self._own_layers()
        for feature in features:
            if remove := feature.layers(module, layers, plan, lambda: self.runtime.in_lock_step):
                self.changes.callback(remove)
        # compiled code would be compiled again for what watches functions around it
        compiles = any(modality.compute.compile for modality in plan.modalities.values())
        self._is_compiled = compiles or any(
            is_compiled(part) or is_compiled_in_place(part) for part in module.modules()
        )
        self._interface = Interface() if groups.context else None
        if self._interface is not None:
            self.changes.callback(self._interface.remove)
        self._host = HostCopies() if self._interface is None else self._interface.caches.host
        self._context = {name: self._share_sequences(name, held) for name in groups.context}
        self.runtime = Runtime(
            module,
            plan.partition,
            {self.views[key]: names for key, names in stages.items()},
            guard,
            tensor=self._tensor,
            sharing=groups.sharing,
            context=self._context,
        )
        self.experts: Experts | None = None
        if groups.experts:
            shards = DataShards(plan)
            self.experts = part_of("experts").EXPERTS(
                module,
                {key: shards.expert_layers(key) for key in stages},
                groups.experts,
                device=device,
                is_dry=lambda: guard.is_dry,
                is_compiled=self._is_compiled,
            )
            self.changes.callback(self.experts.remove)
            self.runtime.experts = self.experts
        for feature in features:
            if remove := feature.cut(self.runtime, plan, device):
                self.changes.callback(remove)
        if plan.topology.edges or groups.sharing:
            self.changes.callback(Patches(self.runtime, defers=splits_backward).remove)
        if self.host_copies() is self._host:
            self.changes.callback(self._host.watch_collectives())
        self.changes.callback(guard.close)
        self._shard_hidden_states()

    def host_copies(self) -> AbstractContextManager[Any]:
        """Enter where steps compute masks of a batch, so that the host knows them.

        Models of transformers ask on the host whether a batch is padded, once for each microbatch and stage.
        """
        return nullcontext() if self._device.type == "cpu" or self._is_compiled else self._host

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Enter where a batch moves to the device, so that the host knows it while nobody writes to it."""
        with self.host_copies() as host, nullcontext() if host is None else writes_counted():
            yield

    def _own_layers(self) -> dict[str, list[str]]:
        """The paths of this rank's layers, by modality."""
        parts, paths = self._plan.partition.parts, dict[str, list[str]]()
        for view in self.views.values():
            for name, cut in view.cuts.items():
                paths.setdefault(name, []).extend(parts[name].paths[cut.first : cut.last])
        return paths

    def _share_sequences(self, name: str, held: frozenset[str]) -> ContextParallel:
        """Share the sequences of a modality's layers over context parallel ranks; `held` are this rank's parameters."""
        plan, context = self._plan, self._groups.context[name]
        layers = plan.partition.layers[name]
        assert layers is not None, f"{name} has no layers whose sequences could be shared"
        assert self._interface is not None
        degree = context.whole.size
        averaged = {
            id(parameter)
            for parameter_name, parameter in self._module.named_parameters(remove_duplicate=False)
            if parameter_name in held and plan.ownership.cp_degree(parameter_name, self._rank) == degree
        }
        shared = ContextParallel(
            name,
            plan.modalities[name],
            self._module,
            layers,
            Ranks(context, self._groups.sharing[name], self._groups.tensor.get(name)),
            averages=lambda x: id(x) in averaged,
            interface=self._interface,
            active=lambda: self.runtime.active,
            device=self._device,
        )
        self.changes.callback(shared.remove)
        return shared

    def _shard_hidden_states(self) -> None:
        for name, modality in self._plan.modalities.items():
            layers = self._plan.partition.layers[name]
            if (
                modality.tensor.sequence_parallel
                and name in self._groups.tensor
                and name not in self._context
                and layers
            ):
                assert self._tensor is not None
                self._tensor.divide_sequences(self._module.get_submodule(layers), name)
