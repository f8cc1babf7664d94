"""What a user may say about each modality.

Plain frozen dataclasses, so that the same configuration comes from Python, YAML or the command line. They hold what was
written; `checks` refuses it, because an error in a constructor would reach a command-line user as a traceback. Imports
no torch.

Modalities as a user may write them: a `Modality`, a mapping of its fields, or its number of stages.

Which modality feeds which, and where its result is needed.

Encoders feed the language model. Modalities with `Modality.feeds_from` run after those that they name. All that runs
after encoders also feeds the last stage of the loss modality, where the rest of the step runs: so several losses become
one number there. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, NamedTuple, overload

from lightning_mm5d.config.errors import ConfigError, did_you_mean, nearest, one_of
from lightning_mm5d.config.groups import (
    OF_MODALITY,
    CommunicationOptions,
    ComputeOptions,
    ContextOptions,
    MemoryOptions,
    PipelineOptions,
    PipelineTemplate,
    ShardingOptions,
    Shown,
    TensorOptions,
    accepts_mappings,
    build_groups,
    dataclass_of,
    in_groups,
    names_of,
    with_fields,
)


class Owner(NamedTuple):
    """Whose ranks a modality shares: all of another modality's, or those of one of its pipeline ranks."""

    modality: str
    pp: int | None

    def __str__(self) -> str:
        return self.modality if self.pp is None else f"{self.modality}.{self.pp}"


