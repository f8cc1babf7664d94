"""Families whose sequences several ranks share, with sequences that are long enough for it, by name in `SHARED`.

Most are those that tensor parallelism knows, fed with 29 tokens of which some are padding. More are defined here, for
what matters to sequences alone: masks that differ by layer, keys that layers share, attention to another sequence,
images that see themselves both ways, tokens packed in one row. In `PARTLY` are those of
which modules or layers run on whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as hf
from torch import nn

from tensor_parallel.families import (
    DEEPSEEK,
    EXPERTS,
    FAMILIES,
    FLOAT32,
    GROUPED,
    IDS,
    NO_DROPOUT,
    TEXT,
    VISION,
    VOCABULARY,
    WIDE,
    Batch,
    Family,
    made,
    pixels,
    source_and_target,
    speech_and_text,
    tokens,
    unpadded,
)
from zoo import qwen

LENGTH = 29  # no degree divides it
IMAGE = 66
LATE: dict[str, Any] = {"use_cache": False}


@dataclass(frozen=True)
class Shared:
    """A family, and which of its modalities share their sequences.

    Attributes:
        family: how to build and feed it.
        modalities: names; the last computes the loss.
    """

    family: Family
    modalities: tuple[str, ...] = ("language",)


# --- batches ---


def text(length: int = LENGTH) -> Batch:
    """Token ids, some of them padding, and none that stands for something else."""
    batch = tokens(length)
    ids = batch["input_ids"].clamp(max=60)
    return batch | {"input_ids": ids, "labels": ids.masked_fill(batch["attention_mask"] == 0, -100)}


def to_be_filled(count: int, placeholder: int = IMAGE, length: int = LENGTH) -> Batch:
    """`text` whose second to ``1 + count``th tokens are placeholders."""
    batch = text(length)
    batch["input_ids"][:, 1 : 1 + count] = placeholder
    return batch


def whole_rows() -> Batch:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    return {"input_ids": ids, "labels": ids}


def long_source_and_target() -> Batch:
    return tokens(LENGTH) | {"labels": torch.randint(3, VOCABULARY, (2, 21))}


def documents() -> Batch:
    """One row of three documents, which do not see each other."""
    ids = torch.randint(3, VOCABULARY, (1, LENGTH))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(n) for n in (11, 12, 6)])[None]}


def image_and_text(features: int, size: int, **others: Any) -> Callable[[], Batch]:
    return lambda: to_be_filled(features) | pixels(size) | others


def nested_image_and_text() -> Batch:
    batch = image_and_text(4, 8)()
    return batch | {"pixel_values": batch["pixel_values"].unsqueeze(1)}


def sized_image_and_text() -> Batch:
    return image_and_text(4, 16)() | {"image_sizes": torch.tensor([[16, 16]] * 2)}


def typed_image_and_text() -> Batch:
    """The image and the text before it are a prefix, which sees itself both ways."""
    batch = image_and_text(9, 12)()
    types = torch.ones_like(batch["input_ids"])
    types[:, :10] = 0
    return batch | {"token_type_ids": types}


def tiled_image_and_text() -> Batch:
    """Two tiles in one sample and one in the other, which some tokens do not see."""
    seen = torch.ones(2, LENGTH, 1, 2, dtype=torch.long)
    seen[0, :3] = 0
    return text() | {
        "pixel_values": torch.randn(2, 1, 2, 3, 8, 8),
        "aspect_ratio_ids": torch.tensor([[2], [1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 1]], [[1, 0]]]),
        "cross_attention_mask": seen,
    }


def patches_and_text() -> Batch:
    batch = to_be_filled(4)
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).view(1, 16, 2)
    return batch | {
        "pixel_values": torch.randn(2, 16, 12),
        "image_position_ids": places.repeat(2, 1, 1),
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).long(),
    }


def marked_image_and_text() -> Batch:
    marks = torch.zeros(2, LENGTH, dtype=torch.long)
    marks[:, 2:6] = 1
    return text() | pixels() | {"image_embeds_position_mask": marks}


def packed_images_and_text() -> Batch:
    batch = text()
    ids = batch["input_ids"].clamp(min=16)
    ids[:, 1:7] = torch.tensor([qwen.VISION_START_ID, *[qwen.IMAGE_ID] * 4, qwen.VISION_END_ID])
    return batch | {"input_ids": ids, "mm_token_type_ids": (ids == qwen.IMAGE_ID).int()} | qwen.packed_images(2)


def long_speech_and_text() -> Batch:
    return to_be_filled(2) | {"input_features": torch.randn(2, 8, 16)}


def frames_and_text() -> Batch:
    return to_be_filled(6) | {
        "input_features": torch.randn(2, 12, 8),
        "input_features_mask": torch.ones(2, 6, dtype=torch.bool),
    }


LONGER: dict[Any, Callable[[], Batch]] = {
    tokens: lambda: tokens(LENGTH),
    unpadded: whole_rows,
    source_and_target: long_source_and_target,
    speech_and_text: long_speech_and_text,
}
LONGER_BY_NAME: dict[str, Callable[[], Batch]] = {
    "internvl": image_and_text(4, 8),
    "internvl_qk_norm": image_and_text(4, 8),
    "mistral3": sized_image_and_text,
    "paligemma": typed_image_and_text,
}


def known(name: str, *modalities: str) -> Shared:
    """A family that tensor parallelism knows, with longer sequences."""
    family = FAMILIES[name]
    batch = LONGER_BY_NAME.get(name) or LONGER.get(family.batch, family.batch)
    return Shared(replace(family, batch=batch), modalities or ("language",))


# --- models ---


def composed(
    model: str,
    config: str,
    batch: Callable[[], Batch],
    modalities: tuple[str, ...] = ("vision", "language"),
    fixed: dict[str, Any] | None = None,
    **parts: Any,
) -> Shared:
    """A model with a configuration of several parts."""

    def make() -> nn.Module:
        built = getattr(hf, config)(**parts)
        for part in (built, *(getattr(built, name, None) for name in built.sub_configs)):
            if part is not None:
                part._experts_implementation = "eager"  # the others know no float64 on the CPU
        return getattr(hf, model)(built)

    return Shared(Family(make, batch, FLOAT32, LATE if fixed is None else fixed), modalities)


def causal(model: str, config: str, sizes: dict[str, Any] = GROUPED, **options: Any) -> Shared:
    fed = options.pop("batch", lambda: tokens(LENGTH))
    return Shared(Family(made(model, config, **(sizes | options)), fed, FLOAT32, LATE))


def tower(model: str, config: str, **options: Any) -> Shared:
    return Shared(Family(made(model, config, **(VISION | options)), pixels), ("vision",))


def masked(model: str, config: str, **options: Any) -> Shared:
    return Shared(Family(made(model, config, **(TEXT | options)), lambda: tokens(LENGTH), FLOAT32))


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
QWEN3_VISION = qwen.VISION | {
    "hidden_size": 16,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "num_position_embeddings": qwen.PATCHES,
    "deepstack_visual_indexes": [0, 1],
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

OF_TENSOR_PARALLELISM = {
    name: known(name)
    for name in (
        *("albert", "bert", "deepseek_v3", "distilbert", "ernie", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
        *("gpt2", "gpt_neox", "gpt_oss", "llama", "llama_biased", "llama_eager", "mistral", "mixtral", "opt", "phi3"),
        *("qwen2", "qwen3", "qwen3_moe", "roberta"),
    )
} | {
    name: known(name, *modalities)
    for modalities, names in {
        ("vision",): ("dinov2", "dinov2_swiglu", "pixtral", "vit"),
        ("audio",): ("hubert", "wav2vec2"),
        ("encoder", "language"): ("bart", "mbart"),
        ("audio", "language"): ("qwen2_audio", "voxtral", "whisper"),
        ("vision", "language"): (
            *("blip_2", "clip", "gemma3", "internvl", "internvl_qk_norm", "llava", "llava_next", "mistral3"),
            *("paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "siglip", "smolvlm"),
        ),
        ("vision", "audio", "language"): ("qwen2_5_omni_thinker",),
    }.items()
    for name in names
}

SHARED: dict[str, Shared] = OF_TENSOR_PARALLELISM | {
    "dinov2_registers": tower(
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", num_register_tokens=2, drop_path_rate=0.0, **NO_DROPOUT
    ),
    "gemma3n_text": causal("Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA3N),
    "gemma4_text": causal("Gemma4ForCausalLM", "Gemma4TextConfig", SHARING),
    "gemma4": composed(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        patches_and_text,
        text_config=SHARING,
        vision_config=GEMMA4_VISION,
        audio_config=None,
        image_token_id=IMAGE,
        boi_token_id=64,
        eoi_token_id=65,
        video_token_id=63,
        audio_token_id=62,
    ),
    "granite_speech": composed(
        "GraniteSpeechForConditionalGeneration",
        "GraniteSpeechConfig",
        frames_and_text,
        ("language",),
        text_config={"model_type": "granite"} | GROUPED,
        encoder_config=CONFORMER,
        projector_config=QFORMER,
        audio_token_index=IMAGE,
        has_lora_adapter=False,
        downsample_rate=2,
        window_size=4,
    ),
    "granitemoe": causal("GraniteMoeForCausalLM", "GraniteMoeConfig", **EXPERTS),
    "idefics2": composed(
        "Idefics2ForConditionalGeneration",
        "Idefics2Config",
        nested_image_and_text,
        vision_config=SMALL_VISION,
        perceiver_config={"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4}
        | {"resampler_head_dim": 8, "num_key_value_heads": 2, "hidden_size": 32},
        text_config={"model_type": "mistral", "sliding_window": None, "head_dim": 8} | GROUPED,
        image_token_id=IMAGE,
    ),
    "idefics3": composed(
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        nested_image_and_text,
        vision_config=SMALL_VISION,
        text_config={"model_type": "llama"} | GROUPED,
        image_token_id=IMAGE,
        scale_factor=2,
    ),
    "kosmos2": composed(
        "Kosmos2ForConditionalGeneration",
        "Kosmos2Config",
        marked_image_and_text,
        text_config=KOSMOS2,
        vision_config=VISION,
        latent_query_num=4,
    ),
    "llama4": composed(
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        image_and_text(4, 16),
        text_config=LLAMA4,
        vision_config=LLAMA4_VISION,
        image_token_index=IMAGE,
        boi_token_index=64,
        eoi_token_index=65,
    ),
    "llama_cached": Shared(replace(known("llama").family, fixed={"use_cache": True})),
    "llama_documents": Shared(replace(known("llama").family, batch=documents)),
    "mllama": composed(
        "MllamaForConditionalGeneration",
        "MllamaConfig",
        tiled_image_and_text,
        text_config=GROUPED | {"num_hidden_layers": 4, "cross_attention_layers": [1, 3], "vocab_size": IMAGE},
        vision_config=MLLAMA_VISION,
        image_token_index=IMAGE,
    ),
    "modernbert": masked("ModernBertForMaskedLM", "ModernBertConfig", **MODERN),
    "qwen3_vl_moe": composed(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        packed_images_and_text,
        text_config=QWEN3_MOE,
        vision_config=QWEN3_VISION,
        **qwen.TOKEN_IDS,
    ),
    "t5gemma": Shared(
        Family(
            made(
                "T5GemmaForConditionalGeneration",
                "T5GemmaConfig",
                encoder=GROUPED | {"head_dim": 8, "sliding_window": 6},
                decoder=GROUPED | {"head_dim": 8, "sliding_window": 6, "cross_attention_hidden_size": 32},
                dropout_rate=0.0,
                vocab_size=VOCABULARY,
            ),
            long_source_and_target,
            FLOAT32,
            LATE,
        ),
        ("encoder", "language"),
    ),
}

# families of which some modules, or whole layers, run on whole sequences on every rank
PARTLY: dict[str, Shared] = {
    "beit": known("beit", "vision"),
    "beit_shared_bias": known("beit_shared_bias", "vision"),
    "bloom": known("bloom"),
    "chatglm": known("chatglm"),
    "convbert": masked("ConvBertForMaskedLM", "ConvBertConfig", **NO_DROPOUT, embedding_size=32),
    "deberta": known("deberta"),
    "dinov3": tower(
        "DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=2, drop_path_rate=0.0, pos_embed_rescale=None
    ),
    "falcon_alibi": known("falcon_alibi"),
    "falcon_alibi_eager": known("falcon_alibi_eager"),
    "falcon_groups": known("falcon_groups"),
    "falcon_multi_query": known("falcon_multi_query"),
    "falcon_mamba": causal("FalconMambaForCausalLM", "FalconMambaConfig", MAMBA),
    "fnet": masked("FNetForMaskedLM", "FNetConfig", **NO_DROPOUT),
    "gpt_neo": known("gpt_neo"),
    "gptj": known("gptj"),
    "granite_speech_tower": replace(SHARED["granite_speech"], modalities=("audio", "language")),
    "jamba": causal("JambaForCausalLM", "JambaConfig", GROUPED | {"mamba_d_state": 8, "attn_layer_offset": 1}),
    "lfm2": causal("Lfm2ForCausalLM", "Lfm2Config", **CONVOLUTIONS),
    "llama4_tuned": causal(
        "Llama4ForCausalLM", "Llama4TextConfig", LLAMA4 | {"attn_temperature_tuning": True, "floor_scale": 8}
    ),
    "mamba": causal("MambaForCausalLM", "MambaConfig", MAMBA),
    "qwen3_5": causal("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", LINEAR_ATTENTION),
    "qwen3_next": causal(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", LINEAR_ATTENTION | EXPERTS | {"moe_intermediate_size": 20}
    ),
    "rwkv": causal("RwkvForCausalLM", "RwkvConfig", IDS | {"hidden_size": 32, "num_hidden_layers": 2}),
    "sam": known("sam", "vision", "language"),
    "sparse": causal("DeepseekV32ForCausalLM", "DeepseekV32Config", SPARSE),
    "swin": known("swin", "vision"),
    "swinv2": known("swinv2", "vision"),
    "t5": known("t5"),
    "t5_encoder": known("t5", "encoder", "language"),
}
SHARED |= PARTLY
# they come to float32 in many places, and some of their gradients are near zero
for one in ("gemma3n_text", "gemma4_text", "gemma4"):
    SHARED[one] = replace(SHARED[one], family=replace(SHARED[one].family, tolerance=2e-4))
