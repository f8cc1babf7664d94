"""Tiny models whose weights transformers names otherwise in files than in memory, beside those of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo import CASES

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = TEXT | {"num_key_value_heads": 2}
TOWER = {name: TEXT[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
TOWER |= {"image_size": 8, "patch_size": 4}


class Wrapped(nn.Module):
    """A model at the path ``model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=4))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**DECODER, **experts, head_dim=8))


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2, head_dim=8))


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    options = TEXT | {"num_key_value_heads": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**options, **ranks, **experts))


def phimoe() -> nn.Module:
    from transformers import PhimoeConfig, PhimoeForCausalLM

    return PhimoeForCausalLM(PhimoeConfig(**DECODER, num_local_experts=4))


def qwen3_vl_moe() -> nn.Module:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    rope = {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 8}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4}
    vision |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    config = Qwen3VLMoeConfig(text_config=DECODER | experts | rope, vision_config=vision)
    return Qwen3VLMoeForConditionalGeneration(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**TOWER))


def siglip() -> nn.Module:
    from transformers import SiglipConfig, SiglipModel

    return SiglipModel(SiglipConfig(text_config=TEXT, vision_config=TOWER))


def paligemma() -> nn.Module:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    text = DECODER | {"model_type": "gemma", "head_dim": 8}
    vision = TOWER | {"model_type": "siglip_vision_model"}
    config = PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=32, hidden_size=32)
    return PaliGemmaForConditionalGeneration(config)


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {
        f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 48))
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(vocab_size=64, d_model=32, max_position_embeddings=64, **sizes, **heads)
    return BartForConditionalGeneration(config)


def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    convolutions = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = Wav2Vec2Config(**(TEXT | {"vocab_size": 32}), **convolutions, **positions)
    return Wav2Vec2ForCTC(config)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each
    for each in (
        mixtral, qwen3_moe, gpt_oss, deepseek_v3, phimoe, qwen3_vl_moe, vit, siglip, paligemma, bart, wav2vec2,
    )
}  # fmt: skip


def build(name: str) -> Any:
    """The model of a family, with weights that differ from each other also where they begin as zeros or ones."""
    model = OTHERS[name]() if name in OTHERS else CASES[name].build().model
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


FAMILIES = (*OTHERS, *(name for name in CASES if not name.startswith("handwritten")))
