"""Tiny mixtures of experts, by name in `FAMILIES`: the cases of the zoo, with where their experts are.

Every family routes two of four to six experts for a token; the multimodal Llama 4 routes one. Tokens go to all experts,
though not in equal numbers. Nothing is random in a step: PhiMoE samples its experts in training, so its routers stay in
evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import nn

from context_parallel.sequence_sizes import LLAMA4_VISION
from zoo import CASES as ZOO
from zoo import qwen
from zoo.case import LABELS, Batch, Items, TinyModule, text_batch
from zoo.text import IDS, MEL_BINS
from zoo.vision_language import FEATURES, LENGTH

from .expert_case import TEXT, ExpertCase, built, causal, composed, padded, written
from .handwritten_experts import EveryExpert, Gated, HandwrittenMixture, Listed, Stacked, TwoMixtures

# --- models that need a hand ---


def phimoe() -> L.LightningModule:
    """Its routers stay in evaluation mode: in training they sample."""
    module = built("PhimoeForCausalLM", "PhimoeConfig", **(TEXT | local_experts(4)), router_jitter_noise=1.0)()
    for part in module.modules():
        if type(part).__name__ == "PhimoeTopKRouter":
            part.training = False
            part.train = lambda mode=True, router=part: router  # type: ignore[method-assign,misc,assignment]
    return module


def glm4v_moe() -> L.LightningModule:
    """Where images lie comes to its vision in float32, since it mixes float32 with the default dtype there."""
    module = built(
        "Glm4vMoeForConditionalGeneration",
        "Glm4vMoeConfig",
        text_config=TEXT | grouped(4, 1) | {"rope_parameters": qwen.ROPE | {"partial_rotary_factor": 1.0}},
        vision_config=GLM_VISION,
        image_start_token_id=qwen.VISION_START_ID,
        image_end_token_id=qwen.VISION_END_ID,
        image_token_id=qwen.IMAGE_ID,
        video_token_id=qwen.VIDEO_ID,
    )()

    def lower(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:3], *(coordinates.float() for coordinates in args[3:]))

    module.model.model.visual.embeddings.register_forward_pre_hook(lower)  # type: ignore[union-attr]
    return module


def handwritten(name: str, experts: Callable[[int], nn.Module], count: int, *held: str) -> ExpertCase:
    return ExpertCase(
        name=name,
        make_module=lambda: TinyModule(HandwrittenMixture(lambda: experts(count))),
        make_batch=written,
        modalities=("language",),
        layers={"language": ("model.layers",)},
        experts=tuple(
            f"model.layers.{layer}.mlp.{path}" if path else f"model.layers.{layer}.mlp"
            for path in held
            for layer in range(2)
        ),
        count=count,
        exact=True,
        interface=False,
    )


def two_mixtures() -> ExpertCase:
    """Four experts in the vision encoder and six in the language model."""
    fields = vars(ZOO["handwritten"]) | {
        "name": "handwritten_two_mixtures",
        "make_module": lambda: TinyModule(TwoMixtures(lambda: Stacked(4), lambda: Gated(6))),
    }
    paths = tuple(f"model.{part}.layers.{layer}.mlp.experts" for part in ("encoder", "decoder") for layer in (0, 1))
    return ExpertCase(**fields, experts=paths, count=4, exact=True, interface=False)


# --- batches ---


def pixels(counts: list[int]) -> Batch:
    images = torch.randn(sum(counts), 3, 16, 16)
    batch = text_batch(counts, length=LENGTH, items=PICTURE)
    return batch | ({"pixel_values": images} if sum(counts) else {})


def omni(counts: list[int]) -> Batch:
    """Up to two images and then one clip per sample."""
    batch = text_batch(counts, length=LENGTH + 4, items=qwen.IMAGE, begin=qwen.VISION_START_ID, end=qwen.VISION_END_ID)
    at = 1 + 2 * (FEATURES + 2)
    assert at + HEARD.length + 2 <= LENGTH + 4 - LABELS
    batch["input_ids"][:, at] = qwen.AUDIO_START_ID
    batch["input_ids"][:, at + 1 : at + 1 + HEARD.length] = qwen.AUDIO_ID
    batch["input_ids"][:, at + 1 + HEARD.length] = qwen.AUDIO_END_ID
    return batch | qwen.packed_images(sum(counts)) | qwen.clips(len(counts))


def sorted_tokens(counts: list[int]) -> Batch:
    """Ernie's: tokens of images go to experts of their own, and so do those that begin and end an image."""
    batch = qwen.packed_image_batch(counts)
    if sum(counts):
        batch["pixel_values"] = torch.randn(sum(counts) * qwen.PATCHES, 3 * 4 * 4)
    special = torch.tensor([qwen.IMAGE_ID, qwen.VISION_START_ID, qwen.VISION_END_ID])
    return batch | {"moe_mm_token_type_ids": torch.isin(batch["input_ids"], special).int()}


