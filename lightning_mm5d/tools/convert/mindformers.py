"""MindFormers' YAML files: the tables of the sections that say how training is parallel, and the rules.

Sections of the model, the data and the loop are listed as such and not read, but for the few knobs of `model_config`
that lay out a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_mm5d.config.checks import MOST
from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.tools.convert.knobs import (
    Conversion,
    Draft,
    Knob,
    always,
    choose_kernel,
    costs,
    elsewhere,
    results,
    ruled,
    same,
)

_P, _R, _M, _A = "parallel_config.", "recompute_config.", "parallel.", "model.model_config."
_COMPILER = "It steers MindSpore's compiler"
_MODES = (0, 1, "DATA_PARALLEL", "SEMI_AUTO_PARALLEL", "STAND_ALONE", "MANUAL_PARALLEL")
_ANY_LAYOUT = "Checkpoints load into any layout without a file of it"
_NO_RECOMPUTATION: tuple[Any, ...] = (False, [], {})  # lists and mappings name layers or operations
_WHOLE = "A part is computed again layer by layer: `full`, or `selective`"

PARALLEL_CONFIG: tuple[Knob, ...] = (
    same(_P + "data_parallel", "modality.dp_size"),
    same(_P + "model_parallel", "modality.tp_size"),
    same(_P + "context_parallel", "modality.cp_size"),
    same(_P + "expert_parallel", "modality.ep_size"),
    same(_P + "pipeline_stage", "modality.pp_size"),
    same(_P + "micro_batch_num", "strategy.batching.num_microbatches"),
    costs(_P + "seq_split_num", "Microbatches are not split along the sequence", neutral=(1,)),
    ruled(_P + "use_seq_parallel", "modality.tensor.sequence_parallel", "With a `model_parallel` above 1",
          neutral=(False,)),
    always(_P + "optimizer_shard", "It does nothing since MindFormers 0.7; see `parallel.enable_parallel_optimizer`"),
    costs(_P + "gradient_aggregation_group", "`bucket_bytes` sets the size of messages"),
    ruled(_P + "vocab_emb_dp", "modality.tensor.shard_embedding", "`false` for true, with one stage and several ranks",
          neutral=(False,)),
    ruled(_P + "context_parallel_algo", "modality.context.cp_mode",
          "`colossalai_cp`: `allgather`; `ulysses_cp`: `ulysses`; `hybrid_cp`: `hybrid`"),
    ruled(_P + "ulysses_degree_in_cp", "modality.context.ulysses_size", "With `hybrid_cp`", neutral=(1,)),
    always(_P + "mem_coeff", _COMPILER),
)  # fmt: skip
RECOMPUTE_CONFIG: tuple[Knob, ...] = (
    ruled(_R + "recompute", "modality.memory.activation_checkpointing",
          "`full`; numbers of layers: `{per_stage: [...]}`", neutral=_NO_RECOMPUTATION),
    ruled(_R + "select_recompute", "modality.memory.activation_checkpointing", "`selective`, which keeps products "
          "and attention and computes the rest again; numbers of layers: of all layers of the stages that have any",
          neutral=_NO_RECOMPUTATION),
    ruled(_R + "parallel_optimizer_comm_recompute", "modality.sharding.reshard_after_forward",
          "With `optimizer_level: level3`", neutral=(False,)),
    costs(_R + "select_comm_recompute", _WHOLE, neutral=(False,)),
    costs(_R + "mp_comm_recompute", "A layer that is computed again communicates again", neutral=(True,)),
    costs(_R + "recompute_slice_activation", "`sequence_parallel` shards what is kept of a layer", neutral=(False,)),
    costs(_R + "select_recompute_exclude", _WHOLE, neutral=(False,)),
    costs(_R + "select_comm_recompute_exclude", _WHOLE, neutral=(False,)),
)  # fmt: skip
PARALLEL: tuple[Knob, ...] = (
    costs(
        _M + "parallel_mode", "A layout is said, not found while it trains: `mm5d plan` searches one", neutral=_MODES
    ),
    always(_M + "full_batch", "Each replica loads its own samples"),
    always(_M + "dataset_strategy", "Each replica loads its own samples"),
    costs(_M + "search_mode", "`mm5d plan` searches", neutral=("sharding_propagation",)),
    costs(_M + "auto_parallel_search_mode", "`mm5d plan` searches"),
    ruled(_M + "enable_parallel_optimizer", "modality.sharding.zero_stage",
          "1, or as `optimizer_level` says", neutral=(False,)),
    ruled(_M + "parallel_optimizer_config.gradient_accumulation_shard", "modality.sharding.zero_stage", "2"),
    ruled(_M + "parallel_optimizer_config.optimizer_level",
          "modality.sharding.zero_stage modality.sharding.reshard_after_forward",
          "`level1`, `level2`, `level3`: 1, 2, 3; `level3` with `reshard_after_forward`"),
    ruled(_M + "parallel_optimizer_config.optimizer_weight_shard_size", "modality.sharding.dp_shard_size",
          "", neutral=(-1,)),
    costs(_M + "parallel_optimizer_config.parallel_optimizer_threshold", "All parameters are shared"),
    always(_M + "gradients_mean", "Gradients are those of the mean loss over all replicas"),
    always(_M + "loss_repeated_mean", "Gradients are those of the mean loss over all replicas"),
    always(_M + "enable_alltoall", "Tokens travel to their experts by all-to-all"),
    ruled(_M + "pipeline_config.pipeline_interleave", "strategy.schedule", "`interleaved`", neutral=(False,)),
    ruled(_M + "pipeline_config.pipeline_scheduler", "strategy.schedule", "`gpipe`, `1f1b`, `zero_bubble_v` (`zbv`)"),
    same(_M + "pipeline_stages", "modality.pp_size"),
    costs(_M + "auto_pipeline", "`mm5d plan` searches", neutral=(False,)),
    always(_M + "pipeline_result_broadcast", "Loss and outputs are on all ranks of a replica"),
    always(_M + "device_num", "The number of ranks decides"),
    always(_M + "global_rank", "The launcher decides"),
    always(_M + "gradient_fp32_sync", "`main_params` and `communication_dtype` say it"),
    always(_M + "parameter_broadcast", "Parameters are those of rank 0 at the start"),
    results(_M + "force_fp32_communication", "Numbers travel in the type of the tensors or a narrower one",
            neutral=(False,)),
    same(_M + "grad_accumulation_step", "trainer.accumulate_grad_batches"),
    costs(_M + "all_reduce_fusion_config", "`bucket_bytes` sets the size of messages"),
    costs(_M + "comm_fusion", "`bucket_bytes` sets the size of messages"),
    always(_M + "strategy_ckpt_save_file", _ANY_LAYOUT),
    always(_M + "strategy_ckpt_load_file", _ANY_LAYOUT),
    always(_M + "strategy_ckpt_config", _ANY_LAYOUT),
    always(_M + "group_ckpt_save_file", _ANY_LAYOUT),
)  # fmt: skip
OTHERS: tuple[Knob, ...] = (
    ruled("swap_config.swap", "modality.memory.offload", "`activations`", neutral=(False,)),
    costs("swap_config.layer_swap", "Activations of all layers are offloaded"),
    costs("swap_config.op_swap", "Activations of all operations are offloaded"),
    costs("swap_config.default_prefetch", "The order of the schedule tells when they come back"),
    ruled("micro_batch_interleave_num",
          "modality.pipeline.interleaved_microbatches strategy.batching.num_microbatches",
          "Each microbatch is as many, so `num_microbatches` is the product with `micro_batch_num`", neutral=(1,)),
    ruled(_A + "fine_grain_interleave", "modality.pipeline.interleaved_microbatches",
          "Microbatches side by side in place of slices of one, where it divides their number", neutral=(0, 1)),
    ruled(_A + "pp_interleave_num", "modality.pipeline.pp_chunks", "With `pipeline_interleave`", neutral=(1,)),
    ruled(_A + "offset", "modality.pipeline.pipeline_template",
          "`{stages: [...]}`, or `{offsets: [...]}` where `num_layers` is not said", neutral=(0,)),
    elsewhere(_A + "num_layers", "The model's"),
    elsewhere(_A + "mtp_depth", "The model's; of the last stage's layers in `offset` these are no layers of the list",
              neutral=(0,)),
    ruled(_A + "use_flash_attention", "modality.compute.kernels", "`sdpa`, with a `cp_size` of 1", neutral=(False,)),
    ruled(_A + "use_ring_attention", "modality.context.cp_mode", "`ring`", neutral=(False,)),
    ruled("moe_config.expert_model_parallel", "modality.tensor.expert_tp_size", "", neutral=(1,)),
    same("runner_config.gradient_accumulation_steps", "trainer.accumulate_grad_batches", neutral=(1,)),
    always("use_parallel", "The number of ranks decides"),
)  # fmt: skip
KNOBS: tuple[Knob, ...] = (*PARALLEL_CONFIG, *RECOMPUTE_CONFIG, *PARALLEL, *OTHERS)
_TOPS = frozenset(knob.name.partition(".")[0] for knob in KNOBS)
_OF_PARALLEL_CONFIG = frozenset(knob.name.removeprefix(_P) for knob in PARALLEL_CONFIG)

SECTIONS = (
    "seed", "output_dir", "run_mode", "resume_training", "load_checkpoint", "load_ckpt_format", "auto_trans_ckpt",
    "transform_process_num", "src_strategy_path_or_dir", "only_save_strategy", "load_ckpt_async", "use_legacy",
    "pretrained_model_dir", "do_eval", "eval_step_interval", "eval_epoch_interval", "ignore_data_skip",
    "data_skip_steps", "profile", "profile_communication", "profile_memory", "init_start_profile", "profile_start_step",
    "profile_stop_step", "profile_rank_ids", "profile_pipeline", "profile_level", "profiler_level", "mstx",
    "layer_scale", "layer_decay", "lr_scale", "lr_scale_factor", "remote_save_url", "save_file", "input_data",
    "predict_batch_size", "adapter_id", "exclude_cann_cpu", "train_precision_sync", "infer_precision_sync",
    "postprocess_use_numpy", "use_graceful_exit", "trainer", "model", "processor", "runner_config", "runner_wrapper",
    "optimizer", "lr_schedule", "callbacks", "eval_callbacks", "metric", "train_dataset", "train_dataset_task",
    "eval_dataset", "eval_dataset_task", "context", "moe_config", "auto_tune", "filepath_prefix", "autotune_per_step",
    "monitor_config", "grouped_lr_schedule",
)  # fmt: skip
"""Keys of a file that say nothing of the layout, but for what `KNOBS` has of them."""


def is_mindformers(given: Mapping[str, Any]) -> bool:
    """Return whether a configuration has sections of MindFormers, or is its `parallel_config` alone."""
    sections = {"parallel_config", "recompute_config", "swap_config", "parallel"}
    return not given.keys().isdisjoint(sections | _OF_PARALLEL_CONFIG)


def convert_mindformers(given: Mapping[str, Any]) -> Conversion:
    """Say a configuration of MindFormers in ours.

    Args:
        given: a whole file, the sections that matter, or `parallel_config` alone.

    Raises:
        ConfigError: a knob does not exist, or has a value that MindFormers refuses.
    """
    if not given.keys().isdisjoint(_OF_PARALLEL_CONFIG):
        given = {"parallel_config": given}
    for name in given:
        if name not in _TOPS and name not in SECTIONS:
            near = did_you_mean(name, [*_TOPS, *SECTIONS]).split("? ")[0]
            raise ConfigError(str(name), given[name], "There is no such section", f"{near}?")
    draft = Draft(tuple(_known(given)), {name: section for name, section in given.items() if section is not None})
    draft.count(_P + "expert_parallel")  # refuses what is no number
    mode = _M + "parallel_mode"
    if draft.get(mode) in (1, "SEMI_AUTO_PARALLEL") and not any(name.startswith(_P) for name in draft.given):
        draft.leave(mode, "costs", "No parallel_config says a layout: `mm5d plan` searches one")
    stages, chunks = _convert_schedule(draft)
    _convert_layers(draft, stages, chunks)
    _convert_recomputation(draft, stages, chunks)
    _convert_context(draft)
    _convert_sharing(draft)
    if draft.get(_P + "vocab_emb_dp", False):
        if stages == 1 and draft.count(_P + "model_parallel") > 1:
            draft.put(_P + "vocab_emb_dp", "modality.tensor.shard_embedding", False)
        else:
            draft.leave(_P + "vocab_emb_dp", "always", "It is read with one stage and several model parallel ranks")
    if draft.get("swap_config.swap", False):
        draft.put("swap_config.swap", "modality.memory.offload", "activations")
    if draft.get("moe_config.expert_model_parallel") is not None:
        name = "moe_config.expert_model_parallel"
        draft.put(name, "modality.tensor.expert_tp_size", draft.count(name))
    if draft.get(_A + "use_flash_attention", False):
        choose_kernel(draft, _A + "use_flash_attention", "sdpa")
    _convert_copies(draft, stages)
    return draft.conversion("MindFormers")


def _known(given: Mapping[str, Any]) -> Iterable[Knob]:
    """The table, and what else the sections of a file have that are the model's, the data's or the loop's."""
    yield from KNOBS
    names = {knob.name for knob in KNOBS}
    for name in given:
        if name in SECTIONS and name not in _TOPS:
            yield elsewhere(str(name), "Of the model, the data or the loop")
    for section in ("moe_config", "runner_config", "model", "model.model_config"):
        holder: Any = given
        for part in section.split("."):
            holder = holder.get(part) if isinstance(holder, Mapping) else None
        for key in holder if isinstance(holder, Mapping) else ():
            name = f"{section}.{key}"
            if name not in names and name != "model.model_config":
                yield elsewhere(name, "Of the model or the loop")


