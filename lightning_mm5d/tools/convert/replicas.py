"""ColossalAI's plugins for replicas: `TorchDDPPlugin`, `LowLevelZeroPlugin` and `GeminiPlugin`.

Gemini shares parameters in chunks and moves them to the host by fractions; here that is ``zero_stage`` and ``offload``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_mm5d.tools.convert.colossalai import KNOBS, PRECISION, SCALER, convert_dtypes, convert_precision
from lightning_mm5d.tools.convert.knobs import (
    KERNELS,
    Conversion,
    Draft,
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


def _of_hybrid(names: str) -> tuple[Knob, ...]:
    return tuple(next(knob for knob in KNOBS if knob.name == name) for name in names.split())


_ORDER = results("norm_type", "Gradients are clipped by their norm of order 2", neutral=(2, 2.0))
_MAIN = ruled("master_weights", "strategy.numerics.main_params", "`false`: none with `bf16`", neutral=(True,))
_OUTER = costs("extra_dp_size", "All replicas share what `zero_stage` says", neutral=(1,))
_CHUNKS = "There are no chunks: `bucket_bytes` sets the size of messages"
_OFFLOAD = "Nothing moves by itself: say `memory.offload`"
DDP_KNOBS: tuple[Knob, ...] = (
    *_of_hybrid("broadcast_buffers"),
    ruled("bucket_cap_mb", "strategy.launch.bucket_bytes", "Times 2**20"),
    *_of_hybrid("find_unused_parameters check_reduction gradient_as_bucket_view static_graph fp8_communication"),
)
ZERO_KNOBS: tuple[Knob, ...] = (
    ruled("stage", "modality.sharding.zero_stage", "1 where it is left out"),
    *(*PRECISION, *SCALER, _ORDER),
    ruled("reduce_bucket_size_in_m", "strategy.launch.bucket_bytes", "Times 2**20 and the bytes of a number"),
    *_of_hybrid("communication_dtype overlap_communication overlap_allgather cpu_offload"),
    *(_MAIN, always("verbose", "Logs are those of Lightning")),
    elsewhere("cast_inputs", "The Trainer's precision plugin casts inputs", neutral=(True,)),
    *(*_of_hybrid("fp8_communication use_fp8"), _OUTER),
)
GEMINI_KNOBS: tuple[Knob, ...] = (
    *(always(name, _CHUNKS) for name in ("chunk_config_dict", "chunk_init_device")),
    costs("placement_policy", _OFFLOAD, neutral=("static",)),
    elsewhere("enable_gradient_accumulation", "Trainer(accumulate_grad_batches=...)", neutral=(False,)),
    always("max_prefetch", "The gather of shared parameters overlaps with computation"),
    ruled("shard_param_frac", "modality.sharding.zero_stage", "0: stage 2; above: stage 3, as where it is left out"),
    ruled("offload_optim_frac", "modality.memory.offload", "Above 0: `optimizer`", neutral=(0, 0.0)),
    ruled("offload_param_frac", "modality.memory.offload", "Above 0: `parameters`", neutral=(0, 0.0)),
    *(always(name, _OFFLOAD) for name in ("warmup_non_model_data_ratio", "steady_cuda_cap_ratio")),
    *(*PRECISION, _MAIN, always("pin_memory", "Memory of the host that copies use is pinned")),
    elsewhere("force_outputs_fp32", "Call .float() where the step needs it", neutral=(False,)),
    ruled("strict_ddp_mode", "modality.sharding.zero_stage", "`true`: nothing is shared", neutral=(False,)),
    *(always(name, _CHUNKS) for name in ("search_range_m", "hidden_dim", "min_chunk_size_m", "memstats")),
    *(always("gpu_margin_mem_ratio", _OFFLOAD), *SCALER, _ORDER, same("tp_size", "modality.tp_size"), _OUTER),
    *(*_of_hybrid("enable_all_optimization"), *KERNELS[:2]),
    ruled("enable_sequence_parallelism", "modality.tensor.sequence_parallel", "With a `tp_size`", neutral=(False,)),
    *(KERNELS[2], always("enable_async_reduce", "Sums of gradients overlap with the backward"), *_of_hybrid("use_fp8")),
    *(always("verbose", "Logs are those of Lightning"), *_of_hybrid("fp8_communication")),
)


def convert_ddp(given: Mapping[str, Any]) -> Conversion:
    """Say the arguments of a `TorchDDPPlugin` in ours; raise ConfigError for what it refuses."""
    draft = Draft(DDP_KNOBS, given)
    if draft.get("bucket_cap_mb") is not None:
        draft.put("bucket_cap_mb", "strategy.launch.bucket_bytes", draft.count("bucket_cap_mb") * 2**20)
    convert_dtypes(draft, shares=False)
    return draft.conversion("ColossalAI TorchDDPPlugin")


def convert_zero(given: Mapping[str, Any]) -> Conversion:
    """Say the arguments of a `LowLevelZeroPlugin` in ours; raise ConfigError for what it refuses."""
    draft, bucket = Draft(ZERO_KNOBS, given), "reduce_bucket_size_in_m"
    stage = draft.get("stage", 1)
    if type(stage) is not int or stage not in (1, 2):
        raise draft.refused("stage", "The plugin has stages 1 and 2", "Use 1 or 2, or GeminiPlugin for all parameters")
    draft.put("stage", "modality.sharding.zero_stage", stage)
    convert_precision(draft, has_main=draft.get("master_weights", True))
    if draft.get(bucket) is not None:
        each = 4 if draft.get("precision") == "fp32" else 2
        draft.put(bucket, "strategy.launch.bucket_bytes", draft.count(bucket) * 2**20 * each)
    if draft.get("cpu_offload", False):
        draft.put("cpu_offload", "modality.memory.offload", "optimizer")
    convert_dtypes(draft, shares=True)
    return draft.conversion("ColossalAI LowLevelZeroPlugin")


def convert_gemini(given: Mapping[str, Any]) -> Conversion:
    """Say the arguments of a `GeminiPlugin` in ours; raise ConfigError for what it refuses."""
    draft = Draft(GEMINI_KNOBS, with_all_kernels(given))
    strict, sequences = "strict_ddp_mode", "enable_sequence_parallelism"
    if draft.get(strict, False):
        draft.put(strict, "modality.sharding.zero_stage", 0)
        draft.leave_rest(["shard_param_frac"], "always", f"{strict} decides")
    else:
        fraction = draft.get("shard_param_frac", 1.0)
        if type(fraction) not in (int, float):
            raise draft.refused("shard_param_frac", "It is a number", "Write 1.0, for instance")
        stage = 3 if fraction else 2
        draft.put("shard_param_frac", "modality.sharding.zero_stage", stage)
    offloads: list[str] = []
    for name, kind in (("offload_optim_frac", "optimizer"), ("offload_param_frac", "parameters")):
        if draft.get(name, 0) and draft.accepts(name, {"offload": [*offloads, kind]}):
            offloads.append(kind)
            draft.put(name, "modality.memory.offload", [*offloads])
    convert_precision(draft, has_main=draft.get("master_weights", True))
    if draft.get(sequences, False) and draft.count("tp_size") > 1:
        draft.put(sequences, "modality.tensor.sequence_parallel", True)
    draft.leave_rest([sequences], "always", "One rank shares no sequence")
    convert_dtypes(draft, shares=False)
    convert_kernels(draft)
    return draft.conversion("ColossalAI GeminiPlugin")


PLUGINS: dict[str, tuple[Callable[[Mapping[str, Any]], Conversion], Sequence[Knob]]] = {
    "TorchDDPPlugin": (convert_ddp, DDP_KNOBS),
    "LowLevelZeroPlugin": (convert_zero, ZERO_KNOBS),
    "GeminiPlugin": (convert_gemini, GEMINI_KNOBS),
}
"""For the class of each plugin what converts its arguments, and their table."""