# --- sizes ---


def local_experts(count: int) -> dict[str, Any]:
    return {"num_local_experts": count, "num_experts_per_tok": 2}


def grouped(count: int, groups: int) -> dict[str, Any]:
    """Experts of DeepSeek and what took after it: a dense layer first, a shared expert, groups of experts."""
    return {
        "moe_intermediate_size": 20,
        "n_routed_experts": count,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": groups,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }


LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
QWEN: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 8}
ERNIE: dict[str, Any] = {"moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1}
ROPE = {"rope_parameters": qwen.ROPE}
GLM_VISION = qwen.VISION | {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "image_size": 16}
ERNIE_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_merge_size": 2,
}
LLAMA4 = TEXT | {
    "head_dim": 8,
    "intermediate_size": 20,
    "intermediate_size_mlp": 48,
    "num_hidden_layers": 4,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 1, 0],
    "attention_chunk_size": 8,
    "attn_temperature_tuning": False,
}
AUDIO = qwen.AUDIO | {"encoder_layers": 2, "n_window": 50, "n_window_infer": 100, "output_dim": 32}
AUDIO |= {"downsample_hidden_size": 4, "num_mel_bins": MEL_BINS}
PICTURE = Items(placeholder=1, length=FEATURES, rows={"pixel_values": 1})
HEARD = Items(placeholder=qwen.AUDIO_ID, length=2, rows={"input_features": 1, "feature_attention_mask": 1})
VISUAL = "model.model.visual.blocks"
ALL = ("0.mlp.experts", "1.mlp.experts", "2.mlp.experts")
LATER = ALL[1:]

