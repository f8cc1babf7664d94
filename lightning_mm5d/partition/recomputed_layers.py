"""Which layers of each modality are computed again in the backward, and what that costs.

It refuses operations that torch does not have, and modalities without layers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.config.recomputation import SELECTIVE, Kept, normal_name, recomputed_layers
from lightning_mm5d.partition.costs import Unit

OWN_ATTENTION = "mm5d.attention"
"""The name of the attention of context parallel ranks among operations."""
_PRODUCTS = {"aten.linear", "aten.matmul", "aten.mm", "aten.addmm"}
_MANY = 1000
_BESIDE_PRODUCTS = 0.1  # of a forward: norms, activations and residuals


def kept_of(name: str, modality: Modality, sizes: Sequence[int]) -> tuple[Kept, ...]:
    """Return what is kept of each layer of a modality, as `recomputed_layers`; empty where all of it is.

    Args:
        name: of the modality.
        modality: its configuration.
        sizes: number of layers of each stage.

    Raises:
        ConfigError: it names layers or operations that are not there.
    """
    field, said = f"modalities.{name}.activation_checkpointing", modality.activation_checkpointing
    if said == "none":
        return ()
    if not sum(sizes):
        rule = f"{name} has no list of layers, and layers are what is computed again"
        raise ConfigError(field, said, rule, f"Use 'none', or a list that modalities.{name}.module holds")
    kept = recomputed_layers(field, said, sizes)
    for operation in {operation for one in kept for operation in one or ()}.difference(SELECTIVE):
        _check_operation(field, operation)
    return kept if any(one is not None for one in kept) else ()


def costed(row: Sequence[Unit], kept: Sequence[Kept]) -> tuple[Unit, ...]:
    """Return the units of a modality with what recomputation adds to the backward of its layers.

    Args:
        row: what runs before its layers, each layer, and what runs after them.
        kept: of `kept_of`.
    """
    if not kept:
        return tuple(row)
    before, *layers, after = row
    again = (
        replace(unit, recomputed=max(unit.recomputed, _share(one))) for unit, one in zip(layers, kept, strict=True)
    )
    return before, *again, after


def recomputed_share(modality: Modality, stage: int) -> float:
    """Return the part of a stage's forward that runs again, of a model of which nothing is known but its stages.

    A stage counts as so many equal layers that all of what is said can be; ``layers`` count as none.
    """
    said = modality.activation_checkpointing
    if isinstance(said, Mapping) and "per_stage" in said:
        said = said["per_stage"][stage]
    if isinstance(said, Mapping) and "every" in said:
        return 1 / said["every"]
    if isinstance(said, Mapping) and "layers" in said:
        return 0.0
    layers = recomputed_layers("", said, [_MANY])
    return sum(map(_share, layers)) / _MANY


def depends_on_cut(modality: Modality) -> bool:
    """Whether the layers that are computed again depend on where the modality is cut."""
    said = modality.activation_checkpointing
    return isinstance(said, Mapping) and "per_stage" in said


def _share(kept: Kept) -> float:
    """The part of a layer's forward that runs again in its backward."""
    if kept is None:
        return 0.0
    return _BESIDE_PRODUCTS if _PRODUCTS.intersection(kept) else 1.0


def _check_operation(field: str, operation: str) -> None:
    namespace, name = operation.split(".")
    if operation == OWN_ATTENTION or namespace == "higher_order":
        return
    found = getattr(torch.ops, namespace)
    if hasattr(found, name):
        return
    known = {*map(normal_name, torch._C._dispatch_get_all_op_names()), *SELECTIVE}
    near = difflib.get_close_matches(operation, sorted(known), n=1, cutoff=0.0)[0]
    rule = "torch has no operation of this name"
    raise ConfigError(f"{field}.selective", operation, rule, f"Did you mean {near!r}? 'selective' keeps {SELECTIVE}")