def _convert_schedule(draft: Draft) -> tuple[int, int]:
    """Say the pipeline; return its stages and the chunks of each."""
    interleaves, count = _M + "pipeline_config.pipeline_interleave", _A + "pp_interleave_num"
    scheduler = _M + "pipeline_config.pipeline_scheduler"
    stages, chunks = draft.count(_P + "pipeline_stage", draft.count(_M + "pipeline_stages")), draft.count(count)
    schedule = draft.choice(scheduler, ("gpipe", "1f1b", "zero_bubble_v", "seqpipe", "seqvpp", "seqsmartvpp"), "1f1b")
    if stages == 1 or not draft.get(interleaves, False):
        chunks = 1
        draft.leave_rest([interleaves, count], "always", "Nothing interleaves with one stage, or without both")
    elif chunks > 1:
        draft.put(interleaves, "strategy.schedule", "zbv" if schedule == "zero_bubble_v" else "interleaved")
        draft.put(count, "modality.pipeline.pp_chunks", chunks)
    else:
        draft.leave(interleaves, "always", "One chunk interleaves with nothing")
    if draft.get(scheduler) is not None:
        if str(schedule).startswith("seq"):
            draft.leave(scheduler, "costs", "Microbatches are not split along the sequence")
        elif stages == 1 or (chunks > 1 and schedule != "zero_bubble_v"):
            draft.leave(
                scheduler, "always", "One stage needs no order" if stages == 1 else "pipeline_interleave says it"
            )
        else:
            draft.put(scheduler, "strategy.schedule", "zbv" if schedule == "zero_bubble_v" else schedule)
    if stages == 1 and draft.get(_P + "micro_batch_num", 1) != 1:
        del draft.strategy["batching"]
        draft.leave(_P + "micro_batch_num", "always", "With one stage nothing is split there")
    return stages, chunks