CASES = [
    causal("mixtral", "MixtralForCausalLM", "MixtralConfig", ALL, 5, **local_experts(5)),
    causal(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        (ALL[0], ALL[2]),
        4,
        **QWEN,
        num_experts=4,
        shared_expert_intermediate_size=24,
        mlp_only_layers=[1],
    ),
    causal("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", ALL, 6, **QWEN, num_experts=6, norm_topk_prob=True),
    causal(
        "gpt_oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        ALL,
        4,
        **local_experts(4),
        head_dim=8,
        sliding_window=6,
    ),
    causal(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        LATER,
        4,
        **LATENT,
        **grouped(4, 2),
        topk_method="group_limited_greedy",
    ),
    causal("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", LATER, 6, **LATENT, **grouped(6, 2)),
    causal(
        "llama4_text",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        ("1.feed_forward.experts", "3.feed_forward.experts"),
        4,
        interface=False,
        **LLAMA4 | local_experts(4),
    ),
    causal("glm4_moe", "Glm4MoeForCausalLM", "Glm4MoeConfig", LATER, 5, **grouped(5, 1), head_dim=8),
    causal("olmoe", "OlmoeForCausalLM", "OlmoeConfig", ALL, 4, num_experts=4, num_experts_per_tok=2),
    causal(
        "granitemoe",
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        tuple(path.replace("mlp", "block_sparse_moe") for path in ALL),
        5,
        **local_experts(5),
    ),
    causal(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        LATER,
        4,
        **ERNIE,
        moe_intermediate_size=20,
        tie_word_embeddings=False,
    ),
    ExpertCase(
        name="dbrx",
        make_module=built(
            "DbrxForCausalLM",
            "DbrxConfig",
            **IDS,
            d_model=32,
            n_heads=4,
            n_layers=2,
            max_seq_len=64,
            attn_config={"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
            ffn_config={"hidden_size": 32, "ffn_hidden_size": 20, "moe_num_experts": 4, "moe_top_k": 2},
        ),
        make_batch=padded,
        modalities=("language",),
        layers={"language": ("model.transformer.blocks",)},
        experts=("model.transformer.blocks.0.ffn.experts", "model.transformer.blocks.1.ffn.experts"),
        count=4,
        interface=False,
    ),
    replace(
        causal("phimoe", "PhimoeForCausalLM", "PhimoeConfig", ALL, 4),
        make_module=phimoe,
    ),
    replace(
        causal(
            "jamba",
            "JambaForCausalLM",
            "JambaConfig",
            ("1.feed_forward.experts",),
            4,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=8,
            mamba_dt_rank=4,
            attn_layer_period=2,
            attn_layer_offset=1,
        ),
        make_batch=written,
    ),
    composed(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        qwen.packed_image_batch,
        ALL,
        4,
        vision=VISUAL,
        items=(qwen.IMAGE,),
        text_config=TEXT | QWEN | ROPE | {"num_experts": 4},
        vision_config=qwen.SMALL_VISION,
        **qwen.TOKEN_IDS,
    ),
    composed(
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "Qwen3OmniMoeThinkerConfig",
        omni,
        ALL,
        4,
        vision=VISUAL,
        audio="model.model.audio_tower.layers",
        items=(qwen.IMAGE, HEARD),
        boundaries={"vision": "model.model.get_image_features", "audio": "model.model.get_audio_features"},
        text_config=TEXT | QWEN | ROPE | {"num_experts": 4},
        vision_config=qwen.SMALL_VISION,
        audio_config=AUDIO,
        audio_token_id=qwen.AUDIO_ID,
        image_token_id=qwen.IMAGE_ID,
        video_token_id=qwen.VIDEO_ID,
        audio_start_token_id=qwen.AUDIO_START_ID,
        **qwen.VISION_TOKEN_IDS,
    ),
    replace(
        composed("glm4v_moe", "", "", qwen.packed_image_batch, LATER, 4, vision=VISUAL, items=(qwen.IMAGE,)),
        make_module=glm4v_moe,
    ),
    composed(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeForConditionalGeneration",
        "Ernie4_5_VLMoeConfig",
        sorted_tokens,
        tuple(f"{layer}.mlp.{kind}_moe.experts" for layer in (1, 2) for kind in ("text", "vision")),
        4,
        vision="model.model.vision_tower.blocks",
        items=(qwen.IMAGE,),
        text_config=TEXT | ERNIE | {"moe_intermediate_size": [20, 12], "rope_parameters": qwen.ROPE},
        vision_config=ERNIE_VISION,
        image_token_id=qwen.IMAGE_ID,
        video_token_id=qwen.VIDEO_ID,
        image_start_token_id=qwen.VISION_START_ID,
        image_end_token_id=qwen.VISION_END_ID,
        tie_word_embeddings=False,
    ),
    composed(
        "llama4",
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        pixels,
        ("1.feed_forward.experts", "3.feed_forward.experts"),
        4,
        vision="model.vision_model.model.layers",
        language="model.language_model.model",
        boundaries={"vision": "model.get_image_features"},
        items=(PICTURE,),
        interface=False,
        text_config=LLAMA4 | local_experts(4) | {"num_experts_per_tok": 1},
        vision_config=LLAMA4_VISION,
        image_token_index=1,
    ),
    handwritten("handwritten_experts", Stacked, 5, "experts"),
    handwritten("handwritten_expert_list", Listed, 4, "experts"),
    handwritten("handwritten_gated_experts", Gated, 6, "experts"),
    handwritten("handwritten_every_expert", EveryExpert, 4, "experts"),
    two_mixtures(),
]
FAMILIES: dict[str, ExpertCase] = {case.name: case for case in CASES}
