"""Fields of a modality and of the strategy in groups, each with the names that a user looks for together.

A name is in one group only, so that a sentence about `zero_stage` needs no group, and code asks for a field by its
name. Mappings of names stand for groups, as in YAML. Names without their group, as they were written before there were
groups, are put into it with one warning, for one release. Imports no torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from datetime import timedelta
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Literal, TypeVar

from lightning_mm5d.config.errors import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Shown:
    """A dataclass whose text has what was said, and no defaults."""

    def __repr__(self) -> str:
        texts = []
        for each in fields(self):
            usual = each.default if each.default_factory is MISSING else each.default_factory()
            if (value := getattr(self, each.name)) != usual:
                texts.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(texts)})"


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


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorOptions(Shown):
    """How the ranks of `tp_size` share each layer.

    Args:
        tp_mode: ``1d``: weights are sharded along one dim; on a grid weights and hidden states are in blocks: ``2d``,
            q * q ranks; ``2.5d``, tp_depth * q * q; ``3d``, q * q * q.
        tp_depth: Layers of the grid of ``2.5d``.
        sequence_parallel: Whether norms, dropouts and residuals between the sharded layers are sharded over the same
            ranks along the sequence, which takes less memory and no more communication. With ``ring`` the shards travel
            from rank to rank while linear layers multiply the rows that they have.
        shard_embedding: Whether the ranks of `tp_size` share the rows of the input embedding. If not, each holds it
            in full: no sum over ranks after each lookup, for the memory of the full table. Not for tied heads.
        make_vocab_size_divisible_by: Number of which the rows of vocabulary that each rank of `tp_size` holds are a
            multiple, as kernels of GPUs want. Of the last rank they may be fewer; its products are padded, and nothing
            else is. Unset: as even as they go.
        expert_tp_size: Tensor parallel degree within an expert, with an `ep_size` above 1: 1 or `tp_size`. With 1 each
            tensor parallel rank sends some of the tokens to whole experts.
    """

    tp_mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    tp_depth: int = 1
    sequence_parallel: bool | Literal["ring"] = False
    shard_embedding: bool = True
    make_vocab_size_divisible_by: int | None = None
    expert_tp_size: int = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class ContextOptions(Shown):
    """How the ranks of `cp_size` share each sequence.

    Args:
        cp_mode: How an attention reaches the tokens of other ranks. ``allgather``: keys and values are gathered, a head
            at a time; ``ring``: they are passed around; ``ulysses``: ranks exchange tokens for heads; ``hybrid``:
            ``ulysses`` within groups of `ulysses_size` ranks and ``ring`` between them; ``items``, for encoders: each
            rank takes whole images, frames or clips, and ``allgather`` where there is only one.
        cp_distribution: Which tokens a rank takes. ``uniform``: one stretch; ``zigzag``: two, one from either end;
            ``makespan_min``: blocks of 128, assigned by how many keys their queries see.
        ulysses_size: Ranks of the inner groups of ``hybrid``.
        inner_ring_size: Ranks of the inner rings of ``ring``, a double ring; it divides `cp_size`. Unset: those of one
            node, and one ring where nodes hold unlike numbers of them.
    """

    cp_mode: Literal["allgather", "ring", "ulysses", "hybrid", "items"] = "allgather"
    cp_distribution: Literal["uniform", "zigzag", "makespan_min"] = "makespan_min"
    ulysses_size: int | None = None
    inner_ring_size: int | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class PipelineOptions(Shown):
    """Which layers run in which stage, and what a stage computes when.

    Args:
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
        microbatches_per_call: Microbatches that one call of an encoder computes, forward and backward, where single
            calls are so small that most of their time is overhead. It divides `num_microbatches`.
    """

    pipeline_template: PipelineTemplate | None = None
    pp_chunks: int = 1
    pipelines: list[int] | list[PipelineTemplate] | dict[str, int] | None = None
    speeds: list[float] | None = None
    interleaved_microbatches: int = 1
    microbatches_per_call: int = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class ShardingOptions(Shown):
    """What replicas share instead of each holding it (ZeRO).

    Args:
        zero_stage: What is shared: 1, the states of optimizers; 2, gradients too; 3, parameters too; 0, nothing.
            Unset: 3 with a `dp_shard_size` above 1, else 0.
        dp_shard_size: Ranks that share one copy of what `zero_stage` says, of the dp_size * cp_size that hold the same
            layers. Unset: all of them.
        reshard_after_forward: Whether shared parameters are gathered for each layer's forward and again for its
            backward, instead of once for a step.
    """

    zero_stage: int | None = None
    dp_shard_size: int | None = None
    reshard_after_forward: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryOptions(Shown):
    """What is computed again, or kept elsewhere, to take less memory of the device.

    Args:
        activation_checkpointing: Which layers are computed again in the backward instead of keeping what it needs:
            ``none``, ``full`` or ``selective``; or one of ``{fraction: 0.5}``, ``{every: 2}``, ``{layers: [0, 1]}``,
            ``{selective: [...]}`` with the operations whose results are kept, and ``{per_stage: [...]}`` with one of
            these for each pipeline stage. Of an encoder also ``{items: 16}``: as ``full``, for 16 images, frames or
            sounds at a time.
        offload: What is in host memory between its uses, one of these or a list: ``activations`` of microbatches in
            flight, states of the ``optimizer``, and ``parameters`` of a frozen encoder.
        cache_features: Folder in which the features of a frozen encoder are kept, so that each item is encoded once,
            whatever the number of epochs and runs.
    """

    activation_checkpointing: str | dict[str, Any] = "none"
    offload: str | list[str] | None = None
    cache_features: str | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class ComputeOptions(Shown):
    """What computes layers.

    Args:
        compile: Whether ``torch.compile`` compiles each layer, or the name of the backend that does it (``true``:
            ``inductor``). Equal layers share the compiled code.
        kernels: What computes parts of layers, one of these or a list: an attention of transformers by its name
            (``eager``, ``sdpa``, ``flash_attention_2``, ``flash_attention_3``); ``rms_norm`` of torch; ``liger``, for
            gated units, whose product Liger's Triton kernel computes.
        fused_linear_cross_entropy: Whether the head of a transformers model computes its logits together with their
            loss, a chunk of tokens at a time, and again in the backward. For the modality that computes the loss.
    """

    compile: bool | str = False
    kernels: str | list[str] | None = None
    fused_linear_cross_entropy: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class CommunicationOptions(Shown):
    """How numbers travel between ranks.

    Args:
        communication_dtype: Type of numbers on the wire: ``float32``, ``bfloat16``, ``float8_e4m3fn`` or
            ``float8_e5m2``, one for all traffic or by kind: ``gradients``, ``parameters``, ``payloads`` between stages,
            ``tensor_parallel``. With ``stochastic_rounding: true`` beside ``gradients`` these are rounded at random.
            Unset: the type of the tensors, which no wider one replaces.
    """

    communication_dtype: str | dict[str, str | bool | None] | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchingOptions(Shown):
    """How batches become microbatches, and microbatches one loss.

    Args:
        num_microbatches: parts that each replica's batch is split into, M; 1 where unset.
        microbatch_size: samples of each part but the last, in place of `num_microbatches`.
        microbatching: ``"split"`` splits a batch of the dataloader; ``"loader"`` takes one batch per microbatch; a
            function of a batch and M returns the list of its microbatches.
        loss_weight: what the loss of a microbatch weighs: its ``"samples"``, or its label ``"tokens"``, which makes a
            loss that is a mean over tokens equal to that of the whole batch; ``"auto"`` tells by the code of the loss
            which it is a mean over; or what a function of it returns.
        balance: whether samples are dealt to microbatches so that each has as many images, frames and sounds to encode,
            and to replicas where the data set has ``sample_costs``. Losses, outputs and their order are those of the
            batch.
    """

    num_microbatches: int | None = None
    microbatch_size: int | None = None
    microbatching: Literal["split", "loader"] | Callable[[Any, int], Any] = "split"
    loss_weight: Literal["auto", "samples", "tokens"] | Callable[[Any], Any] = "auto"
    balance: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckpointOptions(Shown):
    """What is saved, and what happens to files that are not as they were written.

    Args:
        checkpoint_format: one ``"full"`` file, as Lightning saves it, gathered on rank 0; or a ``"sharded"`` directory,
            which each rank writes its own shards to.
        async_checkpoint: whether training goes on while a sharded checkpoint is written.
        on_corrupt_checkpoint: what a checkpoint that is not as it was written does: ``"raise"``, or load the
            ``"previous"`` good one of its folder.
        in_memory_every_n_steps: after how many steps each rank writes its shards into the memory of its host, and of
            another node's, from which a run goes on after torchrun has started its ranks again; never where unset.
    """

    checkpoint_format: Literal["full", "sharded"] = "full"
    async_checkpoint: bool = False
    on_corrupt_checkpoint: Literal["raise", "previous"] = "raise"
    in_memory_every_n_steps: int | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class LaunchOptions(Shown):
    """How processes start and speak with each other.

    Args:
        start_method: how Lightning starts processes on one machine: ``"popen"``, ``"spawn"`` or ``"fork"``.
        process_group_backend: backend of torch.distributed; chosen by device where unset.
        timeout: of every operation between ranks.
        watchdog: how long one call may wait for other ranks before all of them give up.
        bucket_bytes: how much of gradients and shared parameters one message between ranks carries.
    """

    start_method: Literal["popen", "spawn", "fork"] = "popen"
    process_group_backend: str | None = None
    timeout: timedelta = timedelta(minutes=30)
    watchdog: timedelta = timedelta(minutes=5)
    bucket_bytes: int = 25 * 2**20


@dataclass(frozen=True, kw_only=True, repr=False)
class NumericsOptions(Shown):
    """What precision parameters have beside the trainer's, and what numbers that are not finite do.

    Args:
        main_params: precision of the parameters that optimizers step on and of gradients, ``"float32"`` for layers that
            compute in ``bf16-true`` or ``16-true``; or ``"float64"``. Unset: the precision of the layers.
        on_nonfinite: what a loss or gradient that is not finite does: ``"propagate"`` as in Lightning, ``"raise"`` on
            all ranks, or ``"skip"`` the optimizer's step on all; the last two change no parameter.
    """

    main_params: Literal["float32", "float64"] | None = None
    on_nonfinite: Literal["propagate", "raise", "skip"] = "propagate"


OF_MODALITY: Mapping[str, type] = {
    "tensor": TensorOptions,
    "context": ContextOptions,
    "pipeline": PipelineOptions,
    "sharding": ShardingOptions,
    "memory": MemoryOptions,
    "compute": ComputeOptions,
    "communication": CommunicationOptions,
}
OF_STRATEGY: Mapping[str, type] = {
    "batching": BatchingOptions,
    "checkpoint": CheckpointOptions,
    "launch": LaunchOptions,
    "numerics": NumericsOptions,
}
BESIDE = (
    *("module", "boundary", "feeds", "feeds_from", "dp_size", "tp_size", "pp_size", "cp_size", "ep_size"),
    *("colocate_with", "cost"),
)
"""What a user may say of a modality beside its groups."""
FIELDS = ("modalities", "schedule", "batching", "placement", "checkpoint", "launch", "numerics", "timeline")
"""What a user may say of the strategy."""
OBJECTS = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
"""What the trainer hands to the strategy, which stands in a configuration that a parser has written, as null."""


def names_of(kind: type) -> list[str]:
    """Return the names of the fields of a dataclass, in their order."""
    return [each.name for each in fields(kind)]


def _owners(groups: Mapping[str, type]) -> dict[str, str]:
    return {name: group for group, kind in groups.items() for name in names_of(kind)}


_OWNERS = _owners(OF_MODALITY) | _owners(OF_STRATEGY)
"""The group of each name."""


def path_of(name: str) -> str:
    """Return ``sharding.zero_stage`` for ``zero_stage``; a name without a group as it is."""
    return f"{_OWNERS[name]}.{name}" if name in _OWNERS else name


def value_of(holder: object, name: str) -> Any:
    """Return the field of a modality by its name, in whatever group it is."""
    return getattr(getattr(holder, _OWNERS[name]) if name in _OWNERS else holder, name)


def with_fields(holder: T, **values: Any) -> T:
    """Return a modality with other values of these fields, in whatever groups they are."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name in _OWNERS:
            group = _OWNERS[name]
            changes[group] = replace(changes.get(group, getattr(holder, group)), **{name: value})
        else:
            changes[name] = value
    return replace(holder, **changes)  # type: ignore[type-var]


