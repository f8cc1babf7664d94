"""The list of features: what only some runs need, each in a place of its own below ``lightning_mm5d/features``.

The core imports no feature. It goes through this list, in this order, and calls what the package of each defines:

- ``fields.py`` checks what a user says, without torch; its ``why_not_side_by_side``, if any, says why the stages of a
  modality cannot compute microbatches side by side;
- ``construction.py`` says how modules are built (`trainer.construction.Construction`);
- ``pipelines.py`` and ``dealing.py`` check unlike replicas, cut their layers and deal samples out to them;
- ``experts.py`` finds experts that ranks share, and brings tokens to them (`expert_parallel.Experts`);
- ``checkpoints.py`` says how checkpoints are saved and loaded that are folders (`trainer.checkpoints.Checkpoints`);
- ``costs.py`` says which layers run again in their backward (`partition.costs`);
- ``layers_in_blocks.py`` divides layers over tensor parallel ranks (`tensor_parallel.plan_lookup.OtherDivision`);
- ``schedules.py`` builds schedules by name (`schedule.builders`);
- ``sharding_plans.py`` says how layers of known models are sharded (`tensor_parallel.family_plans`);
- ``remaining.py`` finds what is left of an epoch that another layout began (`data.resumable`);
- ``encoding.py`` says how numbers travel (`sharded.collectives.Encoding`);
- ``feature.py`` has the hooks of a run (`trainer.feature.Feature`).

A feature that has one of these files alone is that file, under its own name. One that is not there is left out, and a
field of its own that is set is refused: deleting a folder deletes a feature.

Converters of other systems' configurations are no features: what reads these registers itself (`register_converter`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import path_of, value_of

_PACKAGES = "lightning_mm5d.features"


class Registered(NamedTuple):
    """One feature.

    Attributes:
        name: of its package, or of its module where it is one.
        part: which part a feature is that is a module.
        options: what a user says of it to the strategy, with the values that leave it out.
        modality: what a user says of it to a modality, with the values that leave it out.
        by_rank: options whose values may differ between ranks, which compare only whether they are set.
        builds: whether it builds modules, and gives values to tensors without memory.
        schedules: names of schedules that it builds.
        saves: whether it saves and loads checkpoints that are folders.
    """

    name: str
    options: Mapping[str, Any] = {}
    modality: Mapping[str, Any] = {}
    by_rank: tuple[str, ...] = ()
    builds: bool = False
    schedules: tuple[str, ...] = ()
    saves: bool = False
    part: str = "feature"

    def used_fields(self, modality: object) -> dict[str, Any]:
        """Return what `modality` says of the feature, without values that leave it out."""
        values = {field: value_of(modality, field) for field in self.modality}
        return {field: value for field, value in values.items() if value != self.modality[field]}


FEATURES = (
    Registered("unlike_pipelines", modality={"pipelines": None, "speeds": None}),
    Registered("deferred_init", builds=True),
    Registered("auto_schedule", schedules=("auto",), part="schedules"),
    Registered("compile", modality={"compile": False}),
    Registered("fused_heads", modality={"fused_linear_cross_entropy": False}),
    Registered("recomputation", modality={"activation_checkpointing": "none"}),
    Registered("full_views"),
    Registered("refusals"),
    Registered("lost_writes"),
    Registered("empty_calls"),
    Registered("interleaving", modality={"interleaved_microbatches": 1}),
    Registered("joined_calls", modality={"microbatches_per_call": 1}),
    Registered("offload", modality={"offload": None}),
    Registered("grids", modality={"tp_mode": "1d", "tp_depth": 1}),
    Registered("shared_experts", modality={"ep_size": 1, "expert_tp_size": 1}),
    Registered("compressed_communication", modality={"communication_dtype": None}),
    Registered("kernels", modality={"kernels": None}),
    Registered("cached_features", modality={"cache_features": None}),
    Registered("balanced_microbatches", {"balance": False}),
    Registered("start_summary"),
    Registered("averages"),
    Registered("sample_proof"),
    Registered("kept_casts"),
    Registered("sharding_plans", part="sharding_plans"),
    Registered("elastic", part="remaining"),
    Registered("huggingface_record"),
    Registered("lock_step"),
    Registered("first_batch"),
    Registered("row_indices"),
    Registered("weight_writes"),
    Registered("shard_reads"),
    Registered("kept_in_parts"),
    Registered("own_reads"),
    Registered("nonfinite", {"on_nonfinite": "propagate"}),
    Registered("measured_costs"),
    Registered("device_figures"),
    Registered("throughput"),
    Registered(
        "sharded_checkpoints",
        {
            "checkpoint_format": "full",
            "async_checkpoint": False,
            "on_corrupt_checkpoint": "raise",
            "in_memory_every_n_steps": None,
        },
        saves=True,
    ),
    Registered("timeline", {"timeline": None}, by_rank=("timeline",)),
    Registered("copied_modules"),
)
"""In the order in which they are checked and attached, the last one after all that others put into modules; they are
removed in the reverse one."""


@cache
def parts(part: str) -> tuple[ModuleType, ...]:
    """Return the module `part` of each feature that is there and has one, in the order of the list.

    Kept for the process, as modules are: plans ask for each parameter, and a look at the files takes longer than those.
    """
    names = (_place(feature, part) for feature in FEATURES)
    return tuple(import_module(name) for name in names if name is not None)


def schedules() -> list[str]:
    """Return the names of schedules that features build which are there."""
    return [name for feature in FEATURES if _spec(feature) is not None for name in feature.schedules]


def part_of(part: str) -> ModuleType:
    """Return the module `part` of the one feature that has it, which something of its own that is set needs."""
    (module,) = parts(part)
    return module


def owned(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields of the strategy that features own."""
    return {option: fields[option] for feature in FEATURES for option in feature.options}


