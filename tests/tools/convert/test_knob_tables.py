"""Each knob of other systems is in a table, in the docs, and ends up in a field that exists."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.config.groups import OF_MODALITY, OF_STRATEGY, names_of
from lightning_mm5d.tools.convert import colossalai, cornstarch, mindformers, replicas
from lightning_mm5d.tools.convert.knobs import Knob

PAGE = Path(__file__).parents[3] / "docs" / "coming_from.md"
TABLES: dict[str, Sequence[Knob]] = {
    "HybridParallelPlugin": colossalai.KNOBS,
    "MoeHybridParallelPlugin": colossalai.MOE_KNOBS,
    "TorchDDPPlugin": replicas.DDP_KNOBS,
    "LowLevelZeroPlugin": replicas.ZERO_KNOBS,
    "GeminiPlugin": replicas.GEMINI_KNOBS,
    "parallel = dict(...)": colossalai.LEGACY_KNOBS,
    "MultimodalParallelPlugin": cornstarch.KNOBS,
    "ModalParallelPlugin": cornstarch.MODAL_KNOBS,
    "HeterogeneousParallelPlugin": cornstarch.UNLIKE_KNOBS,
    "MindFormers": mindformers.KNOBS,
}
AMP = "initial_scale min_scale growth_factor backoff_factor growth_interval hysteresis max_scale max_norm"
KERNELS = "enable_fused_normalization enable_flash_attention enable_jit_fused"
HYBRID = f"""
tp_size pp_size sp_size precision zero_stage enable_all_optimization {KERNELS} enable_sequence_parallelism
sequence_parallelism_mode parallel_output num_microbatches microbatch_size {AMP} broadcast_buffers ddp_bucket_cap_mb
find_unused_parameters check_reduction gradient_as_bucket_view static_graph zero_bucket_size_in_m cpu_offload
communication_dtype overlap_communication custom_policy pp_style num_model_chunks scheduler_nodes num_layers_per_stage
gradient_checkpoint_config enable_metadata_cache make_vocab_size_divisible_by dp_outside overlap_p2p overlap_allgather
fp8_communication use_fp8 inner_ring_size"""
# the arguments of each constructor, in their order; the keys of each section of MindFormers
ARGUMENTS = {
    "HybridParallelPlugin": HYBRID,
    "MoeHybridParallelPlugin": HYBRID.replace("pp_size sp", "pp_size ep_size sp")
    .replace(" dp_outside", " moe_dp_outside")
    .replace(" inner_ring_size", ""),
    "TorchDDPPlugin": "broadcast_buffers bucket_cap_mb find_unused_parameters check_reduction gradient_as_bucket_view "
    "static_graph fp8_communication",
    "LowLevelZeroPlugin": f"stage precision {AMP} norm_type reduce_bucket_size_in_m communication_dtype "
    "overlap_communication overlap_allgather cpu_offload master_weights verbose cast_inputs fp8_communication use_fp8 "
    "extra_dp_size",
    "GeminiPlugin": "chunk_config_dict chunk_init_device placement_policy enable_gradient_accumulation max_prefetch "
    "shard_param_frac offload_optim_frac offload_param_frac warmup_non_model_data_ratio steady_cuda_cap_ratio "
    "precision master_weights pin_memory force_outputs_fp32 strict_ddp_mode search_range_m hidden_dim "
    f"min_chunk_size_m memstats gpu_margin_mem_ratio {AMP} norm_type tp_size extra_dp_size enable_all_optimization "
    "enable_fused_normalization enable_flash_attention enable_sequence_parallelism enable_jit_fused "
    "enable_async_reduce use_fp8 verbose fp8_communication",
    "MultimodalParallelPlugin": f"encoder_plugins language_model_plugin precision {KERNELS} num_microbatches "
    f"microbatch_size {AMP} parallel_output make_vocab_size_divisible_by",
    "ModalParallelPlugin": "tp_size sp_size sequence_parallelism_mode pipeline_template cpu_offload custom_policy",
    "HeterogeneousParallelPlugin": f"tp_size microbatch_size precision {KERNELS} {AMP}",
}
SECTIONS = {
    "parallel_config": "data_parallel model_parallel context_parallel expert_parallel pipeline_stage micro_batch_num "
    "seq_split_num use_seq_parallel optimizer_shard gradient_aggregation_group vocab_emb_dp context_parallel_algo "
    "ulysses_degree_in_cp mem_coeff",
    "recompute_config": "recompute select_recompute parallel_optimizer_comm_recompute select_comm_recompute "
    "mp_comm_recompute recompute_slice_activation select_recompute_exclude select_comm_recompute_exclude",
    "swap_config": "swap layer_swap op_swap default_prefetch",
    "parallel": "parallel_mode full_batch search_mode enable_parallel_optimizer gradients_mean enable_alltoall "
    "strategy_ckpt_save_file parallel_optimizer_config pipeline_config strategy_ckpt_config loss_repeated_mean "
    "dataset_strategy",
}


def row(knob: Knob) -> str:
    """The knob's line in the docs."""
    ours = {"always": "nothing to say", "elsewhere": "not of the strategy"}.get(knob.effect, "no equal")
    if knob.ours:
        ours = ", ".join(f"`{one.removeprefix('modality.').removeprefix('strategy.')}`" for one in knob.ours)
    about = knob.about if knob.effect != "results" else f"{knob.about}. `from_config` refuses it"
    return f"| `{knob.name}` | {ours} | {about} |"


def tops(table: Sequence[Knob]) -> list[str]:
    return list(dict.fromkeys(knob.name.partition(".")[0] for knob in table))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_tables_have_every_argument_in_the_order_of_the_constructor(name: str) -> None:
    true = ARGUMENTS[name].split()
    assert tops(TABLES[name])[: len(true)] == true


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_have_every_key_of_a_section(section: str) -> None:
    known = {knob.name.removeprefix(f"{section}.").partition(".")[0] for knob in mindformers.KNOBS}
    assert set(SECTIONS[section].split()) <= known


@pytest.mark.parametrize("name", TABLES)
def test_every_field_that_a_table_names_exists(name: str) -> None:
    known = {
        "modality": {field.name for field in fields(Modality)} | {"*"},
        "strategy": set(inspect.signature(MultimodalStrategy).parameters),
        "trainer": set(inspect.signature(pl.Trainer).parameters),
    }
    for owner, groups in (("modality", OF_MODALITY), ("strategy", OF_STRATEGY)):
        known[owner] |= {f"{group}.{inner}" for group, kind in groups.items() for inner in names_of(kind)}
        known[owner] -= groups.keys()
    named = {ours for knob in TABLES[name] for ours in knob.ours}
    parts = {tuple(ours.split(".", 1)) for ours in named}
    assert [part for part in parts if part[1] not in known[part[0]]] == []
    assert len({knob.name for knob in TABLES[name]}) == len(TABLES[name])


def test_the_docs_have_a_row_for_every_knob_and_no_other() -> None:
    rows = {line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    wanted = {row(knob) for table in TABLES.values() for knob in table}
    assert (sorted(wanted - rows), sorted(rows - wanted)) == ([], [])