def in_groups(groups: Mapping[str, type], values: Mapping[str, Any], field: str, stacklevel: int = 3) -> dict[str, Any]:
    """Return what is said, with names that lack their group put into it.

    Args:
        groups: by name, the dataclass of each.
        values: by name of a field or group.
        field: path of what is said, which is empty for the strategy.
        stacklevel: of the warning.

    Raises:
        ConfigError: a field is said with and without its group.
    """
    flat = [name for name in values if _OWNERS.get(name) in groups and name not in groups]
    grouped = {name: value for name, value in values.items() if name not in flat}
    start = f"{field}." if field else ""
    for name in flat:
        group = _OWNERS[name]
        before = grouped.get(group) or {}
        if not isinstance(before, Mapping | groups[group]):
            continue  # it is refused later
        usual = getattr(groups[group](), name)
        grouped_value = before.get(name, usual) if isinstance(before, Mapping) else getattr(before, name)
        if grouped_value not in (usual, values[name]):
            rule = f"{start}{path_of(name)}={grouped_value!r} says it already"
            raise ConfigError(f"{start}{name}", values[name], rule, f"Say {start}{path_of(name)} alone")
        update: dict[str, Any] = {name: values[name]}
        grouped[group] = {**before, **update} if isinstance(before, Mapping) else replace(before, **update)  # type: ignore[type-var]
    if flat:
        moved = ", ".join(f"{start}{name} is now {start}{path_of(name)}" for name in flat)
        text = f"Fields are in groups: {moved}. Names without their group are taken in this release only"
        warnings.warn(text, FutureWarning, stacklevel=stacklevel)
    return grouped