def check_features(fields: Mapping[str, Any]) -> None:
    """Refuse fields of features that cannot work with any model and number of ranks.

    Args:
        fields: of the strategy, by name; those that are missing have their defaults.

    Raises:
        ConfigError: at the first field that cannot work, or whose feature is not there.
    """
    refuse_absent(fields)
    for checks in parts("fields"):
        checks.check(fields)


def refuse_absent(fields: Mapping[str, Any]) -> None:
    """Refuse fields of features that are not there; raise ConfigError."""
    for feature in FEATURES:
        wanted = {
            path_of(name): fields[name] for name, unset in feature.options.items() if fields.get(name, unset) != unset
        }
        for name, modality in (fields.get("modalities") or {}).items():
            wanted |= {
                f"modalities.{name}.{path_of(field)}": value for field, value in feature.used_fields(modality).items()
            }
        for field, got in wanted.items() if _spec(feature) is None else ():
            rule = f"This installation comes without the feature {feature.name!r}"
            raise ConfigError(field, got, rule, "Leave it unset, or install the whole package")


def _place(feature: Registered, part: str) -> str | None:
    """Where the `part` of a feature is; None where the feature has none, or is not there."""
    spec = _spec(feature)
    if spec is not None and spec.submodule_search_locations is not None:  # a package
        spec = find_spec(f"{spec.name}.{part}")
    elif part != feature.part:
        return None
    return None if spec is None else spec.name


def _spec(feature: Registered) -> ModuleSpec | None:
    """Where a feature is, which is not imported; None where it is not there."""
    try:
        return find_spec(f"{_PACKAGES}.{feature.name}")
    except ModuleNotFoundError as error:
        if error.name != _PACKAGES:
            raise
        return None


# --- converters ---

Configuration = str | os.PathLike[str] | Mapping[str, Any]
"""A file, or what such a file holds."""
Converter = Callable[[Configuration, Mapping[str, Any]], dict[str, Any]]
"""Called with a configuration and arguments in place of converted ones, returns the arguments of the strategy."""

_CONVERTERS: list[Converter] = []


def register_converter(converter: Converter) -> None:
    """Let `converter` read the configurations of other systems; the one that is registered last does."""
    _CONVERTERS.append(converter)


def converted(config: Configuration, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the strategy that a configuration of another system asks for.

    Args:
        config: of the other system.
        given: arguments that take the place of converted ones.

    Raises:
        ConfigError: the configuration cannot be converted, or nothing is registered that converts it.
    """
    if not _CONVERTERS:
        rule = "Nothing is registered that reads the configurations of other systems"
        raise ConfigError("config", str(config), rule, "Call register_converter, or give the arguments themselves")
    return _CONVERTERS[-1](config, given)
