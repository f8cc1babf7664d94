"""What is known of audio encoders: their inputs, their rows of features, and the size of each item.

``feature_attention_mask`` (N, S) tells which frames or samples of an item are no padding; feature extractors call it
``attention_mask``, a name that the text has, too. Rows that stand for padding alone are dropped. Without a mask all
rows are kept.

Shapes: N items, S frames of a spectrogram or samples of a wave, M mel bands, L rows of an item, T rows of all items.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

from lightning_mm5d.models.item_rows import (
    EncoderKind,
    Inputs,
    ItemSize,
    hidden_state,
    kept_rows,
    known_kind,
    result_only,
)

MASK = "feature_attention_mask"


def lengths_of(inputs: Inputs, name: str, dim: int) -> list[int]:
    """Return how many frames or samples each item has: by the mask, or all of `name` along `dim`."""
    mask = inputs.get(MASK)
    values = inputs[name]
    return [values.shape[dim]] * len(values) if mask is None else [int(count) for count in mask.sum(-1).tolist()]


def _kind(name: str, sizes: Any, rows: Any, width: Any) -> EncoderKind:
    return known_kind((name, MASK), sizes, rows, width)


# --- Whisper and its like: spectrograms (N, M, S) of 30 seconds ---


def _whisper_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    return [ItemSize((count - 1) // 2 + 1) for count in lengths_of(inputs, "input_features", -1)]


def _whisper_rows(model: Any, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    return kept_rows(hidden_state(model, layer, inputs["input_features"]), sizes)


def _qwen_audio_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    return [ItemSize(((count - 1) // 2 + 1 - 2) // 2 + 1) for count in lengths_of(inputs, "input_features", -1)]


def _qwen_audio_rows(model: Any, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    result_only(model, layer)
    features, mask = inputs["input_features"], inputs.get(MASK)
    if mask is None:
        return kept_rows(model(features).last_hidden_state, sizes)
    # the model itself masks no padding; its layers see half as many frames
    places = torch.arange((features.shape[-1] - 1) // 2 + 1, device=features.device)
    known = (places < (mask.sum(-1, keepdim=True) - 1) // 2 + 1).long()
    shape = features.new_empty(len(features), len(places), 1)
    seen = create_bidirectional_mask(config=model.config, inputs_embeds=shape, attention_mask=known)
    return kept_rows(model(features, attention_mask=seen).last_hidden_state, sizes)


def _model_width(config: Any) -> int:
    return config.d_model


# --- Wav2Vec2 and its like: waves (N, S) ---


def _wave_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    sizes = []
    for count in lengths_of(inputs, "input_values", -1):
        for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
            count = (count - kernel) // stride + 1
        if getattr(config, "add_adapter", False):
            for _ in range(config.num_adapter_layers):
                count = (count - 1) // config.adapter_stride + 1
        sizes.append(ItemSize(max(count, 0)))
    return sizes


def _wave_rows(model: Any, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    if getattr(model.config, "add_adapter", False):
        result_only(model, layer)
    # models with group norms were trained on waves padded with zeros, and take no mask
    mask = inputs.get(MASK) if model.config.feat_extract_norm == "layer" else None
    return kept_rows(hidden_state(model, layer, inputs["input_values"], attention_mask=mask), sizes)


def _wave_width(config: Any) -> int:
    return config.output_hidden_size if getattr(config, "add_adapter", False) else config.hidden_size


# --- Phi-4's conformer: spectrograms (N, S, M) ---


def _conformer_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    factor = config.time_reduction
    return [ItemSize(-(-count // factor)) for count in lengths_of(inputs, "input_features", 1)]


def _conformer_rows(model: Any, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    result_only(model, layer)
    mask = inputs.get(MASK)
    return kept_rows(model(inputs["input_features"], None if mask is None else mask.bool()), sizes)


def _hidden_size(config: Any) -> int:
    return config.hidden_size


WAVES = _kind("input_values", _wave_sizes, _wave_rows, _wave_width)
AUDIO_KINDS = {
    "whisper": _kind("input_features", _whisper_sizes, _whisper_rows, _model_width),
    "qwen2_audio_encoder": _kind("input_features", _qwen_audio_sizes, _qwen_audio_rows, _model_width),
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat"), WAVES),
    "phi4_multimodal_audio": _kind("input_features", _conformer_sizes, _conformer_rows, _hidden_size),
}
"""by ``model_type`` of the encoder's config"""
