"""Words for single families where names of fields and arguments do not say what they mean to `shrunk` and `feeds`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers import PreTrainedConfig

from .shrunk import shrunk

Fields = dict[str, Any]
Batch = dict[str, Any]

ROPE: Fields = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
ALL_OF_IT: Fields = ROPE | {"partial_rotary_factor": 1.0}
MARKS: Fields = {"vision_start_token_id": 6, "vision_end_token_id": 7}
LATENT: Fields = {"num_key_value_heads": 4}
SOUND: Fields = {"intermediate_size": 64, "num_hidden_layers": 2}
GLM: Fields = {"text_config": {"rope_parameters": ALL_OF_IT}, "vision_config": {"out_hidden_size": 32}}
CONVOLVED: Fields = {
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
SHAPED: Fields = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
OMNI_AUDIO: Fields = {"n_window": 8, "output_dim": 32, "downsample_hidden_size": 8}
# a hundred frames are thirteen features, whatever the window is
CHUNKED_AUDIO: Fields = OMNI_AUDIO | {"n_window": 50, "max_source_positions": 50}
CONFORMED: Fields = {
    "encoder_config": {"input_dim": 8, "num_layers": 2, "context_size": 6, "max_pos_emb": 16, "conv_kernel_size": 3},
    "has_lora_adapter": False,
    "downsample_rate": 2,
    "window_size": 4,
}
CODEBOOK: Fields = {"embed_dim": 8, "latent_channels": 8, "base_channels": 32, "channel_multiplier": [1, 1]}

CORRECTIONS: dict[str, Fields] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": 3},
    "instructblip": {"image_token_index": 3},
    "instructblipvideo": {"video_token_index": 4},
    "cohere2_vision": {"alignment_intermediate_size": 64},
    "cosmos3_edge": {"text_config": {"rope_parameters": ROPE}},
    "dots3_note": {"text_config": LATENT},
    "glm5_next": {"text_config": LATENT},
    "glm46v": GLM,
    "glm4v": GLM,
    "glmga": GLM,
    "glm4v_moe": GLM,
    "glm_ocr": GLM,
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]]},
    "granite_speech": CONFORMED,
    "granite_speech_plus": CONFORMED,
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
    "janus": {
        "vision_config": {"num_image_tokens": 16},
        "vq_config": {
            "embed_dim": 8,
            "num_embeddings": 16,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "image_token_embed_dim": 32,
        },
    },
    "llama4": {
        "text_config": {"no_rope_layers": [1, 1, 0, 1], "intermediate_size_mlp": 48},
        "vision_config": {
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    },
    "mistral4": {"qk_rope_head_dim": 8, "head_dim": 8} | LATENT,
    "mistral_large4": {"text_config": LATENT},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "glmasr": {"audio_config": {"intermediate_size": 128}},
    "musicflamingo": {"audio_config": SOUND},
    "voxtral": {"audio_token_id": 5, "audio_config": SOUND | {"intermediate_size": 128}},
    "qwen2_5_omni_thinker": MARKS
    | {
        "text_config": {"rope_parameters": ROPE},
        "audio_config": OMNI_AUDIO,
        "vision_config": {"out_hidden_size": 32, "fullatt_block_indexes": [1]},
    },
    "qwen3_omni_moe_thinker": MARKS
    | {
        "text_config": {"rope_parameters": ROPE},
        "audio_config": CHUNKED_AUDIO,
        "vision_config": {"deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_asr": {"audio_config": CHUNKED_AUDIO},
    "qwen2_vl": {"text_config": {"rope_parameters": ROPE}},
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": ROPE},
        "vision_config": {"out_hidden_size": 32, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
    "qwen3_vl_moe": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
    "paddleocr_vl": {"text_config": {"rope_parameters": ROPE}},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_num_experts": 4, "moe_intermediate_size": [24, 12], "rope_parameters": ROPE}
    },
    "florence2": {
        "vision_config": {
            "embed_dim": [16, 32],
            "depths": [1, 1],
            "num_heads": [2, 4],
            "num_groups": [2, 4],
            "patch_size": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [3, 1],
            "patch_prenorm": [False, True],
            "window_size": 4,
        }
    },
    "mllama": {
        "text_config": {"cross_attention_layers": [1, 3], "num_hidden_layers": 4, "pad_token_id": 0},
        "vision_config": {
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
            "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
    },
    "deepseek_vl_hybrid": {
        "high_res_vision_config": {
            "output_channels": 16,
            "window_size": 2,
            "global_attn_indexes": [1],
            "image_size": 16,
            "patch_size": 4,
        }
    },
    "bridgetower": {"num_attention_heads": 4, "num_hidden_layers": 2},
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 48}},
    "kosmos-2": {"latent_query_num": 4},
    "kosmos-2.5": {"latent_query_num": 4, "vision_config": {"patch_embed_hidden_size": 48}},
    "t5": {"decoder_start_token_id": 1, "num_decoder_layers": 4},
    "udop": {"decoder_start_token_id": 1},
    "moonshine": {"pad_token_id": 0},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "gptj": {"rotary_dim": 8},
    "gemma3n": {"text_config": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4}},
    "swin": SHAPED,
    "swinv2": SHAPED,
    "sam": {
        "vision_config": {
            "output_channels": 16,
            "window_size": 2,
            "global_attn_indexes": [1],
            "num_pos_feats": 8,
            "mlp_dim": 48,
        },
        "prompt_encoder_config": {"hidden_size": 16, "mask_input_channels": 4},
        "mask_decoder_config": {"hidden_size": 16, "num_hidden_layers": 2, "mlp_dim": 24, "iou_head_hidden_dim": 8},
    },
    "speecht5": CONVOLVED,
    "xclip": {"vision_config": {"mit_hidden_size": 32, "mit_intermediate_size": 48, "num_frames": 2}},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 2, "max_2d_position_embeddings": 128},
    "kimi_k25": {"projection_hidden_size": 32, "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4}},
    "chameleon": {
        "vocabulary_map": {"<image>": 3} | {f"IMGIMG{chr(65 + n)}Z": 4 + n for n in range(10)},
        "vq_config": CODEBOOK | {"num_embeddings": 10, "resolution": 16, "num_res_blocks": 1},
    },
    "emu3": {
        "vocabulary_map": {"<image>": 3, "<|extra_200|>": 15} | {f"<|visual token {n:06}|>": 16 + n for n in range(16)},
        "vq_config": CODEBOOK | {"codebook_size": 16, "num_res_blocks": 1, "temporal_downsample_factor": 1},
    },
    "gemma4": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 2,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        "text_config": {
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    },
    "idefics": {"additional_vocab_size": 0},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "pi0": {"chunk_size": 4, "max_state_dim": 6, "max_action_dim": 5},
}
"""By model type; fields of a part as a mapping under its name."""


def pair(kind: str, encoder: PreTrainedConfig) -> Callable[[Any], Any]:
    """An encoder and GPT-2, which have no configuration together."""

    def config(_: Any) -> Any:
        whole = getattr(hf, kind).from_encoder_decoder_configs(encoder, shrunk(hf.GPT2Config()))
        whole.pad_token_id, whole.decoder_start_token_id = 0, 1
        return whole

    return config


AFTER: dict[str, Callable[[Any], Any]] = {
    "vision-encoder-decoder": pair("VisionEncoderDecoderConfig", shrunk(hf.ViTConfig())),
    "speech-encoder-decoder": pair("SpeechEncoderDecoderConfig", shrunk(hf.Wav2Vec2Config(), CONVOLVED)),
}
"""Functions that change a shrunk configuration."""

FIXED: dict[str, Fields] = {}
"""More arguments of every call."""


def lower_coordinates(model: nn.Module) -> None:
    """Has GLM's vision sample its positions in float32, in which it keeps where patches are."""

    def lower(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:3], *(place.float() for place in args[3:]))

    model.model.visual.embeddings.register_forward_pre_hook(lower)  # type: ignore[union-attr]


