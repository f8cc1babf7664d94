"""What `Modality.memory.activation_checkpointing` says, and which layers it chooses. Imports no torch.

``{items: 16}`` chooses all layers of an encoder; `chunk_size` says how many items they compute at a time.

Layers count from 0, in the order of the modality's list of layers. Stages count in the order in which a microbatch
passes them, whatever the schedule: with ``pp_size=2, pp_chunks=2`` rank 0 has the stages 0 and 2, or 0 and 3 under
``zbv``. Inside of ``per_stage`` the layers of each stage count from 0 again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.groups import path_of, value_of
from lightning_mm5d.config.modality import Modality, decoders_of, for_schedule, loss_modality_of, main_modality_of

SELECTIVE = (
    "aten.linear",
    "aten.matmul",
    "aten.scaled_dot_product_attention",
    "aten.convolution",
    "aten._grouped_mm",
    "aten._scaled_mm",
    "aten._scaled_grouped_mm",
    "higher_order.flex_attention",
    "mm5d.attention",
)
"""The operations whose results ``selective`` keeps: matrix products and attention."""
_APART = {"cp_size": 1, "ep_size": 1, "tp_mode": "1d", "sequence_parallel": False, "interleaved_microbatches": 1}
"""Fields with which ranks compute together on several items, and their values with which they do not."""

_WORDS = ("none", "full", "selective")
_KEYS = ("fraction", "every", "layers", "selective", "per_stage", "items")
_FORMS = (
    "It is 'none', 'full', 'selective', or one of {fraction: 0.5}, {every: 2}, {layers: [0, 1]}, {selective: [...]}, "
    "{per_stage: [...]} and {items: 16}"
)


def check(fields: Mapping[str, Any]) -> None:
    """Refuse what is wrong whatever the model.

    Raises:
        ConfigError: it has another form, or is not one for each stage.
    """
    modalities: Mapping[str, Modality] = fields.get("modalities") or {}
    schedule = fields.get("schedule", "1f1b")
    chunked = for_schedule(modalities, schedule, loss_modality_of(modalities)) if modalities else {}
    for name, modality in chunked.items():
        field, setting = f"modalities.{name}.memory.activation_checkpointing", modality.memory.activation_checkpointing
        if modality.pipeline.pipelines is not None and depends_on_cut(modality):
            rule = "Stages of unlike pipelines hold other layers in each replica"
            raise ConfigError(field, setting, rule, "Name layers: {layers: [0, 1]}")
        _check(field, setting, modality.num_cuts)
        if chunk_size(modality) is not None:
            _check_chunked(name, modality, modalities)


def chunk_size(modality: Modality) -> int | None:
    """Return how many items a call of the encoder computes at a time; None for all."""
    setting = modality.memory.activation_checkpointing
    return setting.get("items") if isinstance(setting, Mapping) else None


def depends_on_cut(modality: Modality) -> bool:
    """Whether the layers that are computed again depend on where the modality is cut."""
    setting = modality.memory.activation_checkpointing
    return isinstance(setting, Mapping) and "per_stage" in setting


def recomputed_layers(
    field: str, setting: str | Mapping[str, Any], sizes: Sequence[int]
) -> tuple[tuple[str, ...] | None, ...]:
    """Return what is kept of each layer: ``{every: 2}`` of 4 layers gives ``(None, (), None, ())``.

    It is None where nothing is computed again; else the operations whose results are kept, maybe none.

    Args:
        field: path of the field.
        setting: what it says, checked by `check`.
        sizes: number of layers of each stage.

    Raises:
        ConfigError: it names a layer that is not there.
    """
    if isinstance(setting, Mapping) and "per_stage" in setting:
        parts = zip(setting["per_stage"], sizes, strict=True)
        chosen = [_chosen(f"{field}.per_stage[{index}]", stage, size) for index, (stage, size) in enumerate(parts)]
        return tuple(operations for part in chosen for operations in part)
    return _chosen(field, setting, sum(sizes))


def _chosen(field: str, setting: str | Mapping[str, Any], count: int) -> tuple[tuple[str, ...] | None, ...]:
    key: str
    value: Any
    key, value = (setting, None) if isinstance(setting, str) else next(iter(setting.items()))
    operations: tuple[str, ...] = ()
    if key == "selective":
        operations = SELECTIVE if value is None else tuple(map(normal_name, value))
    chosen: set[int] = set()
    if key in ("full", "selective", "items"):
        chosen = set(range(count))
    elif key == "fraction":
        wanted = math.ceil(count * value - 1e-9)
        chosen = {index for index in range(count) if (index + 1) * wanted // count > index * wanted // count}
    elif key == "every":
        if value > count:
            rule = f"There are {count} layers, so none of them would be computed again"
            raise ConfigError(f"{field}.every", value, rule, f"Use at most {count}, or 'none'")
        chosen = set(range(value - 1, count, value))
    elif key == "layers":
        for index in value:
            if index >= count:
                rule = f"There are the layers 0 to {count - 1}"
                raise ConfigError(f"{field}.layers", value, rule, f"The nearest to {index} is {count - 1}")
        chosen = set(value)
    return tuple(operations if index in chosen else None for index in range(count))


def normal_name(operation: str) -> str:
    """Return the name of an operation as ``namespace.name``: ``"aten::mm"`` and ``"aten.mm.default"`` are aten.mm."""
    name = operation.removeprefix("torch.ops.").replace("::", ".")
    return ".".join(name.split(".")[:2])


def _check(field: str, setting: object, stages: int) -> None:
    if isinstance(setting, str):
        if setting not in _WORDS:
            raise ConfigError(field, setting, _FORMS, did_you_mean(setting, (*_WORDS, *_KEYS)))
        return
    if not isinstance(setting, Mapping) or len(setting) != 1:
        fix = "Leave one of them" if isinstance(setting, Mapping) else "Use 'full'"
        raise ConfigError(field, setting, _FORMS, fix)
    key, value = next(iter(setting.items()))
    if key not in _KEYS:
        raise ConfigError(field, setting, _FORMS, did_you_mean(key, _KEYS))
    field = f"{field}.{key}"
    if key == "per_stage":
        _check_stages(field, value, stages)
    elif key == "fraction":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            near = min(max(float(value), 0.0), 1.0) if _is_number(value) else 0.5
            raise ConfigError(field, value, "It is the part of the layers, 0 to 1", f"Use {near}")
    elif key in ("every", "items"):
        if not _is_whole(value) or value < 1:
            fix = "Use 2 for every second layer" if key == "every" else "Use 16 for sixteen images at a time"
            raise ConfigError(field, value, "It is a whole number of at least 1", fix)
    elif key == "layers":
        _check_layers(field, value)
    else:
        _check_operations(field, value)


def _check_chunked(name: str, modality: Modality, modalities: Mapping[str, Modality]) -> None:
    field, setting = f"modalities.{name}.memory.activation_checkpointing", modality.memory.activation_checkpointing
    if name == main_modality_of(modalities) or name in decoders_of(modalities):
        rule = "Items are the images, frames or sounds of an encoder, and this modality is none"
        raise ConfigError(field, setting, rule, "Use 'full'")
    for option, usual in _APART.items():
        if (got := value_of(modality, option)) != usual:
            path = path_of(option)
            rule = f"With {path}={got!r} ranks compute together on all items of a call, or on several calls"
            raise ConfigError(field, setting, rule, f"Use {path}={usual!r}, or 'full'")


def _check_stages(field: str, value: object, stages: int) -> None:
    if not isinstance(value, list | tuple):
        raise ConfigError(field, value, "It is a list with one entry for each stage", f"Give {stages} entries")
    if len(value) != stages:
        rule = f"It has one entry for each stage, pp_size * pp_chunks = {stages} in the order of their layers"
        raise ConfigError(field, value, rule, f"Give {stages} entries instead of {len(value)}")
    for index, stage in enumerate(value):
        if isinstance(stage, Mapping) and "per_stage" in stage:
            raise ConfigError(f"{field}[{index}]", stage, "A stage has no stages of its own", "Use 'full' or 'none'")
        if isinstance(stage, Mapping) and "items" in stage:
            rule = "All stages of a modality compute as many items at a time"
            raise ConfigError(f"{field}[{index}]", stage, rule, f"Use {dict(stage)} in place of per_stage")
        _check(f"{field}[{index}]", stage, 1)


def _check_layers(field: str, value: object) -> None:
    if not isinstance(value, list | tuple):
        raise ConfigError(field, value, "It lists indices of layers", f"Use [{value}]" if _is_whole(value) else "[0]")
    for index in value:
        if not _is_whole(index) or index < 0:
            raise ConfigError(field, value, "Layers are counted from 0", f"Use a whole number in place of {index!r}")
        if list(value).count(index) > 1:
            raise ConfigError(field, value, f"Layer {index} is listed twice", "Leave it in once")


def _check_operations(field: str, value: object) -> None:
    if not isinstance(value, list | tuple) or not value:
        rule = "It lists at least one operation whose results are kept"
        raise ConfigError(field, value, rule, "Use for instance ['aten.mm'], or activation_checkpointing: full")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(
            r"\w+\.\w+(\.\w+)?", name.removeprefix("torch.ops.").replace("::", ".")
        ):
            bare = name if isinstance(name, str) and re.fullmatch(r"\w+", name) else "mm"
            rule = "An operation is named with its namespace"
            raise ConfigError(field, name, rule, f"Use for instance 'aten.{bare}'")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
