"""Replicas with unlike pipelines: what a user may say of them, and the list of pipelines for a number of ranks.

The rule for ``{min: 3}`` is that of Oobleck (arXiv:2309.08125): pipelines of every length from the smallest that fits
on, of which some combination uses all ranks. Short pipelines have the smallest bubbles, so there are as many replicas
as the minimum allows, and their lengths differ by at most one. Imports no torch.

One list of stages serves replicas whose pipelines cut the layers in different places: a stage is what lies between two
neighbouring cuts of any pipeline, so that all replicas have the same stages and each rank of each of them runs one or
more in a row. Whatever is said by stage then holds for all replicas: who owns a parameter, what is sent on, and over
which ranks a gradient is summed, which is layer by layer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import cast

from lightning_mm5d.config.checks import check_template
from lightning_mm5d.config.errors import ConfigError, did_you_mean, nearest, one_of
from lightning_mm5d.config.groups import PipelineTemplate, path_of, value_of, with_fields
from lightning_mm5d.config.modality import Modality, decoders_of

UNLIKE_SCHEDULES = ("gpipe", "1f1b", "zero_bubble", "auto")
"""The schedules of replicas with unlike pipelines."""
_INSTEAD = ("dp_size", "pp_size", "pipeline_template")
_USUAL = {"tp_mode": "1d", "pp_chunks": 1, "colocate_with": None, "cost": None}
"""Fields that do not go with `pipelines`, and their values that do."""
_FORMS = "It lists the pipelines of the replicas, as in [4, 3], or says how long they are at least, as in {min: 3}"


def check_pipelines(modalities: Mapping[str, Modality], schedule: object) -> None:
    """Refuse unlike pipelines and speeds that cannot work whatever the model and the number of ranks.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    for name, modality in modalities.items():
        if modality.pipeline.pipelines is not None:
            _check_form(f"modalities.{name}.pipeline.pipelines", modality.pipeline.pipelines)
            _check_beside(name, modality)
            _check_shares(name, modalities)
            _check_others(name, modalities)
            if schedule not in UNLIKE_SCHEDULES:
                rule = (
                    f"Unlike pipelines (modalities.{name}.pipeline.pipelines) run under {', '.join(UNLIKE_SCHEDULES)}"
                )
                raise ConfigError("schedule", schedule, rule, "Use '1f1b'")
        if modality.pipeline.speeds is not None:
            _check_speeds(name, modality, modalities)


def completed(modalities: Mapping[str, Modality], world_size: int) -> dict[str, Modality]:
    """Return the modalities with a list of pipelines in place of a shortest length, and the number of replicas.

    Pipelines of equal length are no unlike ones, and are said by `dp_size` and `pp_size` as usual: of 6 ranks
    ``pipelines={"min": 3}`` is ``dp_size=2, pp_size=3``, of 7 it is ``pipelines=[4, 3], dp_size=2``.

    Args:
        modalities: that passed `check_pipelines`.
        world_size: number of ranks.

    Raises:
        ConfigError: no pipelines within the limits use all ranks.
    """
    filled = dict(modalities)
    for name, modality in modalities.items():
        pipelines = modality.pipeline.pipelines
        if isinstance(pipelines, Mapping):
            others = [other for key, other in modalities.items() if key != name]
            pipelines = _for_ranks(name, modality, pipelines, others, world_size)
        if pipelines is None:
            continue
        size, first = len(pipelines), pipelines[0]
        if isinstance(first, int) and all(length == first for length in pipelines):
            filled[name] = with_fields(modality, pipelines=None, dp_size=size, pp_size=first)
        else:
            filled[name] = with_fields(modality, pipelines=pipelines, dp_size=size)
    return filled


@contextmanager
def as_said(modalities: Mapping[str, Modality]) -> Iterator[None]:
    """Name `pipelines` in errors about the pipelines that `completed` makes of it.

    Args:
        modalities: as the user wrote them.

    Raises:
        ConfigError: of the code inside, about the field that the user set.
    """
    try:
        yield
    except ConfigError as error:
        for name, modality in modalities.items():
            fields = f"modalities.{name}.pp_size", f"modalities.{name}.pipeline.pipelines"
            if modality.pipeline.pipelines is not None and error.field in fields and isinstance(error.got, int):
                pipelines = modality.pipeline.pipelines
                how = " stages, by fewer ranks or a smaller min" if isinstance(pipelines, Mapping) else " stages"
                rule = f"It has a pipeline of {error.got} stages: {error.rule}"
                raise ConfigError(fields[1], pipelines, rule, f"{error.fix}{how}") from None
        raise