@accepts_mappings
@dataclass(frozen=True, kw_only=True, repr=False)
class Modality(Shown):
    """Where one modality of the model runs and how its work is shared. Every field is optional.

    Args:
        module: Dotted path or paths, in the LightningModule, of what this modality owns. Found by itself for
            Hugging Face models.
        boundary: Dotted path or paths of the callable whose result leaves the modality. Found by itself
            likewise.
        feeds: Stages that consume the result, of the modality that computes the loss: the ``first``, ``all``,
            or a list of their indices. Of an encoder, the modality that it feeds is the language model.
        feeds_from: Name or names of the modalities whose results this one computes with: it runs after them, as a
            speech talker or an image head runs after the language model. Of several, the last one that no other
            feeds from computes the loss. Unset: an encoder, or the language model; ``language`` for a ``talker`` and an
            ``image_head`` that are found by themselves.
        dp_size: Number of replicas. Inferred from the number of ranks when unset.
        tp_size: Tensor parallel degree: ranks that share each layer.
        cp_size: Context parallel degree: ranks that share each sequence.
        pp_size: Number of pipeline stages. Unset: as many as ``pipeline_template`` has, else 1.
        ep_size: Expert parallel degree: ranks that share the experts of each layer, of the dp_size * cp_size that hold
            the same layers. Tokens travel to the ranks that hold their experts.
        colocate_with: Name of the modality whose ranks this one shares, instead of having ranks of its own. With the
            number of one of its pipeline ranks, as in ``language.0``, the last stage of this one runs there, and
            earlier stages have ranks of their own.
        cost: Duration of a forward through the layers of one pipeline rank, in any unit, the same for all
            modalities; or one for each of its pipeline ranks. Unset: estimated from the parameters.
        tensor: How the ranks of `tp_size` share each layer. Groups may be mappings of their fields.
        context: How the ranks of `cp_size` share each sequence.
        pipeline: Which layers run in which stage, and what a stage computes when.
        sharding: What replicas share instead of each holding it (ZeRO).
        memory: What is computed again, or kept elsewhere, to take less memory of the device.
        compute: What computes layers.
        communication: How numbers travel between ranks.
    """

    module: str | list[str] | None = None
    boundary: str | list[str] | None = None
    feeds: Literal["first", "all"] | list[int] = "first"
    feeds_from: str | list[str] | None = None
    dp_size: int | None = None
    tp_size: int = 1
    cp_size: int = 1
    pp_size: int | None = None
    ep_size: int = 1
    colocate_with: str | None = None
    cost: float | list[float] | None = None
    tensor: TensorOptions = field(default_factory=TensorOptions)
    context: ContextOptions = field(default_factory=ContextOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    sharding: ShardingOptions = field(default_factory=ShardingOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    communication: CommunicationOptions = field(default_factory=CommunicationOptions)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of pipeline ranks of each replica, where `pipelines` lists them: ``(4, 3)``; else nothing."""
        if not isinstance(self.pipeline.pipelines, list | tuple):
            return ()
        return tuple(pp.num_stages if isinstance(pp, PipelineTemplate) else pp for pp in self.pipeline.pipelines)

    @property
    def stages(self) -> int:
        """Number of pipeline ranks: what was said, else what the template has room for, else 1; the most of several."""
        if self.lengths:
            return max(self.lengths)
        if self.pp_size is not None:
            return self.pp_size
        template = self.pipeline.pipeline_template
        return 1 if template is None else max(template.num_stages // self.pipeline.pp_chunks, 1)

    @property
    def offloads(self) -> tuple[str, ...]:
        """What `offload` names, as a tuple."""
        return (self.memory.offload,) if isinstance(self.memory.offload, str) else tuple(self.memory.offload or ())

    @property
    def chosen_kernels(self) -> tuple[str, ...]:
        """What `kernels` names, as a tuple."""
        return (self.compute.kernels,) if isinstance(self.compute.kernels, str) else tuple(self.compute.kernels or ())

    @property
    def shared_stage(self) -> int:
        """What ranks share of one copy: what `zero_stage` says, else 3 where `dp_shard_size` is above 1, else 0.

        It is 0 where the parameters are on the host: a frozen modality has neither gradients nor states to share.
        """
        if "parameters" in self.offloads:
            return 0
        if self.sharding.zero_stage is not None:
            return self.sharding.zero_stage
        return 3 if (self.sharding.dp_shard_size or 1) > 1 else 0

    @property
    def num_cuts(self) -> int:
        """Number of parts that the layers are cut into: pipeline ranks * pp_chunks."""
        return self.stages * self.pipeline.pp_chunks

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that one replica occupies: stages * cp_size * tp_size."""
        return self.stages * self.cp_size * self.tp_size

    def ranks(self, replicas: int) -> int:
        """Ranks that so many replicas occupy: those of each of `pipelines`, else `ranks_per_replica` each."""
        if self.lengths:
            return sum(self.lengths) * self.cp_size * self.tp_size
        return replicas * self.ranks_per_replica

    @property
    def owner(self) -> Owner | None:
        """What `colocate_with` names."""
        if self.colocate_with is None:
            return None
        name, dot, pp = str(self.colocate_with).rpartition(".")
        return Owner(name, int(pp)) if dot and pp.isdecimal() else Owner(self.colocate_with, None)

    @property
    def own_ranks_per_replica(self) -> int:
        """Of `ranks_per_replica`, those that it does not share with another."""
        if self.owner is None:
            return self.ranks_per_replica
        return 0 if self.owner.pp is None else (self.stages - 1) * self.cp_size * self.tp_size

    def own_ranks(self, replicas: int) -> int:
        """Of the `ranks` of so many replicas, those that they do not share with another modality."""
        return self.ranks(replicas) if self.owner is None else replicas * self.own_ranks_per_replica


def most_beside(modalities: Mapping[str, Modality]) -> int:
    """Return how many microbatches a stage may compute side by side: the most that a modality says."""
    return max(modality.pipeline.interleaved_microbatches for modality in modalities.values())


def for_schedule(modalities: Mapping[str, Modality], schedule: object, loss_modality: str) -> dict[str, Modality]:
    """The modalities as a schedule wants them: ``zbv`` runs two chunks of the loss modality on each of its ranks.

    So it does of the language model and of other modalities that run after it. What the user said about chunks or
    layers per stage stays, and so do modalities with one pipeline rank.
    """
    adapted = dict(modalities)
    if schedule != "zbv" or any(not isinstance(other.feeds, str) for other in adapted.values()):
        return adapted  # lists in `feeds` count the stages that the user sees
    decoders = decoders_of(adapted)
    for name in {loss_modality: None, **({main_modality_of(adapted): None} if decoders else {}), **decoders}:
        modality = adapted.get(name)
        if (
            modality is None
            or modality.pipeline.pipelines is not None
            or modality.pipeline.pp_chunks > 1
            or modality.stages == 1
            or modality.pipeline.pipeline_template is not None
        ):
            continue
        adapted[name] = with_fields(modality, pp_chunks=2)
    return adapted


def colocated_dp(name: str, modality: Modality, owner_ranks: int) -> int:
    """Replicas of a colocated modality: they fill the ranks of its owner exactly.

    Args:
        name: the modality's name, for the error.
        modality: the modality, with `colocate_with` set.
        owner_ranks: number of ranks of the modality that it shares.

    Raises:
        ConfigError: when a replica does not divide these ranks, or `dp_size` says another number.
    """
    per_replica, owner = modality.ranks_per_replica, modality.colocate_with
    if owner_ranks % per_replica:
        raise ConfigError(
            f"modalities.{name}",
            {"pp_size": modality.stages, "cp_size": modality.cp_size, "tp_size": modality.tp_size},
            f"pp_size * cp_size * tp_size = {per_replica} must divide the {owner_ranks} ranks of {owner!r}, "
            "with which it is colocated",
            f"A product of {one_of(nearest(per_replica, lambda n: owner_ranks % n == 0))} would fit",
        )
    dp = owner_ranks // per_replica
    if modality.dp_size not in (None, dp):
        rule = f"It shares the {owner_ranks} ranks of {owner!r} and takes {per_replica} for each replica"
        fix = f"Use dp_size={dp}, or leave it unset"
        raise ConfigError(f"modalities.{name}.dp_size", modality.dp_size, rule, fix)
    return dp


_SYNONYMS = {
    "vision": {"vision", "image", "images", "video", "visual"},
    "audio": {"audio", "speech", "sound"},
    "encoder": {"encoder"},
    "language": {"language", "text", "decoder", "llm", "lm"},
    "talker": {"talker"},
    "image_head": {"image_head", "generation_head"},
}
_DECODERS = ("talker", "image_head")


def loss_modality_of(modalities: Mapping[str, Modality]) -> str:
    """Return the name of the modality that computes the loss, from the configuration alone.

    It is the last of `decoders_of` that no other one feeds from; without any, it is `main_modality_of`.
    """
    decoders = decoders_of(modalities)
    fed = {source for sources in decoders.values() for source in sources}
    return next((name for name in reversed(decoders) if name not in fed), None) or main_modality_of(modalities)


def decoders_of(modalities: Mapping[str, Modality]) -> dict[str, tuple[str, ...]]:
    """Return the modalities that run after others, each with the names of those that it feeds from."""
    decoders: dict[str, tuple[str, ...]] = {}
    for name, modality in modalities.items():
        sources = modality.feeds_from
        if sources is None and modality.module is None and canonical_name(name) in _DECODERS and len(modalities) > 1:
            sources = _main_of({key: spec for key, spec in modalities.items() if canonical_name(key) not in _DECODERS})
        if isinstance(sources, str | list | tuple):
            decoders[name] = (sources,) if isinstance(sources, str) else tuple(sources)
    return decoders


def main_modality_of(modalities: Mapping[str, Modality]) -> str:
    """Return the name of the modality that encoders feed: the one with the language model.

    It is the one with a customary name (``language``, ``text``, ``decoder``, ``llm``, ``lm``), else the last one
    without a ``module``, else the last one. Modalities that feed from another are left out.
    """
    decoders = decoders_of(modalities)
    others = {name: modality for name, modality in modalities.items() if name not in decoders}
    name = _main_of(others or modalities)
    if name is None:
        raise ConfigError("modalities", {}, "There must be at least one modality", "Add `language`")
    return name


def _main_of(modalities: Mapping[str, Modality]) -> str | None:
    choices = (
        [name for name in modalities if name in _SYNONYMS["language"]],
        [name for name, modality in modalities.items() if modality.module is None and not canonical_name(name)],
        [name for name, modality in modalities.items() if modality.module is None],
        list(modalities),
    )
    return next((names[-1] for names in choices if names), None)


def canonical_name(name: str) -> str | None:
    """Return the customary name that `name` is a synonym of, such as ``vision`` for ``image``; None without one."""
    return next((key for key, names in _SYNONYMS.items() if name in names), None)


@overload
def as_modalities(modalities: Mapping[str, Any]) -> dict[str, Modality]: ...


@overload
def as_modalities(modalities: object) -> Any: ...


def as_modalities(modalities: object) -> Any:
    """Return the same modalities, each as a `Modality`: ``2`` is ``Modality(pp_size=2)``.

    What is neither stays as it is, for the check of modalities to refuse.

    Raises:
        ConfigError: a mapping names a field that does not exist.
    """
    if isinstance(path := getattr(modalities, "key", None), str):  # an option before which nothing names a modality
        modalities = {path: getattr(modalities, "val", None)}
    if not isinstance(modalities, Mapping):
        return modalities
    return {name: _modality(name, spec) for name, spec in modalities.items()}


def _modality(name: object, spec: object) -> Any:
    owner, dot, field = str(name).partition(".")
    if dot and isinstance(spec, int | str):  # an option names a field of a modality that no file has
        known = names_of(Modality)
        fix = f"Write modalities={{{owner}: {{{field}: {spec}}}}}" if field in known else did_you_mean(field, known)
        raise ConfigError(f"modalities.{name}", spec, f"There is no modality {owner!r} with such a field", fix)
    path = f"modalities.{name}"
    if callable(as_dict := getattr(spec, "as_dict", None)):  # of a parser, to which the type of a field is wrong
        spec = Modality(**as_dict())
    if isinstance(spec, Mapping):
        given = in_groups(OF_MODALITY, spec, path, stacklevel=6)
        spec = dataclass_of(path, Modality, build_groups(OF_MODALITY, given, path))
    if isinstance(spec, Modality):
        groups = build_groups(OF_MODALITY, {group: getattr(spec, group) for group in OF_MODALITY}, path)
        return replace(spec, **groups | {"pipeline": _with_templates(f"{path}.pipeline", groups["pipeline"])})
    return Modality(pp_size=spec) if isinstance(spec, int) and not isinstance(spec, bool) else spec


def _with_templates(field: str, pipeline: PipelineOptions) -> PipelineOptions:
    """The same, with a `PipelineTemplate` in place of each mapping of its fields."""
    values: dict[str, Any] = {}
    if isinstance(template := pipeline.pipeline_template, Mapping):
        values["pipeline_template"] = dataclass_of(f"{field}.pipeline_template", PipelineTemplate, template)
    if isinstance(listed := pipeline.pipelines, list | tuple):
        values["pipelines"] = [
            dataclass_of(f"{field}.pipelines[{index}]", PipelineTemplate, spec) if isinstance(spec, Mapping) else spec
            for index, spec in enumerate(listed)
        ]
    return replace(pipeline, **values)


Where = Literal["first", "all", "ends", "last"] | list[int]
"""The stages of a consumer that are sent a result: ``ends`` are the first and the last one."""


def consumers_of(modalities: Mapping[str, Modality]) -> dict[str, dict[str, Where]]:
    """Return for each modality but the loss modality those that it feeds, and which of their stages.

    With ``language``, ``vision``, and a ``talker`` that feeds from ``language``, it is
    ``{"language": {"talker": "ends"}, "vision": {"language": "first"}}``.
    """
    main, loss, decoders = main_modality_of(modalities), loss_modality_of(modalities), decoders_of(modalities)
    consumers: dict[str, dict[str, Where]] = {name: {} for name in modalities if name != loss}
    for name, fed in consumers.items():
        if name != main and name not in decoders:
            fed[main] = modalities[name].feeds
    for decoder, sources in decoders.items():
        for source in sources:
            consumers[source][decoder] = "ends"
    for name in (main, *decoders):
        if name != loss:
            consumers[name].setdefault(loss, "last")
    return consumers


def running_order(modalities: Mapping[str, Modality]) -> tuple[str, ...]:
    """Return the names of the modalities, those that feed another before it."""
    consumers = consumers_of(modalities)
    before: dict[str, list[str]] = {name: [] for name in modalities}
    for name, fed in consumers.items():
        for other in fed:
            before[other].append(name)
    return tuple(TopologicalSorter(before).static_order())


def check_feeds_from(modalities: Mapping[str, Modality]) -> None:
    """Refuse names that are none, circles, and modalities that run after nothing.

    Raises:
        ConfigError: at the first ``feeds_from`` that cannot work.
    """
    for name, modality in modalities.items():
        feed, field = modality.feeds_from, f"modalities.{name}.feeds_from"
        if feed is None:
            continue
        if not isinstance(feed, str | list | tuple) or not feed or not all(isinstance(source, str) for source in feed):
            rule = "It is the name of a modality, or a list of names"
            raise ConfigError(field, feed, rule, "Use for instance 'language'")
        sources = [feed] if isinstance(feed, str) else list(feed)
        others = [other for other in modalities if other != name]
        for source in sources:
            if source not in others:
                rule = "It names another modality, whose result this one computes with"
                raise ConfigError(field, feed, rule, did_you_mean(source, others) if others else "Leave it unset")
            if sources.count(source) > 1:
                raise ConfigError(field, feed, "Each modality is named once", f"Use {list(dict.fromkeys(sources))}")
    decoders = decoders_of(modalities)
    for name, modality in modalities.items():
        if name in decoders and modality.feeds != "first":
            rule = "A modality that feeds from another is needed by the rest of the step, so it says no stages"
            raise ConfigError(f"modalities.{name}.feeds", modality.feeds, rule, "Leave feeds unset")
    if decoders:
        _check_order(modalities, decoders)


def _check_order(modalities: Mapping[str, Modality], decoders: Mapping[str, tuple[str, ...]]) -> None:
    try:
        order = list(TopologicalSorter({name: decoders.get(name, ()) for name in modalities}).static_order())
    except CycleError as error:
        circle = list(reversed(error.args[1]))
        rule = f"{' -> '.join(circle)} is a circle, and a step runs modalities one after the other"
        field = f"modalities.{circle[0]}.feeds_from"
        fix = "Name what runs before it alone, such as 'language'"
        raise ConfigError(field, modalities[circle[0]].feeds_from, rule, fix) from None
    main = main_modality_of(modalities)
    if modalities[main].feeds != "first":
        rule = f"{', '.join(decoders)} says that it feeds from others, and {main!r} feeds the whole rest of the step"
        raise ConfigError(f"modalities.{main}.feeds", modalities[main].feeds, rule, "Leave feeds unset")
    after = {main}
    for name in order:
        if name in decoders and after.intersection(decoders[name]):
            after.add(name)
        elif name in decoders:
            rule = f"It runs after {main!r}, which encoders feed, so it feeds from {main!r} or from one that does"
            fix = f"Use {[main, *decoders[name]]}, or leave it unset for an encoder"
            raise ConfigError(f"modalities.{name}.feeds_from", list(decoders[name]), rule, fix)
