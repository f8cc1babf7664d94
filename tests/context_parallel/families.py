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

import transformers as hf
from torch import nn

from tensor_parallel.families import FAMILIES, FLOAT32, Family, made
from tensor_parallel.family_inputs import VOCABULARY, Batch, pixels, tokens
from tensor_parallel.family_sizes import EXPERTS, GROUPED, IDS, NO_DROPOUT, TEXT, VISION
from zoo import qwen

from .long_inputs import (
    IMAGE,
    LENGTH,
    LONGER,
    LONGER_BY_NAME,
    documents,
    frames_and_text,
    image_and_text,
    long_source_and_target,
    marked_image_and_text,
    nested_image_and_text,
    packed_images_and_text,
    patches_and_text,
    tiled_image_and_text,
)
from .sequence_sizes import (
    CONFORMER,
    CONVOLUTIONS,
    GEMMA3N,
    GEMMA4_VISION,
    KOSMOS2,
    LINEAR_ATTENTION,
    LLAMA4,
    LLAMA4_VISION,
    MAMBA,
    MLLAMA_VISION,
    MODERN,
    QFORMER,
    QWEN3_MOE,
    SHARING,
    SMALL_VISION,
    SPARSE,
)

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


def known(name: str, *modalities: str) -> Shared:
    """A family that tensor parallelism knows, with longer sequences."""
    family = FAMILIES[name]
    batch = LONGER_BY_NAME.get(name) or LONGER.get(family.batch, family.batch)
    return Shared(replace(family, batch=batch), modalities or ("language",))


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
        vision_config=qwen.SMALL_VISION,
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
