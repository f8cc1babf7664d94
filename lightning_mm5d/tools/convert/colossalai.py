"""ColossalAI's `HybridParallelPlugin`, `MoeHybridParallelPlugin` and older files: tables of knobs, and the rules.

The order of a plugin's table is that of the constructor, so that positional arguments have their names. Without
`precision` both plugins train in float16, which is therefore said here.

Older files say ``parallel = dict(pipeline=2, tensor=dict(size=4, mode="1d"))`` and the rest. Names that ColossalAI
itself does not read (``BATCH_SIZE``, ``SEQ_LENGTH``) are the user's own, and are listed as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.tools.convert.knobs import (
    KERNELS,
    Conversion,
    Draft,
    Entry,
    Knob,
    always,
    convert_kernels,
    costs,
    elsewhere,
    results,
    ruled,
    same,
    with_all_kernels,
)

_SCALER = "The scaler is the Trainer's: plugins=MixedPrecision('16-mixed', 'cuda', scaler=torch.amp.GradScaler(...))"
_NO_SCALER = "torch's GradScaler has no such setting"
_OVERLAPS = "Communication overlaps with computation wherever it can"
PARALLEL_OUTPUT = (
    "Logits stay sharded, and pass for whole ones wherever they are read; `vocabulary_shard` gives those of a rank"
)

_VOCABULARY = "make_vocab_size_divisible_by"
VOCABULARY = (
    ruled(_VOCABULARY, f"modality.tensor.{_VOCABULARY}", "Where a `tp_size` of 2 or more shares the vocabulary"),
)

PRECISION = (
    ruled("precision", "trainer.precision strategy.numerics.main_params", "`fp16`: `16-mixed`; `bf16`: `bf16-true` "
          "with float32 main parameters; `fp32` and null: `32-true`; left out: as the plugin's default"),
)  # fmt: skip
SCALER = (
    elsewhere("initial_scale", _SCALER, neutral=(2**16, 2.0**16)),
    elsewhere("min_scale", _NO_SCALER, neutral=(1, 1.0)),
    elsewhere("growth_factor", _SCALER, neutral=(2, 2.0)),
    elsewhere("backoff_factor", _SCALER, neutral=(0.5,)),
    elsewhere("growth_interval", _SCALER),
    elsewhere("hysteresis", _NO_SCALER),
    elsewhere("max_scale", _NO_SCALER),
    same("max_norm", "trainer.gradient_clip_val", neutral=(0, 0.0)),
)
CHECKPOINTING = (
    ruled("gradient_checkpoint_config.gradient_checkpointing_ratio", "modality.memory.activation_checkpointing",
          "`{fraction: ...}`", neutral=(0, 0.0)),
    ruled("gradient_checkpoint_config.num_ckpt_layers_per_stage", "modality.memory.activation_checkpointing",
          "`{per_stage: [...]}` with the first layers of each stage"),
    always("gradient_checkpoint_config.num_stages", "It checks other arguments"),
    always("gradient_checkpoint_config.num_model_chunks", "It checks other arguments"),
    always("gradient_checkpoint_config.num_model_layers", "It checks other arguments"),
)  # fmt: skip

KNOBS: tuple[Knob, ...] = (
    same("tp_size", "modality.tp_size"),
    same("pp_size", "modality.pp_size"),
    ruled("sp_size", "modality.cp_size", "Of `all_to_all` and `ring_attn`; the other modes share it with `tp_size`"),
    *PRECISION,
    same("zero_stage", "modality.sharding.zero_stage"),
    ruled("enable_all_optimization", "modality.compute.kernels modality.compute.compile",
          "Turns the three below on, there and here, but for `rms_norm`: compiled layers fuse whatever norms they have",
          neutral=(False,)),
    *KERNELS,
    ruled("enable_sequence_parallelism", "modality.tensor.sequence_parallel modality.context.cp_mode",
          "As the mode says", neutral=(False,)),
    ruled("sequence_parallelism_mode",
          "modality.tensor.sequence_parallel modality.context.cp_mode modality.context.cp_distribution",
          "`split_gather`: `sequence_parallel: true`; `ring`: `sequence_parallel: ring`; `all_to_all`: `cp_mode: "
          "ulysses`; `ring_attn`: `cp_mode: ring` with `cp_distribution: zigzag`"),
    always("parallel_output", PARALLEL_OUTPUT),
    ruled("num_microbatches", "strategy.batching.num_microbatches", "With several stages"),
    ruled("microbatch_size", "strategy.batching.microbatch_size", "Where `num_microbatches` is not said"),
    *SCALER,
    always("broadcast_buffers", "Buffers are those of rank 0 at the start"),
    ruled("ddp_bucket_cap_mb", "strategy.launch.bucket_bytes", "Times 2**20, without ZeRO"),
    always("find_unused_parameters", "Ranks agree on which gradients exist"),
    always("check_reduction", "It checks their own buckets"),
    always("gradient_as_bucket_view", "Gradients are views of their buckets where they can be"),
    always("static_graph", "Whatever depends on the structure alone is agreed once for each structure"),
    ruled("zero_bucket_size_in_m", "strategy.launch.bucket_bytes", "Times 2**20 and the bytes of a number, with ZeRO"),
    ruled("cpu_offload", "modality.memory.offload", "`optimizer`, with ZeRO", neutral=(False,)),
    ruled("communication_dtype", "modality.communication.communication_dtype", "Of gradients, with ZeRO"),
    costs("overlap_communication", _OVERLAPS, neutral=(True,)),
    results("custom_policy", "A policy is code: write a TensorParallelPlan and register it with "
            "`register_tensor_parallel_plan`; most models need none"),
    ruled("pp_style", "strategy.schedule", "`1f1b`, `interleaved` and `zbv` have the same names"),
    ruled("num_model_chunks", "modality.pipeline.pp_chunks", "With several stages"),
    ruled("scheduler_nodes", "strategy.schedule", "`zbv` makes its own order; one of your own is a table (`.csv`)"),
    ruled("num_layers_per_stage", "modality.pipeline.pipeline_template", "`{stages: [...]}`"),
    *CHECKPOINTING,
    always("enable_metadata_cache", "Shapes are agreed once for each structure"),
    *VOCABULARY,
    ruled("dp_outside", "strategy.placement", "`[dp, pp, cp, tp]`; `false` is the order without one",
          neutral=(False,)),
    costs("overlap_p2p", _OVERLAPS, neutral=(True,)),
    always("overlap_allgather", "The gather of shared parameters overlaps with computation"),
    ruled("fp8_communication", "modality.communication.communication_dtype",
          "`float8_e5m2` for gradients, `float8_e4m3fn` for the rest, but for rows in a `ring`", neutral=(False,)),
    results("use_fp8", "Products in float8 are the Trainer's precision plugin: transformer-engine", neutral=(False,)),
    ruled("inner_ring_size", "modality.context.inner_ring_size", "With `ring_attn`"),
)  # fmt: skip


def _of_experts(knob: Knob) -> tuple[Knob, ...]:
    if knob.name == "pp_size":
        return knob, same("ep_size", "modality.ep_size")
    if knob.name == "inner_ring_size":
        return ()
    if knob.name == "dp_outside":
        about = "Ranks that share experts are no axis of their own: `placement` orders `pp`, `dp`, `cp` and `tp`"
        return (costs("moe_dp_outside", about, neutral=(False,)),)
    return (knob,)


MOE_KNOBS = tuple(moe_knob for knob in KNOBS for moe_knob in _of_experts(knob))
_MODES = ("split_gather", "ring", "all_to_all", "ring_attn")
_STYLES = ("1f1b", "interleaved", "zbv")
_OF_PIPELINES = (
    *("num_microbatches", "microbatch_size", "pp_style", "num_model_chunks", "scheduler_nodes", "num_layers_per_stage"),
    "gradient_checkpoint_config.num_ckpt_layers_per_stage",
)


def convert_hybrid(given: Mapping[str, Any]) -> Conversion:
    """Say the arguments of a `HybridParallelPlugin` in ours.

    Raises:
        ConfigError: an argument does not exist, or has a value that the plugin refuses.
    """
    return _converted("ColossalAI HybridParallelPlugin", KNOBS, given)


def convert_moe(given: Mapping[str, Any]) -> Conversion:
    """Say the arguments of a `MoeHybridParallelPlugin` in ours; raise ConfigError like `convert_hybrid`."""
    return _converted("ColossalAI MoeHybridParallelPlugin", MOE_KNOBS, given)


def _converted(source: str, table: tuple[Knob, ...], given: Mapping[str, Any]) -> Conversion:
    draft = Draft(table, with_all_kernels(given))
    for name in ("tp_size", "pp_size", *(["ep_size"] if table is MOE_KNOBS else [])):
        if name not in draft.given:
            raise draft.refused(name, f"The plugin needs its {name}", "Write 1 for none")
        draft.count(name)
    convert_precision(draft)
    _convert_sequence(draft)
    if table is KNOBS and draft.get("inner_ring_size") is not None:
        if draft.modality.get("context", {}).get("cp_mode") == "ring":
            draft.put("inner_ring_size", "modality.context.inner_ring_size", draft.count("inner_ring_size"))
        else:
            draft.leave("inner_ring_size", "always", "It is read with ring_attn alone")
    _convert_pipeline(draft)
    _convert_checkpointing(draft)
    _convert_communication(draft)
    if draft.given.get("dp_outside", False):
        draft.put("dp_outside", "strategy.placement", ["dp", "pp", "cp", "tp"])
    convert_kernels(draft)
    convert_vocabulary(draft)
    return draft.conversion(source)


def convert_precision(draft: Draft, default: str = "fp16", *, has_main: bool = True) -> None:
    """Say `precision`, with main parameters where the plugin has them, and that scalers do nothing without float16."""
    precisions = {"fp16": "16-mixed", "bf16": "bf16-true", "fp32": "32-true"}
    about = "" if draft.get("precision") else f"By default {default!r}"
    if about and "precision" in draft.given:
        default, about = "fp32", "Parameters stay in the dtype that the model gives them"
    precision = draft.choice("precision", list(precisions), default)
    assert precision is not None
    draft.put("precision", "trainer.precision", precisions[precision], about)
    if precision == "bf16" and has_main:
        draft.put("precision", "strategy.numerics.main_params", "float32")
    if not has_main:
        about = "Parameters are updated as they are" if precision != "fp16" else "16-mixed has parameters in float32"
        draft.leave("master_weights", "costs" if precision == "fp16" else "always", about)
    if precision != "fp16":
        for knob in SCALER[:-1]:
            if knob.name in draft.given:
                draft.leave(knob.name, "always", "Only float16 is scaled")


def _convert_sequence(draft: Draft) -> None:
    switch, mode_name = "enable_sequence_parallelism", "sequence_parallelism_mode"
    size, tp_size = draft.count("sp_size"), draft.count("tp_size")
    mode = draft.choice(mode_name, _MODES, "all_to_all")
    if not draft.get(switch, False):
        if size != 1:
            raise draft.refused("sp_size", f"The plugin refuses it without {switch}", f"Add {switch}=True, or leave it")
        draft.leave_rest([switch, mode_name, "sp_size"], "always", f"Nothing happens without {switch}")
        return
    if mode in ("split_gather", "ring"):
        if tp_size == 1:
            raise draft.refused(mode_name, f"The plugin refuses {mode} with tp_size=1", "Use a tp_size of 2 or more")
        sequence_parallel = "ring" if mode == "ring" else True
        draft.put(switch, "modality.tensor.sequence_parallel", sequence_parallel)
        draft.put(mode_name, "modality.tensor.sequence_parallel", sequence_parallel)
        draft.leave_rest(["sp_size"], "always", "In this mode the ranks of tp_size share sequences")
        return
    if size == 1:
        draft.leave_rest([switch, mode_name, "sp_size"], "always", "One rank shares no sequence")
        return
    draft.put("sp_size", "modality.cp_size", size)
    name = mode_name if mode_name in draft.given else switch
    draft.put(name, "modality.context.cp_mode", "ulysses" if mode == "all_to_all" else "ring")
    if mode == "ring_attn":
        draft.put(name, "modality.context.cp_distribution", "zigzag")
    draft.leave_rest([switch], "always", f"{mode_name} says it")


def _convert_pipeline(draft: Draft) -> None:
    if draft.count("pp_size") == 1:
        draft.leave_rest(_OF_PIPELINES, "always", "With one stage nothing is split, here or there")
        return
    convert_microbatches(draft)
    style, chunks = draft.choice("pp_style", _STYLES, "1f1b"), draft.count("num_model_chunks")
    if (style == "1f1b") != (chunks == 1) or (style == "zbv" and chunks != 2):
        right = {"1f1b": "1", "zbv": "2", "interleaved": "2 or more"}[str(style)]
        raise draft.refused("num_model_chunks", f"The plugin refuses it for pp_style={style!r}", f"Use {right}")
    if "pp_style" in draft.given:
        draft.put("pp_style", "strategy.schedule", style)
    if chunks > 1:
        draft.put("num_model_chunks", "modality.pipeline.pp_chunks", chunks)
    draft.leave_rest(["num_model_chunks"], "always", "One chunk is the default")
    if draft.get("num_layers_per_stage") is not None:
        stages = {"stages": draft.counts("num_layers_per_stage")}
        draft.put("num_layers_per_stage", "modality.pipeline.pipeline_template", stages)
    if draft.get("scheduler_nodes") is not None:
        draft.leave("scheduler_nodes", "costs", "zbv makes its own order; one of your own is a table (.csv)")


def convert_vocabulary(draft: Draft) -> None:
    """Say of what the rows of vocabulary on each rank are a multiple, in the modality of the draft."""
    if draft.get(_VOCABULARY) is None:
        return
    multiple = draft.count(_VOCABULARY, 64)
    if draft.modality.get("tp_size", 1) > 1:
        draft.put(_VOCABULARY, f"modality.tensor.{_VOCABULARY}", multiple)
    else:
        draft.leave(_VOCABULARY, "costs", "Without a tp_size above 1 a table is computed with in its own size")


def convert_microbatches(draft: Draft) -> None:
    """Say the number of microbatches, or their size where that alone is given."""
    if draft.get("num_microbatches") is not None:
        draft.put("num_microbatches", "strategy.batching.num_microbatches", draft.count("num_microbatches"))
        draft.leave_rest(["microbatch_size"], "always", "num_microbatches decides")
    elif draft.get("microbatch_size") is not None:
        draft.put("microbatch_size", "strategy.batching.microbatch_size", draft.count("microbatch_size"))
    else:
        rule = "With several stages the plugin needs it, or microbatch_size"
        raise draft.refused("num_microbatches", rule, "Say how many microbatches a batch is split into")


def _convert_checkpointing(draft: Draft) -> None:
    ratio, per_stage = (knob.name for knob in CHECKPOINTING[:2])
    if draft.get(per_stage) is not None and draft.count("pp_size") > 1:
        counts = draft.counts(per_stage)
        if draft.get("pp_style") == "zbv":  # they count by rank, and the second chunks run from the last rank back
            half = len(counts) // 2
            counts = [*counts[:half], *reversed(counts[half:])]
        draft.put(per_stage, "modality.memory.activation_checkpointing", recomputed_per_stage(counts))
        draft.leave_rest([ratio], "always", "num_ckpt_layers_per_stage decides")
    elif draft.get(ratio, 0):
        draft.put(ratio, "modality.memory.activation_checkpointing", {"fraction": draft.get(ratio)})


def recomputed_per_stage(counts: list[int]) -> dict[str, Any]:
    """Say that the first layers of each stage are computed again: ``[2, 0]`` recomputes two layers of stage 0."""
    return {"per_stage": [{"layers": list(range(count))} if count else "none" for count in counts]}


def _convert_communication(draft: Draft) -> None:
    shares = draft.get("zero_stage", 0) != 0
    bytes_each = 4 if draft.get("precision") == "fp32" else 2
    bucket, other = ("zero_bucket_size_in_m", "ddp_bucket_cap_mb")[:: 1 if shares else -1]
    if bucket in draft.given:
        each = bytes_each if shares else 1
        draft.put(bucket, "strategy.launch.bucket_bytes", draft.count(bucket) * 2**20 * each)
    draft.leave_rest([other], "always", f"It is read {'without' if shares else 'with'} ZeRO alone")
    if not shares:
        draft.leave_rest(["cpu_offload", "communication_dtype"], "always", "It is read with ZeRO alone")
    if shares and draft.get("cpu_offload", False):
        draft.put("cpu_offload", "modality.memory.offload", "optimizer")
    convert_dtypes(draft, shares=shares)


def convert_dtypes(draft: Draft, *, shares: bool) -> None:
    """Say in which dtypes numbers travel; `shares` tells whether ranks share parameters."""
    if draft.get("fp8_communication", False):
        rings = draft.modality.get("tensor", {}).get("sequence_parallel") == "ring"  # whose rows travel as they are
        for kind in ("parameters", "payloads", *([] if rings else ["tensor_parallel"])):
            draft.put("fp8_communication", f"modality.communication.communication_dtype.{kind}", "float8_e4m3fn")
        draft.put("fp8_communication", "modality.communication.communication_dtype.gradients", "float8_e5m2")
    dtype = draft.get("communication_dtype") if shares else None
    if dtype is None:
        return
    name = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(str(dtype), str(dtype).removeprefix("torch."))
    if name == "float16":
        draft.leave("communication_dtype", "costs", "Numbers travel as float32, bfloat16 or float8; unset, as they are")
    elif draft.get("fp8_communication", False):
        draft.leave("communication_dtype", "always", "fp8_communication decides")
    else:
        draft.put("communication_dtype", "modality.communication.communication_dtype.gradients", name)


LEGACY_KNOBS: tuple[Knob, ...] = (
    same("parallel.pipeline.size", "modality.pp_size"),
    ruled("parallel.tensor.size", "modality.tp_size modality.cp_size", "`cp_size` with `mode=\"sequence\"`"),
    ruled("parallel.tensor.mode", "modality.tensor.tp_mode modality.context.cp_mode modality.context.cp_distribution",
          "`1d`: `tp_size` says it; `2d`, `2.5d`, `3d`: the same words; `sequence`: `cp_mode: ring` with "
          "`cp_distribution: uniform`"),
    ruled("parallel.tensor.depth", "modality.tensor.tp_depth", "Of `2.5d`"),
    always("parallel.data.size", "The number of ranks decides, here and there"),
    same("parallel.moe.size", "modality.ep_size"),
    ruled("NUM_MICRO_BATCHES", "strategy.batching.num_microbatches", "With several stages"),
    ruled("model.num_chunks", "modality.pipeline.pp_chunks strategy.schedule", "Above 1, with `interleaved`",
          neutral=(1,)),
    ruled("zero", "modality.sharding.zero_stage", "Its `level`, or 3", neutral=(None,)),
    ruled("fp16", "trainer.precision", "`16-mixed`; its scaler is the Trainer's", neutral=(None,)),
    same("clip_grad_norm", "trainer.gradient_clip_val", neutral=(0, 0.0)),
    same("gradient_accumulation", "trainer.accumulate_grad_batches"),
    same("cudnn_benchmark", "trainer.benchmark"),
    same("cudnn_deterministic", "trainer.deterministic"),
    always("gradient_handler", "Gradients are summed over all ranks that hold the same parameter"),
    costs("torch_ddp", "`bucket_bytes` sets the size of messages"),
    always("TENSOR_SHAPE", "Shapes are found by the first microbatch"),
)  # fmt: skip
_SECTIONS = ("pipeline", "tensor", "data", "moe")
_LEGACY_MODES = ("1d", "2d", "2.5d", "3d", "sequence")


LEGACY_READ = (
    *("parallel", "NUM_MICRO_BATCHES", "clip_grad_norm", "gradient_accumulation"),
    *("cudnn_benchmark", "cudnn_deterministic"),
)
"""Names in a file whose values are all read."""


def is_legacy(given: Mapping[str, Any]) -> bool:
    """Return whether a configuration has a `parallel` of this kind, or shares parameters without one."""
    parallel = given.get("parallel")
    if "parallel" in given and parallel is not None:
        return isinstance(parallel, Mapping) and not parallel.keys().isdisjoint(_SECTIONS)
    return isinstance(given.get("zero"), Mapping)


def convert_legacy(given: Mapping[str, Any]) -> Conversion:
    """Say an older configuration of ColossalAI in ours.

    Raises:
        ConfigError: a key of `parallel` does not exist, or has a value that ColossalAI refuses.
    """
    read = {knob.name.partition(".")[0] for knob in LEGACY_KNOBS}
    settings: dict[str, Any] = {name: value for name, value in given.items() if name in read - {"model", "parallel"}}
    settings["parallel"] = {
        key: {"size": section} if key in _SECTIONS and not isinstance(section, Mapping) else section
        for key, section in (given.get("parallel") or {}).items()
        if section is not None
    }
    model = given.get("model")
    if isinstance(model, Mapping) and "num_chunks" in model:
        settings["model"] = {"num_chunks": model["num_chunks"]}
    draft = Draft(LEGACY_KNOBS, settings)
    _convert_tensor(draft)
    if draft.count("parallel.pipeline.size") == 1:
        unsplit = "With one stage nothing is split, here or there"
        draft.leave_rest(["NUM_MICRO_BATCHES", "model.num_chunks"], "always", unsplit)
    elif "NUM_MICRO_BATCHES" in draft.given:
        draft.put("NUM_MICRO_BATCHES", "strategy.batching.num_microbatches", draft.count("NUM_MICRO_BATCHES"))
    if draft.count("parallel.pipeline.size") > 1 and draft.count("model.num_chunks") != 1:
        draft.put("model.num_chunks", "modality.pipeline.pp_chunks", draft.count("model.num_chunks"))
        draft.put("model.num_chunks", "strategy.schedule", "interleaved")
    if (zero := draft.get("zero")) is not None:
        level = zero.get("level", 3) if isinstance(zero, Mapping) else zero
        if type(level) is not int or level not in (1, 2, 3):
            raise draft.refused("zero", "Its level is 1, 2 or 3", "Write zero = dict(level=3)")
        draft.put("zero", "modality.sharding.zero_stage", level)
    if (fp16 := draft.get("fp16")) is not None:
        if fp16 and not isinstance(fp16, Mapping):
            raise draft.refused("fp16", "It maps names to values", "Write fp16 = dict(mode=AMP_TYPE.NAIVE), or None")
        if not fp16 or fp16.get("mode") is None:
            draft.leave("fp16", "always", "It asks for nothing without a mode")
        else:
            draft.put("fp16", "trainer.precision", "16-mixed", "The scaler is the Trainer's")
    about = "A name of your own, which ColossalAI does not read itself"
    others = [name for name in given if name not in read or (name == "model" and "model" not in settings)]
    entries = tuple(Entry(str(name), given[name], "elsewhere", {}, about) for name in others)
    strategy = {"modalities": {"model": draft.modality}, **draft.strategy}
    return Conversion("ColossalAI parallel = dict(...)", strategy, draft.trainer, (*draft.entries(), *entries))


def _convert_tensor(draft: Draft) -> None:
    size, name = draft.count("parallel.tensor.size"), "parallel.tensor.mode"
    if draft.get(name) is None and size > 1:
        rule = f"ColossalAI refuses a tensor={size} without a mode"
        raise draft.refused(name, rule, f"Write tensor=dict(size={size}, mode='1d')")
    mode = draft.choice(name, _LEGACY_MODES, "1d")
    if mode == "sequence" and size > 1:
        draft.put("parallel.tensor.size", "modality.cp_size", size)
        draft.put(name, "modality.context.cp_mode", "ring")
        draft.put(name, "modality.context.cp_distribution", "uniform")
        return
    if "parallel.tensor.size" in draft.given:
        draft.put("parallel.tensor.size", "modality.tp_size", size)
    if mode in ("1d", "sequence") or size == 1:
        draft.leave_rest([name], "always", "tp_size says it" if mode == "1d" else "One rank shares nothing")
    else:
        draft.put(name, "modality.tensor.tp_mode", mode)
    if mode == "2.5d" and size > 1:
        draft.put("parallel.tensor.depth", "modality.tensor.tp_depth", draft.count("parallel.tensor.depth"))
    draft.leave_rest(["parallel.tensor.depth"], "always", "Only 2.5d has a depth")


def missing_parallel(given: Mapping[str, Any], file: str) -> ConfigError:
    """Return the error for a file without `parallel`."""
    rule = "It assigns no `parallel = dict(pipeline=..., tensor=...)` and makes no plugin that is known"
    near = next((name for name in given if str(name).lower().startswith("par")), None)
    return ConfigError("FILE", file, rule, f"Did you mean {near!r} to be 'parallel'?" if near else "Add one there")
