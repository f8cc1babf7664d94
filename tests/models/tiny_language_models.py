"""Tiny causal language models of every family that the composer is held to, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

VOCABULARY = 64
PAD, PLACEHOLDER, FIRST_TEXT_ID = 0, 1, 16
IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 6, "eos_token_id": 7}
LLAMA: dict[str, Any] = IDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
SLIDING = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
LAYERS = ["sliding_attention", "full_attention"]


def _model(name: str, model: str = "", **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**options)
        config._experts_implementation = "eager"  # grouped products know no float64
        return getattr(transformers, model or f"{name}ForCausalLM")(config)

    return build


LANGUAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _model("Llama", **LLAMA),
    "mistral": _model("Mistral", **LLAMA, sliding_window=8),
    "mixtral": _model("Mixtral", **LLAMA, **EXPERTS),
    "gemma": _model("Gemma", **LLAMA, head_dim=8),
    "gemma2": _model("Gemma2", **LLAMA, **SLIDING, layer_types=LAYERS),
    "gemma3": _model("Gemma3Text", "Gemma3ForCausalLM", **LLAMA, **SLIDING, layer_types=LAYERS),
    "phi3": _model("Phi3", **LLAMA),
    "qwen2": _model("Qwen2", **LLAMA),
    "qwen3": _model("Qwen3", **LLAMA, head_dim=8),
    "qwen3_moe": _model(
        "Qwen3Moe", **LLAMA, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt2": _model(
        "GPT2",
        "GPT2LMHeadModel",
        **IDS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "opt": _model(
        "OPT",
        **IDS,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        dropout=0.0,
    ),
    "opt_narrow": _model(
        "OPT",
        **IDS,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        dropout=0.0,
        do_layer_norm_before=False,
    ),
    "glm": _model("Glm", **LLAMA, head_dim=8),
    "glm4": _model("Glm4", **LLAMA, head_dim=8),
    "smollm3": _model("SmolLM3", **LLAMA, layer_types=["full_attention"] * 2),
    "smollm": _model("Llama", **LLAMA, tie_word_embeddings=True),
}
