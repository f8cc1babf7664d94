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
from dataclasses import dataclass, fields, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, NamedTuple, overload

from lightning_mm5d.config.errors import ConfigError, did_you_mean, nearest, one_of


@dataclass(frozen=True, kw_only=True)
class PipelineTemplate:
    """Which layers run in which pipeline stage of a modality. One of its fields is given.

    Args:
        stages: One entry per stage, in order: either its number of layers, as in ``[8, 12, 12]``, or the
            dotted paths of its layers and modules, as in ``[["layers.0", "layers.1"], ["layers.2"]]``.
        offsets: For each stage how many layers more it has than when they are assigned evenly, left-over layers
            first, as in ``[0, 1, 1, -2]``.
    """

    stages: list[int] | list[list[str]] | None = None
    offsets: list[int] | None = None

    @property
    def num_stages(self) -> int:
        return len((self.offsets if self.stages is None else self.stages) or ())


class Owner(NamedTuple):
    """Whose ranks a modality shares: all of another modality's, or those of one of its pipeline ranks."""

    modality: str
    pp: int | None

    def __str__(self) -> str:
        return self.modality if self.pp is None else f"{self.modality}.{self.pp}"


@dataclass(frozen=True, kw_only=True)
class Modality:
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
        dp_shard_size: Ranks that share one copy of what `zero_stage` says, of the dp_size * cp_size that hold the same
            layers. Unset: all of them.
        zero_stage: What is shared: 1, the states of optimizers; 2, gradients too; 3, parameters too; 0, nothing.
            Unset: 3 with a `dp_shard_size` above 1, else 0.
        reshard_after_forward: Whether shared parameters are gathered for each layer's forward and again for its
            backward, instead of once for a step.
        tp_size: Tensor parallel degree: ranks that share each layer.
        tp_mode: How they share it. ``1d``: weights are sharded along one dim; on a grid weights and hidden states are
            in blocks: ``2d``, q * q ranks; ``2.5d``, tp_depth * q * q; ``3d``, q * q * q.
        tp_depth: Layers of the grid of ``2.5d``.
        sequence_parallel: Whether norms, dropouts and residuals between the sharded layers are sharded over the same
            ranks along the sequence, which takes less memory and no more communication. With ``ring`` the shards travel
            from rank to rank while linear layers multiply the rows that they have.
        shard_embedding: Whether the ranks of `tp_size` share the rows of the input embedding. If not, each holds it
            in full: no sum over ranks after each lookup, for the memory of the full table. Not for tied heads.
        make_vocab_size_divisible_by: Number of which the rows of vocabulary that each rank of `tp_size` holds are a
            multiple, as kernels of GPUs want. Of the last rank they may be fewer; its products are padded, and nothing
            else is. Unset: as even as they go.
        cp_size: Context parallel degree: ranks that share each sequence.
        cp_mode: How an attention reaches the tokens of other ranks. ``allgather``: keys and values are gathered, a head
            at a time; ``ring``: they are passed around; ``ulysses``: ranks exchange tokens for heads; ``hybrid``:
            ``ulysses`` within groups of `ulysses_size` ranks and ``ring`` between them; ``items``, for encoders: each
            rank takes whole images, frames or clips, and ``allgather`` where there is only one.
        cp_distribution: Which tokens a rank takes. ``uniform``: one stretch; ``zigzag``: two, one from either end;
            ``makespan_min``: blocks of 128, assigned by how many keys their queries see.
        ulysses_size: Ranks of the inner groups of ``hybrid``.
        inner_ring_size: Ranks of the inner rings of ``ring``, a double ring; it divides `cp_size`. Unset: those of one
            node, and one ring where nodes hold unlike numbers of them.
        pp_size: Number of pipeline stages. Unset: as many as ``pipeline_template`` has, else 1.
        pipeline_template: Which layers run in which stage. Unset: balanced by their costs.
        pp_chunks: Stages that each rank of the pipeline has, of as many model chunks; for interleaved schedules.
        pipelines: Replicas with unlike pipelines, in place of `dp_size`, `pp_size` and `pipeline_template`: for each
            replica its number of stages, as in ``[4, 3]``, or its template; or ``{min: 3}`` for as many replicas as
            the ranks of the run give with at least 3 stages each, and with ``max`` at most so many.
        speeds: How fast each replica is, in any unit, which decides how many of a step's microbatches it takes.
            Unset: its number of ranks.
        interleaved_microbatches: Microbatches that a stage computes side by side: one computes while another
            communicates with its tensor, context or expert parallel ranks. It divides `num_microbatches`, and is one
            number in all modalities where it is not 1.
        activation_checkpointing: Which layers are computed again in the backward instead of keeping what it needs:
            ``none``, ``full`` or ``selective``; or one of ``{fraction: 0.5}``, ``{every: 2}``, ``{layers: [0, 1]}``,
            ``{selective: [...]}`` with the operations whose results are kept, and ``{per_stage: [...]}`` with one of
            these for each pipeline stage.
        compile: Whether ``torch.compile`` compiles each layer, or the name of the backend that does it (``true``:
            ``inductor``). Equal layers share the compiled code.
        kernels: What computes parts of layers, one of these or a list: an attention of transformers by its name
            (``eager``, ``sdpa``, ``flash_attention_2``, ``flash_attention_3``); ``rms_norm`` of torch; ``liger``, for
            gated units, whose product Liger's Triton kernel computes.
        fused_linear_cross_entropy: Whether the head of a transformers model computes its logits together with their
            loss, a chunk of tokens at a time, and again in the backward. For the modality that computes the loss.
        ep_size: Expert parallel degree: ranks that share the experts of each layer, of the dp_size * cp_size that hold
            the same layers. Tokens travel to the ranks that hold their experts.
        expert_tp_size: Tensor parallel degree within an expert, with an `ep_size` above 1: 1 or `tp_size`. With 1 each
            tensor parallel rank sends some of the tokens to whole experts.
        offload: What is in host memory between its uses, one of these or a list: ``activations`` of microbatches in
            flight, states of the ``optimizer``, and ``parameters`` of a frozen encoder.
        cache_features: Folder in which the features of a frozen encoder are kept, so that each item is encoded once,
            whatever the number of epochs and runs.
        communication_dtype: Type of numbers on the wire: ``float32``, ``bfloat16``, ``float8_e4m3fn`` or
            ``float8_e5m2``, one for all traffic or by kind: ``gradients``, ``parameters``, ``payloads`` between stages,
            ``tensor_parallel``. With ``stochastic_rounding: true`` beside ``gradients`` these are rounded at random.
            Unset: the type of the tensors, which no wider one replaces.
        colocate_with: Name of the modality whose ranks this one shares, instead of having ranks of its own. With the
            number of one of its pipeline ranks, as in ``language.0``, the last stage of this one runs there, and
            earlier stages have ranks of their own.
        cost: Duration of a forward through the layers of one pipeline rank, in any unit, the same for all
            modalities; or one for each of its pipeline ranks. Unset: estimated from the parameters.
    """

    module: str | list[str] | None = None
    boundary: str | list[str] | None = None
    feeds: Literal["first", "all"] | list[int] = "first"
    feeds_from: str | list[str] | None = None
    dp_size: int | None = None
    dp_shard_size: int | None = None
    zero_stage: int | None = None
    reshard_after_forward: bool = False
    tp_size: int = 1
    tp_mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    tp_depth: int = 1
    sequence_parallel: bool | Literal["ring"] = False
    shard_embedding: bool = True
    make_vocab_size_divisible_by: int | None = None
    cp_size: int = 1
    cp_mode: Literal["allgather", "ring", "ulysses", "hybrid", "items"] = "allgather"
    cp_distribution: Literal["uniform", "zigzag", "makespan_min"] = "makespan_min"
    ulysses_size: int | None = None
    inner_ring_size: int | None = None
    pp_size: int | None = None
    pipeline_template: PipelineTemplate | None = None
    pp_chunks: int = 1
    pipelines: list[int] | list[PipelineTemplate] | dict[str, int] | None = None
    speeds: list[float] | None = None
    interleaved_microbatches: int = 1
    ep_size: int = 1
    expert_tp_size: int = 1
    activation_checkpointing: str | dict[str, Any] = "none"
    compile: bool | str = False
    kernels: str | list[str] | None = None
    fused_linear_cross_entropy: bool = False
    offload: str | list[str] | None = None
    cache_features: str | None = None
    communication_dtype: str | dict[str, str | bool | None] | None = None
    colocate_with: str | None = None
    cost: float | list[float] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of pipeline ranks of each replica, where `pipelines` lists them: ``(4, 3)``; else nothing."""
        if not isinstance(self.pipelines, list | tuple):
            return ()
        return tuple(one.num_stages if isinstance(one, PipelineTemplate) else one for one in self.pipelines)

    @property
    def stages(self) -> int:
        """Number of pipeline ranks: what was said, else what the template has room for, else 1; the most of several."""
        if self.lengths:
            return max(self.lengths)
        if self.pp_size is not None:
            return self.pp_size
        return 1 if self.pipeline_template is None else max(self.pipeline_template.num_stages // self.pp_chunks, 1)

    @property
    def offloads(self) -> tuple[str, ...]:
        """What `offload` names, as a tuple."""
        return (self.offload,) if isinstance(self.offload, str) else tuple(self.offload or ())

    @property
    def chosen_kernels(self) -> tuple[str, ...]:
        """What `kernels` names, as a tuple."""
        return (self.kernels,) if isinstance(self.kernels, str) else tuple(self.kernels or ())

    @property
    def shared_stage(self) -> int:
        """What ranks share of one copy: what `zero_stage` says, else 3 where `dp_shard_size` is above 1, else 0.

        It is 0 where the parameters are on the host: a frozen modality has neither gradients nor states to share.
        """
        if "parameters" in self.offloads:
            return 0
        if self.zero_stage is not None:
            return self.zero_stage
        return 3 if (self.dp_shard_size or 1) > 1 else 0

    @property
    def num_cuts(self) -> int:
        """Number of parts that the layers are cut into: pipeline ranks * pp_chunks."""
        return self.stages * self.pp_chunks

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
    return max(modality.interleaved_microbatches for modality in modalities.values())


def for_schedule(modalities: Mapping[str, Modality], schedule: object, loss_modality: str) -> dict[str, Modality]:
    """The modalities as a schedule wants them: ``zbv`` runs two chunks of the loss modality on each of its ranks.

    So it does of the language model and of other modalities that run after it. What the user said about chunks or
    layers per stage stays, and so do modalities with one pipeline rank.
    """
    found = dict(modalities)
    if schedule != "zbv" or any(not isinstance(other.feeds, str) for other in found.values()):
        return found  # lists in `feeds` count the stages that the user sees
    decoders = decoders_of(found)
    for name in {loss_modality: None, **({main_modality_of(found): None} if decoders else {}), **decoders}:
        modality = found.get(name)
        if (
            modality is None
            or modality.pipelines is not None
            or modality.pp_chunks > 1
            or modality.stages == 1
            or modality.pipeline_template is not None
        ):
            continue
        found[name] = replace(modality, pp_chunks=2)
    return found


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
    found: dict[str, tuple[str, ...]] = {}
    for name, modality in modalities.items():
        said = modality.feeds_from
        if said is None and modality.module is None and canonical_name(name) in _DECODERS and len(modalities) > 1:
            said = _main_of({one: other for one, other in modalities.items() if canonical_name(one) not in _DECODERS})
        if isinstance(said, str | list | tuple):
            found[name] = (said,) if isinstance(said, str) else tuple(said)
    return found


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
def as_modalities(said: Mapping[str, Any]) -> dict[str, Modality]: ...


@overload
def as_modalities(said: object) -> Any: ...


def as_modalities(said: object) -> Any:
    """Return the same modalities, each as a `Modality`: ``2`` is ``Modality(pp_size=2)``.

    What is neither stays as it is, for the check of modalities to refuse.

    Raises:
        ConfigError: a mapping names a field that does not exist.
    """
    if not isinstance(said, Mapping):
        return said
    return {name: _modality(name, one) for name, one in said.items()}


def _modality(name: object, said: object) -> Any:
    owner, dot, field = str(name).partition(".")
    if dot and isinstance(said, int):  # an option names a field of a modality that no file has
        known = _names(Modality)
        fix = f"Write modalities={{{owner}: {{{field}: {said}}}}}" if field in known else did_you_mean(field, known)
        raise ConfigError(f"modalities.{name}", said, f"There is no modality {owner!r} with such a field", fix)
    if isinstance(said, Mapping):
        return _made(f"modalities.{name}", Modality, said)
    if isinstance(said, Modality):
        made = _with_templates(f"modalities.{name}", {one: getattr(said, one) for one in _TEMPLATES})
        return replace(said, **made)
    return Modality(pp_size=said) if isinstance(said, int) and not isinstance(said, bool) else said


def _names(kind: type) -> list[str]:
    return [each.name for each in fields(kind)]


def _made(field: str, kind: type, said: Mapping[str, Any]) -> Any:
    """The object whose fields are said, which may have values of any type."""
    for key in said:
        if key not in _names(kind):
            raise ConfigError(f"{field}.{key}", said[key], "There is no such field", did_you_mean(key, _names(kind)))
    return kind(**_with_templates(field, said))


_TEMPLATES = ("pipeline_template", "pipelines")


def _with_templates(field: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields, with a `PipelineTemplate` in place of each mapping of its fields."""
    values = dict(said)
    if isinstance(template := values.get("pipeline_template"), Mapping):
        values["pipeline_template"] = _made(f"{field}.pipeline_template", PipelineTemplate, template)
    if isinstance(listed := values.get("pipelines"), list | tuple):
        values["pipelines"] = [
            _made(f"{field}.pipelines[{index}]", PipelineTemplate, one) if isinstance(one, Mapping) else one
            for index, one in enumerate(listed)
        ]
    return values


Where = Literal["first", "all", "ends", "last"] | list[int]
"""The stages of a consumer that are sent a result: ``ends`` are the first and the last one."""


def consumers_of(modalities: Mapping[str, Modality]) -> dict[str, dict[str, Where]]:
    """Return for each modality but the loss modality those that it feeds, and which of their stages.

    With ``language``, ``vision``, and a ``talker`` that feeds from ``language``, it is
    ``{"language": {"talker": "ends"}, "vision": {"language": "first"}}``.
    """
    main, loss, decoders = main_modality_of(modalities), loss_modality_of(modalities), decoders_of(modalities)
    found: dict[str, dict[str, Where]] = {name: {} for name in modalities if name != loss}
    for name, fed in found.items():
        if name != main and name not in decoders:
            fed[main] = modalities[name].feeds
    for decoder, sources in decoders.items():
        for source in sources:
            found[source][decoder] = "ends"
    for name in (main, *decoders):
        if name != loss:
            found[name].setdefault(loss, "last")
    return found


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
        said, field = modality.feeds_from, f"modalities.{name}.feeds_from"
        if said is None:
            continue
        if not isinstance(said, str | list | tuple) or not said or not all(isinstance(one, str) for one in said):
            rule = "It is the name of a modality, or a list of names"
            raise ConfigError(field, said, rule, "Use for instance 'language'")
        sources = [said] if isinstance(said, str) else list(said)
        others = [other for other in modalities if other != name]
        for source in sources:
            if source not in others:
                rule = "It names another modality, whose result this one computes with"
                raise ConfigError(field, said, rule, did_you_mean(source, others) if others else "Leave it unset")
            if sources.count(source) > 1:
                raise ConfigError(field, said, "Each modality is named once", f"Use {list(dict.fromkeys(sources))}")
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
