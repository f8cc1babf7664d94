"""Sizes of the tiny models in `families` that matter to sequences alone, for tests."""

from __future__ import annotations

from typing import Any

from tensor_parallel.family_inputs import VOCABULARY
from tensor_parallel.family_sizes import DEEPSEEK, GROUPED, IDS, NO_DROPOUT, TEXT, VISION, WIDE
from zoo import qwen

SMALL_VISION = VISION | {"image_size": 8, "patch_size": 2}
LLAMA4 = GROUPED | {
    "head_dim": 8,
    "intermediate_size_mlp": 50,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 1, 0],
    "attention_chunk_size": 8,
    "attn_temperature_tuning": False,
}
LLAMA4_VISION = VISION | {
    "image_size": 16,
    "intermediate_size": 128,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
MLLAMA_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "max_num_tiles": 2,
    "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    "vision_output_dim": 64,
}
# the last two of six layers take keys and values of earlier ones
SHARING = GROUPED | {
    "head_dim": 8,
    "sliding_window": 6,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
GEMMA3N = SHARING | {
    "laurel_rank": 8,
    "altup_num_inputs": 3,
    "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0, 0.0, 0.0],
}
GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": 2,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}
KOSMOS2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "embed_dim": 32,
    "layers": 2,
    "ffn_dim": 50,
    "attention_heads": 4,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
}
CONFORMER: dict[str, Any] = {
    "input_dim": 8,
    "num_layers": 2,
    "hidden_dim": 32,
    "feedforward_mult": 2,
    "num_heads": 4,
    "dim_head": 8,
    "output_dim": 8,
    "context_size": 6,
    "max_pos_emb": 16,
    "dropout": 0.0,
    "conv_kernel_size": 3,
}
QFORMER: dict[str, Any] = (
    WIDE
    | NO_DROPOUT
    | {
        "model_type": "blip_2_qformer",
        "intermediate_size": 50,
        "encoder_hidden_size": 32,
        "cross_attention_frequency": 1,
    }
)
QWEN3_MOE = GROUPED | {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "mlp_only_layers": [],
    "rope_parameters": qwen.ROPE,
}
MODERN = {
    "num_hidden_layers": 3,
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
LINEAR_ATTENTION = GROUPED | {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
CONVOLUTIONS = {"layer_types": ["full_attention", "conv"]}
MAMBA: dict[str, Any] = IDS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4}
SPARSE = TEXT | DEEPSEEK | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
