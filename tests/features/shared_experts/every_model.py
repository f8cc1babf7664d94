"""Tiny models of more causal models of transformers, whose experts are all of its interface, by model type in `OTHERS`.

Nobody chose their sizes one by one: each takes what its configuration knows of `SIZES`. For sweeps that prove a claim
for a class of models; `families.py` has those that tests look at closely.
"""

from __future__ import annotations

import lightning as L
import torch
import transformers as hf

from zoo.case import TinyModule

from .expert_case import EAGER, TEXT, ExpertCase, written

SIZES = TEXT | {
    "head_dim": 8,
    "moe_intermediate_size": 20,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "enable_moe_block": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": TEXT["vocab_size"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
}
OTHERS = (
    *("afmoe", "aria_text", "cohere2_moe", "deepseek_v32", "deepseek_v4", "dots1", "exaone_moe", "flex_olmo"),
    *("gemma4_text", "glm4_moe_lite", "glm_moe_dsa", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    *("hunyuan_v1_moe", "kimi_linear", "laguna", "mimo_v2_flash", "minimax", "minimax_m2", "nemotron_h"),
    *("qwen3_5_moe_text", "qwen3_next", "solar_open"),
)


def other(name: str) -> ExpertCase:
    """The case of a model type of `OTHERS`. It builds the model without memory once, to see where its experts are."""

    def make() -> L.LightningModule:
        config_class = hf.CONFIG_MAPPING[name]
        names = {field for base in config_class.__mro__ for field in vars(base).get("__annotations__", {})}
        names |= set(config_class.attribute_map)
        sizes = {key: value for key, value in SIZES.items() if key in names}
        for alias, key in config_class.attribute_map.items():
            if key in sizes:
                sizes.pop(alias, None)
        if "kv_lora_rank" in sizes:
            sizes |= {"num_key_value_heads": 4}
            sizes.pop("head_dim", None)
        config = config_class(**sizes)
        config._experts_implementation = EAGER
        model = hf.MODEL_FOR_CAUSAL_LM_MAPPING[config_class](config)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.get_default_dtype())
        return TinyModule(model, use_cache=False)

    with torch.device("meta"):
        held = tuple(path for path, module in make().named_modules() if path.endswith(".experts"))
    return ExpertCase(
        name=name,
        make_module=make,
        make_batch=written,
        modalities=("language",),
        layers={"language": ("model.model.layers",)},
        experts=held,
        count=4,
    )
