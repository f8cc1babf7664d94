"""Checks of a configuration that need neither the model nor the number of ranks.

Each check refuses by the path of the field, with the nearest thing that would work. Imports no torch, so that a wrong
configuration is refused before anything slow starts. `layout` refuses what depends on the number of ranks, `partition`
what depends on the model. Here is also what a modality may share, and what of it goes together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, get_args, get_type_hints

from lightning_mm5d.config.errors import ConfigError, did_you_mean, one_of
from lightning_mm5d.config.features import parts, refuse_absent
from lightning_mm5d.config.groups import ContextOptions, PipelineTemplate, path_of, value_of
from lightning_mm5d.config.modality import (
    Modality,
    check_feeds_from,
    colocated_dp,
    decoders_of,
    main_modality_of,
)


def check_memory(field: str, modality: Modality) -> None:
    """Refuse what is wrong whatever the model and the number of ranks.

    Args:
        field: path of the modality.
        modality: its sizes have passed their own checks.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    stage, size = modality.sharding.zero_stage, modality.sharding.dp_shard_size
    if stage is not None and (isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3):
        near = min(3, max(0, stage)) if isinstance(stage, int | float) and not isinstance(stage, bool) else 0
        rule = "It is 0 (nothing is shared), 1 (states of optimizers), 2 (gradients too) or 3 (parameters too)"
        raise ConfigError(f"{field}.sharding.zero_stage", stage, rule, f"The nearest is {int(near)}")
    if stage == 0 and (size or 1) > 1:
        rule = f"{size} ranks share one copy, and zero_stage=0 says that nothing is shared"
        raise ConfigError(f"{field}.sharding.dp_shard_size", size, rule, "Use zero_stage=1, 2 or 3, or leave it unset")
    reshards = modality.sharding.reshard_after_forward
    if not isinstance(reshards, bool):
        rule = "It is true or false"
        raise ConfigError(f"{field}.sharding.reshard_after_forward", reshards, rule, f"Use {bool(reshards)}")
    if reshards and modality.shared_stage != 3:
        rule = f"Only shared parameters are gathered, and zero_stage is {modality.shared_stage}"
        fix = "Use zero_stage=3, or leave it unset"
        raise ConfigError(f"{field}.sharding.reshard_after_forward", reshards, rule, fix)


MOST = 2**20  # more ranks, stages or microbatches than any run has