def _for_ranks(
    name: str, modality: Modality, limits: Mapping[str, int], others: Collection[Modality], world_size: int
) -> list[int]:
    """The lengths of as many pipelines as `limits` allow, which use all ranks with one replica of the others each."""
    width, shortest = modality.cp_size * modality.tp_size, limits["min"]
    beside = sum(other.own_ranks_per_replica for other in others)
    longest = limits.get("max")

    def lengths(world: int) -> list[int] | None:
        for count in range(world // (shortest * width + beside), 0, -1):
            stages, rest = divmod(world - count * beside, width)
            if not rest and (longest is None or stages <= longest * count):
                return [stages // count + (index < stages % count) for index in range(count)]
        return None

    chosen = lengths(world_size)
    if chosen is None:
        fits = nearest(world_size, lambda world: lengths(world) is not None)
        limit = f"at least {shortest}" if longest is None else f"{shortest} to {longest}"
        rule = f"No pipelines of {name} with {limit} stages use all ranks (modalities.{name}.pipeline.pipelines)"
        fix = f"Nearest that fit: {one_of(fits)} ranks"
        raise ConfigError("Trainer(devices=..., num_nodes=...)", world_size, rule, fix)
    return chosen


def _check_form(field: str, form: object) -> None:
    if isinstance(form, Mapping):
        for key in form:
            if key not in ("min", "max"):
                raise ConfigError(field, dict(form), f"It has no {key!r}", did_you_mean(key, ("min", "max")))
        shortest, longest = form.get("min"), form.get("max")
        _check_length(f"{field}.min", shortest)
        if longest is not None:
            _check_length(f"{field}.max", longest)
            if longest < shortest:
                raise ConfigError(f"{field}.max", longest, f"It is at least min={shortest}", "Leave it unset")
        return
    if not isinstance(form, list | tuple) or not form:
        raise ConfigError(field, form, _FORMS, "Use one of these, or pp_size where all replicas are equal")
    are_templates = all(isinstance(pipeline, PipelineTemplate) for pipeline in form)
    for index, pipeline in enumerate(form):
        if are_templates:
            check_template(f"{field}[{index}]", pipeline)
            if isinstance((pipeline.stages or [0])[0], list | tuple):
                rule = "Templates of unlike pipelines give numbers of layers"
                raise ConfigError(f"{field}[{index}].stages", pipeline.stages, rule, "Use for instance [2, 2]")
        elif isinstance(pipeline, PipelineTemplate):
            rule = "Pipelines are given either all by their number of stages or all by templates"
            raise ConfigError(f"{field}[{index}]", pipeline, rule, "Use for instance [4, 3]")
        else:
            _check_length(f"{field}[{index}]", pipeline)


def _check_length(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**20:
        raise ConfigError(field, value, "A pipeline has a whole number of stages, at least 1", "Use for instance 3")


def _check_beside(name: str, modality: Modality) -> None:
    for field in _INSTEAD:
        setting = value_of(modality, field)
        if setting is not None and (field, setting) != ("dp_size", len(modality.lengths)):
            rule = "pipelines says how many replicas there are and which stages each of them has"
            raise ConfigError(f"modalities.{name}.{path_of(field)}", setting, rule, "Leave one of them unset")
    for field, usual in _USUAL.items():
        if (setting := value_of(modality, field)) != usual:
            rule = f"It does not go with unlike pipelines (modalities.{name}.pipeline.pipelines)"
            raise ConfigError(f"modalities.{name}.{path_of(field)}", setting, rule, f"Use {usual}")


def _check_shares(name: str, modalities: Mapping[str, Modality]) -> None:
    """Refuse ranks of unlike replicas that share parameters or experts; those of one replica may (`cp_size`)."""
    for key, modality in modalities.items():
        shards, cp_size = modality.sharding, modality.cp_size
        sizes = {"ep_size": modality.ep_size, "dp_shard_size": shards.dp_shard_size or 1}
        if shards.zero_stage and shards.dp_shard_size is None:
            sizes["zero_stage"] = 0  # over all replicas
        for field, size in sizes.items():
            if not size or cp_size % size:
                rule = (
                    "Replicas have unlike stages and numbers of microbatches "
                    f"(modalities.{name}.pipeline.pipelines), so only context parallel ranks share, here {cp_size}"
                )
                fix = (
                    "Leave it unset" if cp_size == 1 else f"Use ep_size={cp_size}, or dp_shard_size={cp_size} for ZeRO"
                )
                raise ConfigError(f"modalities.{key}.{path_of(field)}", value_of(modality, field), rule, fix)


def _check_others(name: str, modalities: Mapping[str, Modality]) -> None:
    """Refuse what other modalities say that counts on equal pipelines of one."""
    if isinstance(limits := modalities[name].pipeline.pipelines, Mapping):
        for key, other in modalities.items():
            if key != name and other.pipeline.pipelines is not None:
                rule = f"modalities.{key}.pipeline.pipelines says how many replicas there are, too"
                fix = f"Leave one of them unset, or list both, as in [{limits['min'] + 1}, {limits['min']}]"
                raise ConfigError(f"modalities.{name}.pipeline.pipelines", dict(limits), rule, fix)
    for key in decoders_of(modalities):
        rule = f"Modalities with unlike pipelines (modalities.{name}.pipeline.pipelines) have none that run after them"
        raise ConfigError(f"modalities.{key}.feeds_from", modalities[key].feeds_from, rule, "Use dp_size and pp_size")
    for key, other in modalities.items():
        if other.owner is not None and other.owner.modality == name and other.owner.pp != 0:
            rule = f"Replicas of {name!r} have unlike pipelines, which share their first rank at most"
            fix = f"Use {name + '.0'!r}, or leave it unset"
            raise ConfigError(f"modalities.{key}.colocate_with", other.colocate_with, rule, fix)
        if key != name and isinstance(other.feeds, list | tuple):
            rule = f"Stages of unlike pipelines (modalities.{name}.pipeline.pipelines) have no common numbers"
            raise ConfigError(f"modalities.{key}.feeds", other.feeds, rule, "Use 'first' or 'all'")


def _check_speeds(name: str, modality: Modality, modalities: Mapping[str, Modality]) -> None:
    field, speeds = f"modalities.{name}.pipeline.speeds", modality.pipeline.speeds
    other = next((key for key, peer in modalities.items() if peer.pipeline.speeds is not None and key != name), None)
    if other is not None:
        rule = f"One modality says how fast replicas are, and {other!r} does too"
        raise ConfigError(field, speeds, rule, "Leave one of them unset")
    count = len(modality.lengths) or modality.dp_size
    if count is None:
        rule = "Speeds are listed for a known number of replicas"
        raise ConfigError(field, speeds, rule, "Use pipelines=[...] or dp_size beside it, or leave it unset")
    if not isinstance(speeds, list | tuple) or len(speeds) != count:
        rule = f"There is one number for each of the {count} replicas"
        raise ConfigError(field, speeds, rule, f"Use for instance {[1.0] * count}")
    for index, speed in enumerate(speeds):
        if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 < speed < math.inf:
            rule = "A speed is a positive, finite number"
            raise ConfigError(f"{field}[{index}]", speed, rule, "Use for instance 1.0")


def cut(
    name: str,
    modality: Modality,
    count: int,
    balanced: Callable[[str, Modality, int], list[int]],
    from_template: Callable[..., list[int]],
) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Return the `common_stages` of a modality with `pipelines`.

    Args:
        name: of the modality.
        modality: with a list of pipelines.
        count: its layers.
        balanced: divides as many layers over the stages of equal pipelines.
        from_template: divides them as the template of a field says.
    """
    plain = with_fields(modality, pipelines=None, speeds=None, dp_size=None)
    return common_stages(
        [
            from_template(f"modalities.{name}.pipeline.pipelines[{index}]", template=pipeline)
            if isinstance(pipeline, PipelineTemplate)
            else balanced(name, replace(plain, pp_size=pipeline), count)
            for index, pipeline in enumerate(cast("list[int | PipelineTemplate]", modality.pipeline.pipelines))
        ]
    )


def common_stages(pipelines: Sequence[Sequence[int]]) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Return the number of layers of each stage, and for each pipeline the pipeline rank of each stage.

    Of 12 layers as ``[3, 3, 3, 3]`` and ``[4, 4, 4]`` the stages are ``[3, 1, 2, 2, 1, 3]``, on the pipeline ranks
    ``(0, 1, 1, 2, 2, 3)`` of the one and ``(0, 0, 1, 1, 2, 2)`` of the other.

    Args:
        pipelines: layers of each pipeline rank, in order; the sums are equal.
    """
    ends = [list(accumulate(sizes)) for sizes in pipelines]
    cuts = sorted({0, *(end for stops in ends for end in stops)})
    stages = [last - first for first, last in pairwise(cuts)] or [0]
    starts = cuts[: len(stages)]
    return stages, tuple(tuple(min(bisect_right(stops, first), len(stops) - 1) for first in starts) for stops in ends)
