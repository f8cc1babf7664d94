"""Shrinks the default configuration of any family of transformers to a model of a few thousand parameters.

Every field is shrunk by its name: widths become 32, heads 4 of width 8, vocabularies 64. One width for all parts keeps
them consistent, so that a family needs a word of its own only where a name means something else there. Lists of one
entry per layer are repeated or cut, dropouts are zero, and placeholder tokens become small ids.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

WIDTH, HEADS, HEAD_WIDTH, GROUPS = 32, 4, 8, 2
VOCABULARY, LAYERS, TOWER_LAYERS = 64, 4, 2
IMAGE, PATCH = 16, 4

Fields = Mapping[str, Any]

_WIDTHS = r"_?(size|dims?|dimension|model|width|embd|channels_out|proj_dim)"
SIZES: dict[str, Any] = {
    r"(hidden|embed|embedding|model|out_hidden|output|encoder_hidden|decoder_hidden|kv_|projection)" + _WIDTHS: WIDTH,
    r"(text|vision|image_text|adapter_hidden|proj|word_embed|multimodal|cross_attention_hidden|conv)" + _WIDTHS: WIDTH,
    r"(head_hidden|attention_hidden|encoder_embed|decoder_embed|vision_hidden|text_hidden|vis|d)" + _WIDTHS: WIDTH,
    r"(backbone_hidden|qformer_hidden|patch_embed|pooling_output|num_embed|resampler_hidden)" + _WIDTHS: WIDTH,
    r"(projector_hidden|projection_hidden|hidden_state|fc|audio_hidden|word_embed_proj)" + _WIDTHS: WIDTH,
    r"n_embd|width|vision_output_dim|text_embed_dim|dim|projection_dim|projection_size|logit_dim": WIDTH,
    r"shared_embed_dim|proj_dim|out_dim": WIDTH,
    r"(encoder_|decoder_|text_|vision_|audio_|share_)?(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|d_ff)": 48,
    r"n_inner|expert_ffn_hidden_size|feed_forward_proj_size|conv_ffn_dim|intermediate_ff_size": 48,
    r".*moe_intermediate_size|expert_intermediate_size": 24,
    r"shared_(expert_)?intermediate_size|moe_shared_expert_intermediate_size": 24,
    r"(.*_)?(num_attention_heads|num_heads|n_heads?|attention_heads|nhead|num_cross_attention_heads)": HEADS,
    r"(.*_)?(num_key_value_heads|n_kv_heads?|kv_n_heads|num_kv_heads)": GROUPS,
    r"(global_|attention_|qk_nope_|qk_rope_|v_|encoder_|decoder_|linear_key_|linear_value_|text_)?head_dim": HEAD_WIDTH,
    r"d_kv|attention_dim_head|dim_head|kv_channels": HEAD_WIDTH,
    r"num_(hidden_)?layers|n_layers?|num_hidden_blocks|(text_|num_)?decoder_layers|decoder_num_layers": LAYERS,
    r"encoder_layers|depth|num_encoder_layers|num_blocks|encoder_num_layers|qformer_layers": TOWER_LAYERS,
    r"resampler_depth|num_global_layers|vision_layers": TOWER_LAYERS,
    r"(.*_)?vocab_size|vocab_size_per_layer_input|n_vocab": VOCABULARY,
    r"image_size|crop_size|input_size|img_size": IMAGE,
    r"patch_size": PATCH,
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts": 4,
    r"num_experts_per_tok|moe_topk|top_k_experts|moe_top_k|moe_k|num_experts_per_token|experts_per_token": 2,
    r"n_group|topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts": 1,
    r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
    r"q_lora_rank|kv_lora_rank|o_lora_rank": 16,
    r".*max_position_embeddings|max_seq_len|n_positions|max_target_positions|max_sequence_length|seq_length": 128,
    r"max_text_len.*|max_length|max_seq_length": 128,
    r"max_source_positions|num_position_embeddings": 16,
    r"sliding_window|window_size|attention_window|local_window_size|attention_chunk_size": 8,
    r"num_mel_bins|n_mels|mel_bins|feature_size|num_mels": 8,
    r"linear_num_key_heads": 2,
    r"linear_num_value_heads": 4,
    r"mamba_d_state|ssm_state_size|mamba_n_heads|mamba_d_head|mamba_num_heads|mamba_head_dim|chunk_size": 8,
    r"conv_kernel_size|hidden_size_per_layer_input|laurel_rank": 8,
    r"num_query_tokens|num_queries|num_latents|resampler_n_latents|query_length|image_seq_length": 4,
    r"mm_tokens_per_image": 4,
}
ZERO = re.compile(
    r".*(dropout|drop_rate|drop_prob|layerdrop|drop_path|_drop|pdrop|mask_time_prob|mask_feature_prob|jitter_noise)"
    r"(_rate|_prob|_ratio)?|dropout.*"
)
IDS = {"pad": 0, "bos": 1, "cls": 1, "decoder_start": 1, "eos": 2, "sep": 2, "image": 3, "img": 3, "video": 4}
IDS |= {"audio": 5, "speech": 5, "vision_start": 6, "image_start": 6, "boi": 6, "vision_end": 7, "image_end": 7}
IDS |= {"eoi": 7, "audio_start": 8, "boa": 8, "audio_bos": 8, "audio_end": 9, "eoa": 9, "audio_eos": 9, "mask": 10}
_SIZES = [(re.compile(pattern), value) for pattern, value in SIZES.items()]


def small(name: str, value: Any) -> Any:
    """The shrunk value of the field `name`, or `value` where its name says nothing."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float) and ZERO.fullmatch(name):
        return type(value)(0)
    if found := re.fullmatch(r"(.*)_token_(id|index)", name):
        number = IDS.get(found[1], 11)
        return [number] if isinstance(value, list | tuple) else number
    if isinstance(value, int):
        for pattern, size in _SIZES:
            if pattern.fullmatch(name):
                return size
    if isinstance(value, dict) and "mrope_section" in value:
        return value | {"mrope_section": [1, 1, 2]}
    if name == "image_grid_pinpoints":
        return [[IMAGE, IMAGE]]
    if name == "vision_feature_layer" and isinstance(value, list | tuple):
        return [-2, -1]
    if isinstance(value, list | tuple) and name == "intermediate_size":
        return [48] * LAYERS
    if isinstance(value, list | tuple) and name in ("image_size", "patch_size"):
        return type(value)(IMAGE if name == "image_size" else PATCH for _ in value)
    return value


def shrunk(config: PreTrainedConfig, corrections: Fields | None = None) -> PreTrainedConfig:
    """A small configuration of the class of `config`, which has its defaults.

    Args:
        config: of any family, as its class gives it without arguments.
        corrections: fields that replace what their names say; those of a part by the name of its field, as a mapping.
    """
    config.allow_global_per_layer_attribute_access = True
    corrections = dict(corrections or {})
    fields = dict(_fields(config))
    return _built(type(config), fields, corrections)


def _fields(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in [*defaults, *(key for key, value in vars(config).items() if isinstance(value, PreTrainedConfig))]:
        if hasattr(config, name):
            value = getattr(config, name)
            known = defaults.get(name) is not None or (isinstance(value, dict) and "mrope_section" in value)
            known |= name == "image_grid_pinpoints"
            if isinstance(value, PreTrainedConfig) or known:
                yield name, value


def _built(kind: type[PreTrainedConfig], fields: dict[str, Any], corrections: dict[str, Any]) -> PreTrainedConfig:
    given: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            other = corrections.pop(name, None)
            if isinstance(other, PreTrainedConfig):
                given[name] = other
            else:
                given[name] = shrunk(value, other)
        else:
            given[name] = small(name, value)
    return kind(**(given | corrections))