def _rows(draft: Draft, name: str, stages: int, chunks: int) -> list[list[int]] | None:
    """A knob with a number for each stage, as a row for each chunk; None where it is no such list."""
    numbers = draft.get(name)
    if not isinstance(numbers, list) or not numbers:
        return None
    rows = numbers if all(isinstance(row, list) for row in numbers) else [numbers]
    whole = all(type(n) is int and abs(n) <= MOST for row in rows for n in row)
    if not whole or len(rows) not in (1, chunks) or any(len(row) != stages for row in rows):
        rule = f"It has a whole number for each of the {stages} stages" + ", and a row for each chunk" * (chunks > 1)
        raise draft.refused(name, rule, f"Give {stages} numbers")
    return rows


def _convert_layers(draft: Draft, stages: int, chunks: int) -> None:
    name, layers, more = _A + "offset", draft.get(_A + "num_layers"), _A + "mtp_depth"
    rows = _rows(draft, name, stages, chunks)
    if rows is None:
        draft.leave_rest([name], "costs", "Layers are balanced by their costs")
        return
    offsets = [n for row in (rows if len(rows) == chunks else rows * chunks) for n in row]
    if stages == 1:
        draft.leave(name, "always", "One stage has all layers")
    elif isinstance(layers, int):
        extra = draft.count(more) if draft.get(more, 0) else 0  # layers that predict further tokens, after the others
        total = layers + extra
        counts = [total // (stages * chunks) + offset for offset in offsets]
        if sum(counts) != total:
            rule = f"With it stages have {sum(counts)} of {total} layers"
            raise draft.refused(name, rule, f"Let its numbers sum to {total % (stages * chunks)}")
        counts[-1] -= extra
        if min(counts) < 1:
            rule = f"With it stages have {counts} layers beside {more}={extra}"
            raise draft.refused(name, rule, "Give each stage a layer")
        draft.put(name, "modality.pipeline.pipeline_template", {"stages": counts})
    elif sum(offsets) == 0:
        draft.put(name, "modality.pipeline.pipeline_template", {"offsets": offsets})
    else:
        draft.leave(name, "costs", "Without num_layers it tells no stage's layers; they are balanced by their costs")


def _convert_recomputation(draft: Draft, stages: int, chunks: int) -> None:
    name, select, field = _R + "recompute", _R + "select_recompute", "modality.memory.activation_checkpointing"
    full, selective = (_layers_recomputed(draft, knob, stages, chunks) for knob in (name, select))
    if full is not None or (selective is not None and not draft.get(name, False)):
        each: list[Any] = ["none"] * (stages * chunks)
        if selective is not None:
            each = ["selective" if count else "none" for count in selective]
        elif draft.get(select, False):
            each = ["selective"] * (stages * chunks)
        if full is not None:
            each = [{"layers": list(range(count))} if count else rest for count, rest in zip(full, each, strict=True)]
            draft.put(name, field, each[0] if len(each) == 1 else {"per_stage": each})
            draft.leave_rest([select], "mapped", "In stages without other recomputation")
        else:
            about = "All layers of a stage with a number above 0"
            draft.put(select, field, each[0] if len(each) == 1 else {"per_stage": each}, about)
    elif draft.get(name, False):
        draft.put(name, field, "full")
        draft.leave_rest([select], "always", "All layers are computed again whole")
    elif draft.get(select, False):
        selected = draft.get(select)
        about = "" if selected is True else "Of all layers, and of all operations but products and attention"
        draft.put(select, field, "selective", about)


def _layers_recomputed(draft: Draft, name: str, stages: int, chunks: int) -> list[int] | None:
    """How many layers of each stage a knob names, chunk by chunk; None where it names no numbers."""
    listed = draft.get(name)
    if isinstance(listed, list) and all(isinstance(operation, str) for operation in listed):  # operations
        return None
    rows = _rows(draft, name, stages, chunks)
    if rows is not None and min(map(min, rows)) < 0:
        raise draft.refused(name, "Stages have at least 0 layers", "Write 0 for none")
    if rows is not None and len(rows) < chunks:  # shared out over the chunks of each stage in turn
        rows = [[n // chunks + (chunk < n % chunks) for n in rows[0]] for chunk in range(chunks)]
    return None if rows is None else [n for row in rows for n in row]


def _convert_context(draft: Draft) -> None:
    algorithm, inner, ring = _P + "context_parallel_algo", _P + "ulysses_degree_in_cp", _A + "use_ring_attention"
    size, tp_size, degree = draft.count(_P + "context_parallel"), draft.count(_P + "model_parallel"), draft.count(inner)
    modes = {"colossalai_cp": "allgather", "ulysses_cp": "ulysses", "hybrid_cp": "hybrid", "hybird_cp": "hybrid"}
    mode = modes[str(draft.choice(algorithm, list(modes), "colossalai_cp"))]
    if size == 1:
        draft.leave_rest([algorithm, inner, ring], "always", "One rank shares no sequence")
    else:
        if mode == "hybrid" and size % degree:
            raise draft.refused(inner, f"It divides context_parallel={size}", "Use 1, or a divisor")
        if mode == "hybrid" and degree in (1, size):
            mode = "ulysses" if degree == size else "allgather"
        elif mode == "hybrid":
            draft.put(inner, "modality.context.ulysses_size", degree)
        rings = draft.get(ring, False) and mode == "allgather"
        if rings:
            draft.put(ring, "modality.context.cp_mode", "ring")
        if algorithm in draft.given and not rings:
            draft.put(algorithm, "modality.context.cp_mode", mode)
        draft.leave_rest([inner, algorithm, ring], "always", "Another knob says it")
    name = _P + "use_seq_parallel"
    if draft.get(name, False):
        if tp_size > 1:
            draft.put(name, "modality.tensor.sequence_parallel", True)
        else:
            draft.leave(name, "always", "One rank shares no sequence")


def _convert_sharing(draft: Draft) -> None:
    switch, section = _M + "enable_parallel_optimizer", _M + "parallel_optimizer_config."
    level, gradients, size = (
        section + key for key in ("optimizer_level", "gradient_accumulation_shard", "optimizer_weight_shard_size")
    )
    again = _R + "parallel_optimizer_comm_recompute"
    chosen = draft.choice(level, ("level1", "level2", "level3"), "level1")
    if not draft.get(switch, False):
        draft.leave_rest([switch, level, gradients, size, again], "always", "Nothing is shared without its switch")
        return
    stage = {"level1": 1, "level2": 2, "level3": 3}[str(chosen)]
    if draft.get(gradients, False) and stage == 1:
        stage = 2
        draft.put(gradients, "modality.sharding.zero_stage", 2)
    draft.put(switch, "modality.sharding.zero_stage", stage)
    if level in draft.given:
        draft.put(level, "modality.sharding.zero_stage", stage)
    if stage == 3:
        draft.put(level, "modality.sharding.reshard_after_forward", True)
    if draft.get(size, -1) != -1:
        draft.put(size, "modality.sharding.dp_shard_size", draft.count(size))
    draft.leave_rest([gradients, size, again], "always", "Another knob says it, or nothing")


def _convert_copies(draft: Draft, stages: int) -> None:
    """Say what is computed side by side, when the modality has its other fields."""
    copies, slices, number = "micro_batch_interleave_num", _A + "fine_grain_interleave", _P + "micro_batch_num"
    count, total = draft.count(copies), draft.count(number) if stages > 1 else 1
    if count > 1 and _interleaves(draft, copies, count, total * count):
        draft.put(copies, "strategy.batching.num_microbatches", total * count)
        if number in draft.given and draft.count(number) == total:
            draft.put(number, "strategy.batching.num_microbatches", total * count, f"Times {copies}")
    if draft.get(slices, 0) == 0 or (count := draft.count(slices)) == 1:
        return
    if draft.count(_P + "model_parallel") == 1:
        draft.leave(slices, "always", "It is read with several model parallel ranks")
    elif "interleaved_microbatches" in draft.modality.get("pipeline", {}):
        draft.leave(slices, "costs", f"{copies} says how many microbatches are computed side by side")
    else:
        _interleaves(draft, slices, count, total)


def _interleaves(draft: Draft, name: str, count: int, total: int) -> bool:
    """Say `interleaved_microbatches` where it goes with the other fields and divides the number of microbatches."""
    accepted = draft.accepts(name, {"interleaved_microbatches": count}, num_microbatches=total)
    if accepted:
        draft.put(name, "modality.pipeline.interleaved_microbatches", count)
    return accepted
