"""Which layers of each modality are computed again in the backward: what `partition.costs` asks.

It refuses operations that torch does not have, and modalities without layers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import torch

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.recomputation.fields import (
    SELECTIVE,
    chunk_size,
    depends_on_cut,
    normal_name,
    recomputed_layers,
)
from lightning_mm5d.partition.costs import KeptOperations, share_again

__all__ = ["depends_on_cut", "kept_of", "share_of"]

OWN_ATTENTION = "mm5d.attention"
"""The name of the attention of context parallel ranks among operations."""
_MANY = 1000


def kept_of(name: str, modality: Modality, sizes: Sequence[int]) -> tuple[KeptOperations, ...]:
    """Return what is kept of each layer of a modality, as `recomputed_layers`; empty where all of it is.

    Args:
        name: of the modality.
        modality: its configuration.
        sizes: number of layers of each stage.

    Raises:
        ConfigError: it names layers or operations that are not there.
    """
    field, setting = f"modalities.{name}.memory.activation_checkpointing", modality.memory.activation_checkpointing
    if setting == "none" or (not sum(sizes) and chunk_size(modality) is not None):
        return ()
    if not sum(sizes):
        rule = f"{name} has no list of layers, and layers are what is computed again"
        raise ConfigError(field, setting, rule, f"Use 'none', or a list that modalities.{name}.module holds")
    layers = recomputed_layers(field, setting, sizes)
    for operation in {operation for operations in layers for operation in operations or ()}.difference(SELECTIVE):
        _check_operation(field, operation)
    return layers if any(operations is not None for operations in layers) else ()


def share_of(modality: Modality, stage: int) -> float:
    """Return the part of a stage's forward that runs again, of a model of which nothing is known but its stages.

    A stage counts as so many equal layers that all of what is said can be; ``layers`` count as none.
    """
    setting = modality.memory.activation_checkpointing
    if isinstance(setting, Mapping) and "per_stage" in setting:
        setting = setting["per_stage"][stage]
    if isinstance(setting, Mapping) and "every" in setting:
        return 1 / setting["every"]
    if isinstance(setting, Mapping) and "layers" in setting:
        return 0.0
    layers = recomputed_layers("", setting, [_MANY])
    return sum(map(share_again, layers)) / _MANY


def _check_operation(field: str, operation: str) -> None:
    namespace, name = operation.split(".")
    if operation == OWN_ATTENTION or namespace == "higher_order":
        return
    operations = getattr(torch.ops, namespace)
    if hasattr(operations, name):
        return
    names = {*map(normal_name, torch._C._dispatch_get_all_op_names()), *SELECTIVE}
    near = difflib.get_close_matches(operation, sorted(names), n=1, cutoff=0.0)[0]
    rule = "torch has no operation of this name"
    raise ConfigError(f"{field}.selective", operation, rule, f"Did you mean {near!r}? 'selective' keeps {SELECTIVE}")
