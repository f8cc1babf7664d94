"""The plan of a run: all that follows from a layout and a partition before anything runs.

How numbers of each kind travel: what a feature makes of what modalities say, and what follows for a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import parts
from lightning_mm5d.config.modality import Modality, most_beside
from lightning_mm5d.context_parallel.hooks.whole_modules import check_layers
from lightning_mm5d.expert_parallel import ExpertLayer
from lightning_mm5d.layout import Layout
from lightning_mm5d.partition import Partition, partition
from lightning_mm5d.partition.compiled import check_compiled, check_scripted
from lightning_mm5d.plan.stage_graph import Ownership, StageGraphs
from lightning_mm5d.plan.topology import Topology
from lightning_mm5d.sharded.collectives import Encoding
from lightning_mm5d.tensor_parallel.plan_lookup import divide
from lightning_mm5d.tensor_parallel.resolve import Division


@dataclass(frozen=True)
class Plan:
    """The stages of all ranks.

    Args:
        layout: which rank is where.
        partition: what is cut where.
        modalities: the configuration.
        sizes: elements of every parameter by name.
        v_shaped: whether chunks lie in a V over the pipeline ranks (``zbv``), 0 1 1 0, instead of in turn, 0 1 0 1.
        division: which parameters tensor parallelism shards, and how.
        shapes: of every full parameter by name.
        experts: those that ranks share, by path of the module that holds them.
        tied: names whose parameter has another name before.
        main_params: dtype of main parameters; None where optimizers step on what layers compute with.
    """

    layout: Layout
    partition: Partition
    modalities: Mapping[str, Modality]
    sizes: Mapping[str, int]
    v_shaped: bool = False
    division: Division = field(default_factory=Division)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    main_params: str | None = None
    experts: Mapping[str, ExpertLayer] = field(default_factory=dict)
    tied: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        layout: Layout,
        modalities: Mapping[str, Modality],
        *,
        v_shaped: bool = False,
        main_params: str | None = None,
    ) -> Plan:
        """Cut `module` and return which rank runs which stage of it.

        Raises:
            ConfigError: the configuration does not fit the module.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        if lazy := next((name for name, p in parameters.items() if is_lazy(p)), None):
            rule = "A lazy module gets its parameters in its first call, and a layout needs their sizes before"
            fix = "Give the module its sizes, or call it in __init__"
            raise ConfigError(lazy, type(parameters[lazy]).__name__, rule, fix)
        dense = parameters | dict(module.named_buffers()) if layout.size > 1 else {}
        if sparse := next((name for name, tensor in dense.items() if tensor.layout != torch.strided), None):
            rule = "Ranks give each other weights and buffers as dense tensors"
            fix = "Make it dense, or delete it where training does not use it (`del whisper.alignment_heads`)"
            raise ConfigError(sparse, f"a tensor of layout {dense[sparse].layout}", rule, fix)
        has_parts = any(axes.tp * axes.pp * axes.cp > 1 for axes in layout.axes.values())
        has_parts = has_parts or any(modality.shared_stage for modality in modalities.values())
        check_scripted(module, modalities, has_parts=has_parts)
        sizes = {name: p.numel() for name, p in parameters.items()}
        tied = frozenset(parameters) - {name for name, _ in module.named_parameters()}
        cut = partition(module, modalities)
        check_layers(modalities, module, cut.layers)
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        plan = cls(layout, cut, modalities, sizes, v_shaped=v_shaped, shapes=shapes, main_params=main_params, tied=tied)
        check_compiled(module, cut, modalities, is_split=bool(plan.topology.edges))
        experts: Mapping[str, ExpertLayer] = next(
            (part.find_experts(module, cut, modalities) for part in parts("experts")), {}
        )
        names = {path: layer.parameters + layer.factors for path, layer in experts.items()}
        return replace(plan, division=divide(module, cut, modalities, names), experts=experts)

    def draws_by_microbatch(self, replicas: Iterable[int]) -> bool:
        """Whether ranks of `replicas` draw random numbers anew for each microbatch, instead of one after another.

        They do where several ranks or stages work for one, and where microbatches run side by side.
        """
        if self.topology.edges:
            return True
        return most_beside(self.modalities) > 1 or any(
            len(self.layout.replica_ranks(number)) > 1 for number in replicas
        )

    def held_dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of a parameter between steps, and of its gradient, given it as layers compute with it."""
        main = parameter.dtype if self.main_params is None else getattr(torch, self.main_params)
        is_main = parameter.requires_grad and parameter.is_floating_point() and main.itemsize > parameter.element_size()
        return main if is_main else parameter.dtype

    @cached_property
    def topology(self) -> Topology:
        """Which rank runs which stages, and the edges between stages."""
        return Topology(self.layout, self.partition, self.modalities, self.v_shaped)

    @cached_property
    def ownership(self) -> Ownership:
        """Which ranks hold which parameter."""
        return Ownership(self.topology, self.sizes, self.division)

    @cached_property
    def graphs(self) -> StageGraphs:
        """Graphs of stages with costs, from which schedules are built."""
        return StageGraphs(self.topology, self.ownership)


Kind = Literal["gradients", "parameters", "payloads", "tensor_parallel"]


def encoding_of(modality: Modality, kind: Kind) -> Encoding | None:
    """Return how a modality's traffic of one kind is encoded; None sends tensors as they are."""
    every = (module.encoding_of(modality, kind) for module in parts("encoding"))
    return next((encoding for encoding in every if encoding is not None), None)


class Traffic(NamedTuple):
    """How what ranks send of a parameter is encoded; None sends it as it is.

    Attributes:
        gradients: in sums.
        parameters: in the gather of rows.
        is_apart: whether it shares no block of numbers with parameters of which `is_apart` is False. Tensor parallel
            ranks hold what they do not shard in full, and sum and gather their copies each by itself. These must stay
            equal to the bit, although beside them in a message each of these ranks has shards of its own.
    """

    gradients: Encoding | None = None
    parameters: Encoding | None = None
    is_apart: bool = False

    @property
    def key(self) -> tuple[str, str, bool]:
        """Equal for parameters that may share a message."""
        return str(self.gradients), str(self.parameters), self.is_apart


def traffic_of(plan: Plan, name: str, ranks: Sequence[int], dtype: torch.dtype) -> Traffic:
    """Return how what `ranks` send each other of a parameter is encoded.

    Modalities that share a parameter and do not say the same of it send it as it is.

    Args:
        plan: all stages.
        name: of the parameter.
        ranks: that sum its gradients.
        dtype: of the parameter.
    """
    stages = dict.fromkeys(plan.topology.stage_of[owner] for owner in plan.partition.owners[name])
    modalities = [plan.modalities[modality] for modality in dict.fromkeys(stage.modality for stage in stages)]

    def of(kind: Kind) -> Encoding | None:
        encodings = {encoding_of(modality, kind) for modality in modalities}
        encoding = encodings.pop() if len(encodings) == 1 else None
        return encoding if encoding is not None and encoding.changes(dtype) else None

    gradients, parameters = of("gradients"), of("parameters")
    copied = name not in plan.division.shards and set(plan.ownership.ranks_holding(name)) != set(ranks)
    return Traffic(gradients, parameters, copied and (gradients or parameters) is not None)
