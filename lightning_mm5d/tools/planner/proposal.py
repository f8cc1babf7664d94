"""What a search proposes: plans of other layouts of a module, and modalities as a file says them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality, PipelineTemplate, decoders_of
from lightning_mm5d.features.shared_experts.experts import find_experts
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import partition
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tensor_parallel.division import divide
from lightning_mm5d.tensor_parallel.resolve import Division


def check_searched(modalities: Mapping[str, Modality]) -> None:
    """Refuse modalities that no search lays out.

    Raises:
        ConfigError: a modality runs after the language model, or replicas are unlike.
    """
    if decoders := decoders_of(modalities):
        rule = f"The search places encoders before one modality, and {', '.join(decoders)} runs after that"
        raise ConfigError("modalities", list(modalities), rule, "Choose sizes by hand; mm5d simulate compares them")
    for name, modality in modalities.items():
        kind = modality.activation_checkpointing
        for field, lists in (
            ("feeds", isinstance(modality.feeds, list)),
            ("activation_checkpointing", "per_stage" in kind),
        ):
            if lists:
                rule = "It lists stages, and the search chooses their number"
                fix = "Use 'first' or 'all'" if field == "feeds" else "Use a fraction, such as {fraction: 0.5}"
                raise ConfigError(f"modalities.{name}.{field}", getattr(modality, field), rule, fix)
        if modality.lengths or modality.speeds is not None:
            field = "pipelines" if modality.lengths else "speeds"
            rule = "The search lays out replicas that are equal"
            fix = "Leave it unset for the search"
            raise ConfigError(f"modalities.{name}.{field}", getattr(modality, field), rule, fix)


def plan_maker(plan: Plan, module: nn.Module) -> Callable[[Mapping[str, Modality]], Plan]:
    """Return what makes the plan of other modalities on the ranks of `plan`; what tensor parallelism makes is kept."""
    divisions: dict[object, Division] = {}

    def plan_of(modalities: Mapping[str, Modality]) -> Plan:
        layout = Layout.build(
            modalities,
            world_size=plan.layout.size,
            loss_modality=plan.partition.loss_modality,
            ranks_per_node=plan.layout.ranks_per_node,
        )
        cut = partition(module, modalities)
        experts = find_experts(module, cut, modalities)
        key = tuple(
            (one.tp_mode, one.tp_depth, one.tp_size, one.expert_tp_size, experts != {}) for one in modalities.values()
        )
        if key not in divisions:
            names = {path: layer.parameters for path, layer in experts.items()}
            divisions[key] = divide(module, cut, modalities, names)
        made = replace(plan, layout=layout, partition=cut, modalities=modalities)
        return replace(made, division=divisions[key], experts=experts)

    return plan_of


def said_of(modality: Modality, instead_of: Modality) -> dict[str, Any]:
    """Return the fields that are not at their defaults, or were not, as plain values.

    A LightningCLI lays one file over another field by field, so what is no longer set must be said too.
    """
    said: dict[str, Any] = {}
    for field in fields(modality):
        value, before = getattr(modality, field.name), getattr(instead_of, field.name)
        if isinstance(value, PipelineTemplate):
            had_offsets = before is not None and before.offsets is not None
            said[field.name] = {"stages": value.stages, **({"offsets": None} if had_offsets else {})}
        elif value != field.default or before != field.default:
            said[field.name] = value
    return said
