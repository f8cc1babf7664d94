"""Tiny encoders of every kind, with random weights, and inputs for them of many sizes.

`ENCODERS` builds one per name; `inputs_of(name, seed)` makes items of unlike sizes where the kind allows it.
Shapes: N items, C channels, H height, W width, P patches.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = {**SMALL, "image_size": 24, "patch_size": 8}
WHISPER = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "num_mel_bins": 8}
WAVES = {
    **SMALL,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
}


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}") if module else transformers, name)


def _model(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: _class(model)(_class(config)(**options))


def _qwen(family: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    path = f"{family}.configuration_{family}.{name}VisionConfig"
    return _model(
        path, f"{family}.modeling_{family}.{model}", **{"patch_size": 4, "num_heads": 2, "depth": 2, **options}
    )


ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "clip": _model("CLIPVisionConfig", "CLIPVisionModel", **IMAGE),
    "siglip": _model("SiglipVisionConfig", "SiglipVisionModel", **IMAGE),
    "siglip2": _model("Siglip2VisionConfig", "Siglip2VisionModel", **SMALL, num_patches=16, patch_size=8),
    "vit": _model("ViTConfig", "ViTModel", **IMAGE),
    "dinov2": _model("Dinov2Config", "Dinov2Model", **IMAGE, mlp_ratio=2),
    "dinov2_registers": _model("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", **IMAGE, mlp_ratio=2),
    "dinov3": _model("DINOv3ViTConfig", "DINOv3ViTModel", **IMAGE, num_register_tokens=4, pos_embed_rescale=None),
    "pixtral": _model("PixtralVisionConfig", "PixtralVisionModel", **IMAGE, head_dim=4),
    "qwen2_vl": _qwen("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", embed_dim=16, hidden_size=24),
    "qwen2_5_vl": _qwen(
        "qwen2_5_vl",
        "Qwen2_5_VisionTransformerPretrainedModel",
        hidden_size=16,
        intermediate_size=32,
        out_hidden_size=24,
        window_size=16,
        fullatt_block_indexes=[1],
    ),
    "qwen3_vl": _qwen(
        "qwen3_vl",
        "Qwen3VLVisionModel",
        hidden_size=16,
        intermediate_size=32,
        out_hidden_size=24,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
    "internvl": _model(
        "InternVLVisionConfig", "InternVLVisionModel", **{**IMAGE, "image_size": [24, 24], "patch_size": [8, 8]}
    ),
    "eva": _model(
        "TimmWrapperConfig",
        "TimmWrapperModel",
        architecture="eva02_tiny_patch14_224",
        model_args={"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 28},
        do_pooling=False,
    ),
    "whisper": lambda: transformers.WhisperModel(
        transformers.WhisperConfig(
            **WHISPER,
            max_source_positions=20,
            decoder_layers=1,
            decoder_ffn_dim=8,
            decoder_attention_heads=2,
            vocab_size=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    ).get_encoder(),
    "qwen2_audio": _model("Qwen2AudioEncoderConfig", "Qwen2AudioEncoder", **WHISPER, max_source_positions=20),
    "wav2vec2": _model("Wav2Vec2Config", "Wav2Vec2Model", **WAVES, feat_extract_norm="layer"),
    "wav2vec2_adapter": _model(
        "Wav2Vec2Config", "Wav2Vec2Model", **WAVES, add_adapter=True, num_adapter_layers=1, output_hidden_size=12
    ),
    "hubert": _model("HubertConfig", "HubertModel", **WAVES),
    "phi4_audio": _model(
        "phi4_multimodal.configuration_phi4_multimodal.Phi4MultimodalAudioConfig",
        "phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalAudioModel",
        hidden_size=16,
        intermediate_size=32,
        num_blocks=2,
        num_attention_heads=4,
        ext_pw_out_channel=16,
        depthwise_separable_out_channel=16,
        input_size=16,
        nemo_conv_channels=8,
        time_reduction=4,
    ),
    "convnext": _model("ConvNextConfig", "ConvNextModel", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "swin": _model(
        "SwinConfig",
        "SwinModel",
        image_size=32,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
    ),
}
ENCODERS["vit_timm"] = _model(
    "TimmWrapperConfig",
    "TimmWrapperModel",
    architecture="vit_tiny_patch16_224",
    model_args={"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 32},
    do_pooling=False,
)
for _video in ("clip", "siglip"):
    ENCODERS[f"{_video}_video"] = ENCODERS[_video]

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
MELS = {"whisper": 8, "qwen2_audio": 8, "phi4_audio": 16}


def inputs_of(name: str, seed: int = 0, items: int = 3) -> dict[str, Tensor]:
    """Random inputs of `items` items; unlike seeds give unlike sizes."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.get_default_dtype())

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    def mask(length: int, least: int) -> Tensor:
        counts = torch.tensor([length, *(number(least, length) for _ in range(items - 1))])
        return (torch.arange(length) < counts[:, None]).long()

    if name in QWEN:
        grids = torch.tensor([[number(1, 3), 2 * number(1, 4), 2 * number(1, 4)] for _ in range(items)])
        return {"pixel_values": draw(int(grids.prod(1).sum()), 3 * 2 * 4 * 4), "image_grid_thw": grids}
    if name == "siglip2":
        shapes = torch.tensor([[number(1, 5), number(1, 5)] for _ in range(items)])
        known = (torch.arange(25) < shapes.prod(1, keepdim=True)).long()
        return {"pixel_values": draw(items, 25, 3 * 8 * 8), "spatial_shapes": shapes, "pixel_attention_mask": known}
    if name == "pixtral":
        sizes = torch.tensor([[8 * number(1, 3) + number(0, 3), 8 * number(1, 3)] for _ in range(items)])
        return {"pixel_values": draw(items, 3, 27, 24), "image_sizes": sizes}
    if name in ("whisper", "qwen2_audio"):
        return {"input_features": draw(items, 8, 40), "feature_attention_mask": mask(40, 4)}
    if name == "phi4_audio":
        length = number(20, 40)
        return {"input_features": draw(items, length, 16), "feature_attention_mask": mask(length, 4)}
    if name in ("wav2vec2", "wav2vec2_adapter", "hubert"):
        length = number(100, 200)
        return {"input_values": draw(items, length), "feature_attention_mask": mask(length, 60)}
    side = {"eva": 28, "swin": 32, "vit_timm": 32}.get(name)
    size = (side, side) if side or seed == 0 else (8 * number(2, 5), 8 * number(2, 5))
    size = (24, 24) if side is None and seed == 0 else size
    if name.endswith("_video"):
        frames = torch.tensor([number(1, 3) for _ in range(items)])
        return {"pixel_values": draw(items, 3, 3, *size), "num_frames": frames}
    return {"pixel_values": draw(items, 3, *size)}


def available(name: str) -> bool:
    """Whether what the encoder needs is installed."""
    return name not in ("eva", "vit_timm") or importlib.util.find_spec("timm") is not None
