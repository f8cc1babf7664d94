"""Configurations of other systems, for tests."""

from __future__ import annotations

from typing import Any

ZBV = """
import colossalai
STAGES = 2
parser.add_argument("--tp")
plugin = HybridParallelPlugin(
    STAGES, pp_size=STAGES, zero_stage=1, precision="bf16", num_microbatches=2 * STAGES, pp_style="zbv",
    num_model_chunks=2, num_layers_per_stage=[2, 3, 3, 2], communication_dtype=torch.bfloat16, scheduler_nodes=None,
    gradient_checkpoint_config=PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[2, 1, 0, 3]),
    cpu_offload=True, zero_bucket_size_in_m=3, max_norm=1.0, dp_outside=False,
)
raise SystemExit("is never run")
""".replace("torch.bfloat16", "'bf16'")
LEGACY = """
from colossalai.legacy.amp import AMP_TYPE
BATCH_SIZE = 4
SIZE = 2 ** 3 // 4
parallel = dict(pipeline=dict(size=2), tensor=dict(size=SIZE, mode='1d'))
NUM_MICRO_BATCHES = parallel["pipeline"]["size"] * 2
fp16 = dict(mode=AMP_TYPE.NAIVE)
clip_grad_norm = 1.0
model = dict(type=Model(), num_chunks=2)
"""
CORNSTARCH = """
encoder_plugins:
  vision: {tp_size: 2, pipeline_template: [[module.embeddings, module.layers.0, projector]]}
  audio: {tp_size: 1, sp_size: 1, sequence_parallelism_mode: ring_attn}
language_model_plugin:
  tp_size: 1
  sp_size: 2
  sequence_parallelism_mode: ring_attn
  context_parallel_distribution_mode: ContextParallelDistributionMode.ZIGZAG
  pipeline_template:
    model_name: transformers.LlamaForCausalLM
    modules_per_stage: [[model.embed_tokens, model.layers.0, model.layers.1], [model.layers.2, model.norm, lm_head]]
num_microbatches: 4
microbatch_size: 1
precision: bf16
"""
MINDFORMERS = """
seed: 0
use_parallel: True
parallel:
  parallel_mode: 1
  full_batch: True
  enable_parallel_optimizer: True
  parallel_optimizer_config: {gradient_accumulation_shard: True, optimizer_weight_shard_size: 2}
  pipeline_config: {pipeline_interleave: True, pipeline_scheduler: 1f1b}
parallel_config:
  data_parallel: &dp 2
  model_parallel: 2
  context_parallel: 4
  context_parallel_algo: hybrid_cp
  ulysses_degree_in_cp: 2
  pipeline_stage: 2
  micro_batch_num: 4
  use_seq_parallel: True
  vocab_emb_dp: False
recompute_config: {recompute: [[2, 0], [1, 1]], select_recompute: True, mp_comm_recompute: True}
model: {model_config: {num_layers: 10, pp_interleave_num: 2, offset: [[0, 1], [1, 0]], hidden_size: 64}, arch: {}}
"""
SMALL = {
    "zbv.py": ZBV,
    "legacy.py": LEGACY,
    "cornstarch.yaml": CORNSTARCH,
    "mindformers.yaml": MINDFORMERS,
    "moe.json": '{"tp_size": 1, "pp_size": 1, "ep_size": 2, "precision": "fp32", "fp8_communication": true}',
    "unlike.yaml": "HeterogeneousParallelPlugin: {tp_size: 2, microbatch_size: 1, precision: fp32, num_microbatches: "
    "[3, 1], pipelines: [{modules_per_stage: [[emb, h.0], [h.1, head]]}, [[emb, h.0, h.1, head]]]}",
    "modal.yaml": "ModalParallelPlugin: {tp_size: 2}",
    "colocated.yaml": "EncodersColocatedMultimodalParallelPlugin: {encoder_plugins: {vision: {tp_size: 1}, audio: "
    "{tp_size: 1}}, language_model_plugin: {tp_size: 1}, num_microbatches: 2, microbatch_size: 1}",
}


def sized(**said: Any) -> dict[str, Any]:
    return {"tp_size": 2, "pp_size": 1, "precision": "fp32", **said}