MODEL: dict[str, Callable[[Any], Any]] = dict.fromkeys(("glm4v", "glm46v", "glmga", "glm4v_moe"), lower_coordinates)
"""Functions that change a model after its construction."""


def with_boxes(batch: Batch) -> Batch:
    """Each token has a box, whose right and lower sides are beyond the others."""
    places = torch.randint(0, 50, (*batch["input_ids"].shape, 2))
    return batch | {"bbox": torch.cat([places, places + 10], -1)}


def with_tiles(batch: Batch) -> Batch:
    """Two tiles in every image, which all tokens see."""
    samples, length = batch["input_ids"].shape
    size = batch["pixel_values"].shape[-1]
    return batch | {
        "pixel_values": torch.randn(samples, 1, 2, 3, size, size),
        "aspect_ratio_ids": torch.ones(samples, 1).long() * 2,
        "aspect_ratio_mask": torch.ones(samples, 1, 2).long(),
        "cross_attention_mask": torch.ones(samples, length, 1, 2).long(),
    }


def with_marks(batch: Batch) -> Batch:
    """Which tokens an image replaces; the number is that of Kosmos' latent queries."""
    marks = torch.zeros_like(batch["input_ids"])
    marks[:, 1:5] = 1
    return batch | {"image_embeds_position_mask": marks}


def with_points(batch: Batch) -> Batch:
    samples = len(batch["pixel_values"])
    points = {"input_points": torch.rand(samples, 1, 3, 2) * 16, "input_labels": torch.ones(samples, 1, 3).long()}
    return {"pixel_values": batch["pixel_values"]} | points


MORE: dict[str, Callable[[Batch], Batch]] = {
    "mllama": with_tiles,
    "kosmos-2": with_marks,
    "kosmos-2.5": with_marks,
    "bros": with_boxes,
    "lilt": with_boxes,
    "udop": with_boxes,
    "layoutlm": with_boxes,
    "layoutlmv3": with_boxes,
    "sam": with_points,
}
"""What a batch has beside text, images and sounds, or in another form."""