def build_groups(groups: Mapping[str, type], options: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return what is said, with a dataclass in place of each mapping of a group's fields; of all groups.

    Args:
        groups: by name, the dataclass of each.
        options: by name of a field or group.
        field: path of what is said, which is empty for the strategy.

    Raises:
        ConfigError: a group is no mapping, or it has no such field.
    """
    built, start = dict(options), f"{field}." if field else ""
    for group, kind in groups.items():
        value = {} if built.get(group) is None else built[group]
        if isinstance(value, kind):
            continue
        if not isinstance(value, Mapping):
            names = names_of(kind)
            fix = f"Write {{{group}: {{{names[0]}: {value}}}}}" if len(names) == 1 else "Name the field"
            raise ConfigError(f"{start}{group}", value, f"It is a group of fields: {', '.join(names)}", fix)
        built[group] = dataclass_of(f"{start}{group}", kind, value)
    return built


def dataclass_of(field: str, kind: type[T], options: Mapping[str, Any]) -> T:
    """Return the dataclass whose fields are said, which may have values of any type.

    Args:
        field: path of the mapping.
        kind: the dataclass.
        options: its fields by name.

    Raises:
        ConfigError: there is no such field.
    """
    refuse_unknown_fields(field, kind, options)
    return kind(**options)


def refuse_unknown_fields(field: str, kind: type, options: Mapping[str, Any]) -> None:
    """Refuse names that no field of a dataclass has; raise ConfigError like `dataclass_of`."""
    for name, value in options.items():
        if name not in (names := names_of(kind)):
            inner = [path_of(key) for group in OF_MODALITY if group in names for key in names_of(OF_MODALITY[group])]
            known = [key for key in names if key not in OF_MODALITY] + inner
            fix = f"Write {path_of(name)}" if name in _OWNERS else did_you_mean(name, known)
            if name in (BESIDE if kind in OF_MODALITY.values() else FIELDS):
                fix = f"Write {name} beside {field.split('.')[-1]}, not in it"
            rule, (head, _, tail) = "There is no such field", str(name).partition(".")
            types = {spec.name: spec.type for spec in fields(OF_MODALITY[head])} if head in OF_MODALITY else {}
            if head in names and tail in types:  # what a parser of options could not put into the field
                rule, fix = "It is of another type", f"Write a value of {types[tail]}"
            raise ConfigError(f"{field}.{name}", value, rule, fix)


def _name_unknown_fields(kind: type) -> None:
    """Have the constructor of a dataclass refuse an unknown field as `dataclass_of` does."""
    constructor = kind.__init__  # type: ignore[misc]

    @wraps(constructor)
    def construct(self: object, **options: Any) -> None:
        refuse_unknown_fields(kind.__name__, kind, options)
        constructor(self, **options)

    kind.__init__ = construct  # type: ignore[misc]


for _kind in (PipelineTemplate, *OF_MODALITY.values(), *OF_STRATEGY.values()):
    _name_unknown_fields(_kind)


def accepts_mappings(kind: type[T]) -> type[T]:
    """Have the constructor of a dataclass with groups take mappings for them, and names that lack their group.

    What is wrong in a mapping is left in it, for the checks to refuse.
    """
    constructor = kind.__init__
    ungrouped = [(each.name, each.type) for group in OF_MODALITY.values() for each in fields(group)]

    @wraps(constructor)
    def construct(self: T, **options: Any) -> None:
        given = {name: value for name, value in options.items() if value is not None or name not in _OWNERS}
        given = in_groups(OF_MODALITY, given, "")
        for group, each in OF_MODALITY.items():
            value = {} if given.get(group) is None else given[group]
            if isinstance(value, Mapping) and set(value).issubset(names_of(each)):
                given[group] = each(**value)
        refuse_unknown_fields(kind.__name__, kind, given)
        constructor(self, **given)

    # parsers of command lines take names and types from here
    shown = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=f"{annotation} | None")
        for name, annotation in ungrouped
    ]
    construct.__signature__ = Signature([*signature(constructor).parameters.values(), *shown])  # type: ignore[attr-defined]
    kind.__init__ = construct  # type: ignore[assignment, method-assign]
    return kind


def option_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a user says to the strategy by the names of fields, without groups; of all fields in groups.

    A word in place of the group ``checkpoint`` is its format.

    Raises:
        ConfigError: a group is no mapping, or it has no such field.
    """
    given = dict(options)
    if isinstance(kind := given.get("checkpoint"), str):
        given["checkpoint"] = {"checkpoint_format": kind}
    given = build_groups(OF_STRATEGY, in_groups(OF_STRATEGY, given, "", stacklevel=4), "")
    groups = [given.pop(group) for group in OF_STRATEGY]
    return given | {name: getattr(group, name) for group in groups for name in names_of(type(group))}


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Refuse names that the strategy does not take.

    Raises:
        ConfigError: at the first such name.
    """
    taken = signature(fields_of_strategy).parameters.keys() - {"unknown"}
    for name in sorted(options.keys() - {*FIELDS, *OBJECTS, *taken}):
        fix = f"{did_you_mean(name, [*map(path_of, taken), *FIELDS]).split('? ')[0]}? There are {', '.join(FIELDS)}"
        if name in _owners(OF_STRATEGY):
            fix = f"Write {path_of(name)}"
        elif name in {*BESIDE, *OF_MODALITY, *_OWNERS}:
            fix = f"It is a field of a modality: write modalities.<name>.{path_of(name)}, for instance of 'language'"
        raise ConfigError(name, options[name], "The strategy has no such field", fix)


def fields_of_strategy(
    *,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    microbatching: Literal["split", "loader"] | Callable[[Any, int], Any] | None = None,
    loss_weight: Literal["auto", "samples", "tokens"] | Callable[[Any], Any] | None = None,
    start_method: Literal["popen", "spawn", "fork"] | None = None,
    process_group_backend: str | None = None,
    timeout: timedelta | None = None,
    watchdog: timedelta | None = None,
    bucket_bytes: int | None = None,
    main_params: Literal["float32", "float64"] | None = None,
    on_nonfinite: Literal["propagate", "raise", "skip"] | None = None,
    async_checkpoint: bool | None = None,
    on_corrupt_checkpoint: Literal["raise", "previous"] | None = None,
    **unknown: Any,
) -> dict[str, Any]:
    """Return what is said without groups: a parser of command lines takes names and types of options from here.

    Args:
        num_microbatches: now batching.num_microbatches.
        microbatch_size: now batching.microbatch_size.
        microbatching: now batching.microbatching.
        loss_weight: now batching.loss_weight.
        start_method: now launch.start_method.
        process_group_backend: now launch.process_group_backend.
        timeout: now launch.timeout.
        watchdog: now launch.watchdog.
        bucket_bytes: now launch.bucket_bytes.
        main_params: now numerics.main_params.
        on_nonfinite: now numerics.on_nonfinite.
        async_checkpoint: now checkpoint.async_checkpoint.
        on_corrupt_checkpoint: now checkpoint.on_corrupt_checkpoint.
        unknown: what no strategy has.

    Raises:
        ConfigError: there is no such field.
    """
    options = {name: value for name, value in locals().items() if value is not None and name != "unknown"}
    refuse_unknown(unknown)
    return options