def check(
    modalities: Mapping[str, Modality],
    *,
    num_microbatches: int | None,
    microbatch_size: int | None = None,
    schedule: str,
) -> None:
    """Refuse what is wrong whatever the model and the number of ranks.

    Args:
        modalities: what the user wrote, by name.
        num_microbatches: microbatches per batch; None where it is 1, or follows from `microbatch_size`.
        microbatch_size: samples per microbatch; None where `num_microbatches` says into how many parts.
        schedule: its name, or another word for one of the user's own.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    _check_types(modalities)
    refuse_absent({"modalities": modalities})
    check_feeds_from(modalities)
    decoders, main = decoders_of(modalities), main_modality_of(modalities)
    for name, modality in modalities.items():
        _check_sizes(f"modalities.{name}", modality)
    for replicas in parts("pipelines"):
        replicas.check_pipelines(modalities, schedule)
    for name, modality in modalities.items():
        is_encoder = name != main and name not in decoders
        _check_paths(f"modalities.{name}.module", modality.module)
        _check_paths(f"modalities.{name}.boundary", modality.boundary)
        _check_cost(f"modalities.{name}.cost", modality)
        _check_context(f"modalities.{name}", modality, is_encoder=is_encoder)
        check_memory(f"modalities.{name}", modality)
        _check_sequence_parallel(f"modalities.{name}", modality)
        _check_vocabulary(f"modalities.{name}.tensor.make_vocab_size_divisible_by", modality)
    _check_owners(modalities)
    for name in modalities:
        _check_feeds(name, modalities, main)
        _check_colocation(name, modalities)
    _check_microbatches(num_microbatches, microbatch_size)


def _check_types(modalities: object) -> None:
    if not isinstance(modalities, Mapping):
        raise ConfigError("modalities", modalities, "They map names to Modality(...)", "Use {'language': Modality()}")
    if not modalities:
        raise ConfigError("modalities", modalities, "At least one modality is needed", "Name one")
    for name, modality in modalities.items():
        _check_name(name)
        if not isinstance(modality, Modality):
            rule = "A modality is a Modality, a mapping of its fields or its number of stages"
            fix = "Write for instance Modality(pp_size=2), {'pp_size': 2} or 2"
            raise ConfigError(f"modalities.{name}", modality, rule, fix)


def _check_name(name: object) -> None:
    # a dot would make the path of a field, in YAML and on the command line, mean something else
    if isinstance(name, str) and name and not any(c == "." or c.isspace() for c in name):
        return
    letters = "".join("_" if c == "." or c.isspace() else c for c in str(name)) or "vision"
    rule = "A modality's name is a word without dots or spaces"
    raise ConfigError("modalities", name, rule, f"Use a name such as {letters!r}")


def _check_sizes(field: str, modality: Modality) -> None:
    always = ("tp_size", "cp_size", "pp_chunks", "ep_size", "expert_tp_size")
    for size in ("dp_size", "dp_shard_size", "pp_size", *always):
        value = value_of(modality, size)
        if value is not None or size in always:
            check_count(f"{field}.{path_of(size)}", value)
    if not isinstance(got := modality.tensor.shard_embedding, bool):
        raise ConfigError(f"{field}.tensor.shard_embedding", got, "It is true or false", f"Use {bool(got)}")
    template = modality.pipeline.pipeline_template
    if modality.pipeline.pp_chunks > 1 and modality.pp_size in (None, 1) and template is None:
        rule = "Chunks interleave the stages of several pipeline ranks"
        fix = "Use pp_size=2 or more, or pp_chunks=1"
        raise ConfigError(f"{field}.pipeline.pp_chunks", modality.pipeline.pp_chunks, rule, fix)
    if template is None:
        return
    check_template(f"{field}.pipeline.pipeline_template", template)
    fits, rest = divmod(template.num_stages, modality.pipeline.pp_chunks)
    if rest:
        rule = f"The pipeline_template has {template.num_stages} stages, pp_chunks for each rank"
        fix = "Use a number that divides the stages, or 1"
        raise ConfigError(f"{field}.pipeline.pp_chunks", modality.pipeline.pp_chunks, rule, fix)
    if modality.pp_size not in (None, fits):
        rule = f"The pipeline_template has {template.num_stages} stages"
        fix = f"Use pp_size={fits}, or leave it unset"
        raise ConfigError(f"{field}.pp_size", modality.pp_size, rule, fix)


def _check_sequence_parallel(field: str, modality: Modality) -> None:
    setting: object = modality.tensor.sequence_parallel
    if not isinstance(setting, bool) and setting != "ring":
        fix = did_you_mean(setting, ["true", "false", "ring"])
        raise ConfigError(f"{field}.tensor.sequence_parallel", setting, "It is true, false or ring", fix)


def _check_context(field: str, modality: Modality, *, is_encoder: bool) -> None:
    mode, size, inner = modality.context.cp_mode, modality.cp_size, modality.context.ulysses_size
    _check_inner_ring(f"{field}.context.inner_ring_size", modality)
    for name in ("cp_mode", "cp_distribution"):
        choices = get_args(get_type_hints(ContextOptions)[name])
        choice = getattr(modality.context, name)
        if choice not in choices:
            rule = f"It is one of {', '.join(choices)}"
            raise ConfigError(f"{field}.context.{name}", choice, rule, did_you_mean(choice, choices))
    if mode == "items" and not is_encoder:
        rule = "Items are whole images, frames or clips of an encoder, and this modality is none"
        raise ConfigError(f"{field}.context.cp_mode", mode, rule, "Use 'allgather', 'ring' or 'ulysses'")
    if mode != "hybrid":
        if inner is not None:
            rule = f"It is the size of the inner groups of cp_mode='hybrid', and cp_mode is {mode!r}"
            raise ConfigError(f"{field}.context.ulysses_size", inner, rule, "Leave it unset, or use cp_mode='hybrid'")
        return
    if size == 1 and inner is None:
        return
    proper = [divisor for divisor in range(2, size) if size % divisor == 0]
    if not proper:
        rule = f"A hybrid has groups of several ranks, and several groups: cp_size={size} has no such divisor"
        raise ConfigError(f"{field}.context.cp_mode", mode, rule, "Use 'ring' or 'ulysses', or a cp_size such as 4")
    if inner not in proper or isinstance(inner, bool):
        rule = f"It divides cp_size={size} into several groups of several ranks"
        raise ConfigError(f"{field}.context.ulysses_size", inner, rule, f"Use {one_of(proper)}")


def _check_inner_ring(field: str, modality: Modality) -> None:
    inner, size = modality.context.inner_ring_size, modality.cp_size
    if inner is None:
        return
    check_count(field, inner)
    if modality.context.cp_mode != "ring":
        rule = f"It is the size of the inner rings of cp_mode='ring', and cp_mode is {modality.context.cp_mode!r}"
        raise ConfigError(field, inner, rule, "Leave it unset, or use cp_mode='ring'")
    if size % inner:
        rule = f"Inner rings are of equal sizes, so it divides cp_size={size}"
        fits = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
        raise ConfigError(field, inner, rule, f"Use {one_of(fits)}")


def _check_vocabulary(field: str, modality: Modality) -> None:
    multiple = modality.tensor.make_vocab_size_divisible_by
    if multiple is None:
        return
    check_count(field, multiple)
    if modality.tp_size == 1:
        rule = "It is said of the rows of a vocabulary that each tensor parallel rank holds, and tp_size is 1"
        raise ConfigError(field, multiple, rule, "Leave it unset, or use tp_size=2 or more")


def check_template(field: str, template: object) -> None:
    if not isinstance(template, PipelineTemplate):
        rule = "It is a PipelineTemplate"
        raise ConfigError(field, template, rule, "Write PipelineTemplate(stages=...)")
    if (template.stages is None) == (template.offsets is None):
        rule = "It says how many layers each stage has, or how many more than an even share"
        fix = "Use for instance stages=[2, 2] or offsets=[0, 0]" if template.stages is None else "Leave offsets unset"
        raise ConfigError(field, template, rule, fix)
    given = "stages" if template.offsets is None else "offsets"
    field, stages = f"{field}.{given}", getattr(template, given)
    if not _is_list(stages) or not stages:
        rule = "A template lists at least one stage"
        raise ConfigError(field, stages, rule, "For one stage leave pipeline_template unset")
    if given == "offsets":
        _check_offsets(field, stages)
        return
    named = [_is_list(stage) for stage in stages]
    if not any(named):
        for index, count in enumerate(stages):
            check_count(f"{field}[{index}]", count)
        return
    if not all(named):
        rule = "Stages are given either all by their number of layers or all by names"
        raise ConfigError(field, stages, rule, "Use for instance [2, 2] or [['layers.0'], ['layers.1']]")
    seen: dict[str, int] = {}
    for index, stage in enumerate(stages):
        _check_paths(f"{field}[{index}]", stage)
        for path in stage:
            for other, where in seen.items():
                if _overlap(path, other):
                    rule = f"{path!r} overlaps with {other!r} of stage {where}"
                    raise ConfigError(f"{field}[{index}]", path, rule, f"Leave it in stage {where} only")
            seen[path] = index


def _check_offsets(field: str, offsets: Sequence[Any]) -> None:
    for index, offset in enumerate(offsets):
        if isinstance(offset, bool) or not isinstance(offset, int):
            near = int(offset) if isinstance(offset, float) and abs(offset) < 2**31 else 0
            raise ConfigError(f"{field}[{index}]", offset, "It is a whole number of layers", f"The nearest is {near}")
    if sum(offsets):
        rule = f"What one stage has more another has less, and they sum to {sum(offsets)}"
        raise ConfigError(field, offsets, rule, f"Use {[*offsets[:-1], offsets[-1] - sum(offsets)]}")


def _check_paths(field: str, paths: object) -> None:
    if paths is None:
        return
    listed = paths if _is_list(paths) else [paths]
    if not listed:
        raise ConfigError(field, paths, "At least one path is needed", "Name one, or drop the field")
    for index, path in enumerate(listed):
        if not isinstance(path, str) or not all(part and part == part.strip() for part in path.split(".")):
            rule = "A path is made of names that are joined by dots"
            raise ConfigError(field, path, rule, "Use a path such as 'model.vision_tower'")
        if path in listed[:index]:
            raise ConfigError(field, path, "The path is given twice", "Leave it in once")


def _check_owners(modalities: Mapping[str, Modality]) -> None:
    owners: dict[str, str] = {}
    for name, modality in modalities.items():
        for path in modality.module if _is_list(modality.module) else [modality.module]:
            if isinstance(path, str) and owners.setdefault(path, name) != name:
                rule = f"{owners[path]!r} owns it already"
                raise ConfigError(f"modalities.{name}.module", path, rule, f"Name another module, or drop {name!r}")


def _check_feeds(name: str, modalities: Mapping[str, Modality], main: str) -> None:
    field, feeds, stages = f"modalities.{name}.feeds", modalities[name].feeds, modalities[main].num_cuts
    if not _is_list(feeds) and feeds not in ("first", "all"):
        rule = "It is 'first', 'all' or a list of stages"
        raise ConfigError(field, feeds, rule, did_you_mean(feeds, ("first", "all")))
    if name == main:
        if feeds != "first":
            rule = f"{name!r} computes the loss, so it feeds no other modality"
            raise ConfigError(field, feeds, rule, "Leave feeds unset")
        return
    if not _is_list(feeds):
        return
    if not feeds or len(set(map(repr, feeds))) < len(feeds):
        rule = "A list of stages names at least one, and each once"
        raise ConfigError(field, feeds, rule, "Use for instance [0]")
    for stage in feeds:
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < stages:
            rule = f"{main!r} has the stages 0 to {stages - 1}"
            near = min(max(stage, 0), stages - 1) if isinstance(stage, int) else 0
            raise ConfigError(field, feeds, rule, f"The nearest to {stage!r} is {near}")


def _check_colocation(name: str, modalities: Mapping[str, Modality]) -> None:
    modality = modalities[name]
    field, owner = f"modalities.{name}.colocate_with", modality.owner
    if owner is None:
        return
    others = [other for other in modalities if other != name]
    if owner.modality not in others:
        rule = "It names another modality, or one of its pipeline ranks as in 'language.0'"
        fix = did_you_mean(owner.modality, others) if others else "Leave it unset"
        raise ConfigError(field, modality.colocate_with, rule, fix)
    chain = [owner]
    while len(chain) <= len(modalities) and (further := modalities[chain[-1].modality].owner) is not None:
        chain.append(further)
        if further.modality not in modalities:
            break
    if len(chain) > 1:
        rule = f"{owner.modality!r} is itself colocated" + (" and has no ranks of its own" if owner.pp is None else "")
        ends = len(chain) <= len(modalities) and chain[-1].modality in others
        fix = f"Use colocate_with={str(chain[-1])!r}" if ends else f"Leave it unset for {owner.modality!r}"
        raise ConfigError(field, modality.colocate_with, rule, fix)
    if owner.pp is not None:
        _check_shared_stage(name, modality, owner.modality, owner.pp, modalities[owner.modality])
        return
    dp_size = modalities[owner.modality].dp_size
    if dp_size is not None:
        colocated_dp(name, modality, dp_size * modalities[owner.modality].ranks_per_replica)


def _check_shared_stage(name: str, modality: Modality, owner: str, pp: int, shared: Modality) -> None:
    if pp >= shared.stages:
        rule = f"{owner!r} has the pipeline ranks 0 to {shared.stages - 1}"
        fix = f"The nearest is '{owner}.{shared.stages - 1}'"
        raise ConfigError(f"modalities.{name}.colocate_with", modality.colocate_with, rule, fix)
    for size in ("dp_size", "dp_shard_size", "tp_size", "cp_size"):
        own_size, shared_size = value_of(modality, size), value_of(shared, size)
        if own_size != shared_size and (size != "dp_size" or None not in (own_size, shared_size)):
            rule = f"Its last stage shares the ranks of '{owner}.{pp}', so {size} is that of {owner!r}, {shared_size}"
            fix = f"Use {size}={shared_size}, or leave colocate_with unset"
            raise ConfigError(f"modalities.{name}.{path_of(size)}", own_size, rule, fix)


def _check_microbatches(number: object, size: object) -> None:
    if size is None:
        check_count("batching.num_microbatches", 1 if number is None else number)
        return
    check_count("batching.microbatch_size", size)
    if number is not None:
        rule = f"num_microbatches={number!r} says into how many microbatches a batch is split already"
        raise ConfigError("batching.microbatch_size", size, rule, "Set one of the two")


def check_count(field: str, value: object, most: int = MOST) -> None:
    """Refuse what is no whole number of 1 to `most`."""
    if isinstance(value, int) and value > most:
        raise ConfigError(field, value, f"It is a whole number of at most {most}", f"The nearest is {most}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        near = min(most, max(1, int(digits))) if (digits := str(value).partition(".")[0]).isdecimal() else 1
        raise ConfigError(field, value, "It is a whole number of at least 1", f"The nearest is {near}")


def _check_cost(field: str, modality: Modality) -> None:
    cost, ranks = modality.cost, modality.stages
    if cost is None:
        return
    if _is_list(cost) and len(cost) != ranks:
        rule = f"A list has one number for each of the {ranks} pipeline ranks"
        raise ConfigError(field, cost, rule, f"Give {ranks}, or one number for all")
    for rank_cost in cost if _is_list(cost) else [cost]:
        if isinstance(rank_cost, bool) or not isinstance(rank_cost, int | float) or not 0 < rank_cost < math.inf:
            raise ConfigError(field, cost, "A forward takes a positive, finite time", "Use for instance 1.0")


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list | tuple)


def _overlap(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")
