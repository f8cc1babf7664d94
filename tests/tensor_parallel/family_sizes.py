"""Sizes of the tiny models in `families`, for tests."""

from __future__ import annotations

from typing import Any

from .family_inputs import VOCABULARY

IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = IDS | WIDE | {"intermediate_size": 50, "max_position_embeddings": 32}
GROUPED = TEXT | {"num_key_value_heads": 2}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION = WIDE | {"intermediate_size": 50, "image_size": 12, "patch_size": 4}
T5_SIZES = IDS | {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 50,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BART_SIZES = IDS | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 50,
    "decoder_ffn_dim": 50,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
}
SPEECH: dict[str, Any] = WIDE | {
    "intermediate_size": 50,
    "vocab_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
}


DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 21}
