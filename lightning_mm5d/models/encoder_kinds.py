"""Encoders of any kind: what they take, which rows of features they give, and how many, known without a forward.

Encoders whose number of rows follows from values (grids, sizes, masks) are known by their ``model_type``. For any other
one that returns a ``last_hidden_state`` a forward without memory or data, on torch's meta device, tells the numbers.

Shapes: N items, C channels, H height, W width, L rows of an item, T rows of all items, D width.

What is known of audio encoders: their inputs, their rows of features, and the size of each item.

``feature_attention_mask`` (N, S) tells which frames or samples of an item are no padding; feature extractors call it
``attention_mask``, a name that the text has, too. Rows that stand for padding alone are dropped. Without a mask all
rows are kept.

Shapes: N items, S frames of a spectrogram or samples of a wave, M mel bands, L rows of an item, T rows of all items.

Encoders that are known by nothing but their results: a ``last_hidden_state``, or maps of features.

How many rows an item has tells a forward on torch's meta device, which needs neither weights nor data. Those of an
input's shape are kept, since a processor asks again for every image.

Shapes: N items, C channels, H height, W width, L rows of an item, D width.

What is known of image and video encoders: their inputs, their rows of features, and the size of each item.

Rows are those of patches. Class and register tokens come first in an encoder's result and are dropped, as is customary
in models that feed a language model (LLaVA's default); padding is dropped, too.

Shapes: N items, F frames, C channels, H height, W width, P patches, T rows of all items, D width.

What an encoder makes of a batch of items: rows of features, and how many of them each item has.

An *item* is one image, video or piece of audio. A video is a number of *frames* of equal size; any other item is one
frame. Projectors work on frames, so that pooling never mixes two of them.

Shapes: N items, T rows of all items, D width.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.masking_utils import create_bidirectional_mask

from lightning_mm5d.config.errors import ConfigError


@dataclass(frozen=True)
class ItemSize:
    """How many rows an item has.

    Attributes:
        length: rows of the item, frame after frame.
        grid: rows and columns of one frame; None where its rows have no such order.
        frames: how many frames the item has.
    """

    length: int
    grid: tuple[int, int] | None = None
    frames: int = 1


def size_of_grid(height: int, width: int, frames: int = 1) -> ItemSize:
    """Return the size of an item of `frames` frames, each with a row for each place of a grid."""
    return ItemSize(height * width * frames, (height, width), frames)


@dataclass(frozen=True)
class ItemRows:
    """The features of all items of a batch, one item after the other, without padding.

    Attributes:
        rows: the features. (T, D)
        sizes: of each item; their lengths add up to T.
    """

    rows: Tensor
    sizes: list[ItemSize]


Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class EncoderKind:
    """What the composer knows of a kind of encoder.

    Attributes:
        names: of the inputs that it takes.
        required: those that a batch must have.
        sizes: the size of each item, from the encoder's config and its inputs.
        encode: calls an encoder with its inputs and the number of a layer.
        width: D, from the config.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    sizes: Callable[[Any, Inputs], list[ItemSize]]
    encode: Callable[[nn.Module, Inputs, int], ItemRows]
    width: Callable[[Any], int]


def known_kind(
    names: tuple[str, ...],
    sizes: Callable[[Any, Inputs], list[ItemSize]],
    rows: Callable[[nn.Module, Inputs, list[ItemSize], int], Tensor],
    width: Callable[[Any], int],
    required: int = 1,
) -> EncoderKind:
    """Return a kind whose sizes follow from its config and inputs; of `names` the first ones are `required`."""

    def encode(model: nn.Module, inputs: Inputs, layer: int) -> ItemRows:
        known = sizes(model.config, inputs)
        return ItemRows(rows(model, inputs, known, layer), known)

    return EncoderKind(names=names, required=names[:required], sizes=sizes, encode=encode, width=width)


def hidden_state(model: nn.Module, layer: int, *args: Any, **inputs: Any) -> Tensor:
    """Call an encoder and return its result, or the hidden state of one of its layers.

    Args:
        model: an encoder.
        layer: -1 for the encoder's own result, after its last norm where it has one; other numbers count the hidden
            states as transformers does: -2 is what enters the last layer, 0 what enters the first one.
        args: what the model takes by position.
        inputs: what it takes by name.

    Raises:
        ConfigError: the encoder keeps no hidden states, or not so many.
    """
    if layer == -1:
        result = model(*args, **inputs)
        return result if isinstance(result, Tensor) else result.last_hidden_state
    result = model(*args, **inputs, output_hidden_states=True)
    states = getattr(result, "hidden_states", None)
    if not states:
        rule = f"{type(model).__name__} returns no hidden states of its layers"
        raise ConfigError("feature_layer", layer, rule, "Use -1, the encoder's own result")
    if not -len(states) <= layer < len(states):
        rule = f"{type(model).__name__} has {len(states)} hidden states"
        raise ConfigError("feature_layer", layer, rule, f"Use a number from {-len(states)} to {len(states) - 1}")
    return states[layer]


def result_only(model: nn.Module, layer: int) -> None:
    """Refuse other layers than the last.

    Raises:
        ConfigError: `layer` is not -1.
    """
    if layer != -1:
        rule = f"The features of {type(model).__name__} are its result, of which no other layer has the form"
        raise ConfigError("feature_layer", layer, rule, "Use -1")


def kept_rows(states: Tensor, sizes: Sequence[ItemSize]) -> Tensor:
    """Return the first rows of each item of `states` (N, L, D), as many as it has, one item after the other (T, D)."""
    counts = [size.length for size in sizes]
    if counts == [states.shape[1]] * len(states):
        return states.flatten(0, 1)
    return torch.cat([item[:count] for item, count in zip(states, counts, strict=False)])


def pair(value: Any) -> tuple[int, int]:
    """Return height and width of a size in a config: one number, or one for each."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)


# --- images in a grid of patches, all of one size ---


def frame_counts(inputs: Inputs) -> list[int]:
    """Return how many frames each item of ``pixel_values`` has, by its shape alone.

    An image (N, C, H, W) is one frame. Videos (N, F, C, H, W) have as many as ``num_frames`` (N,) says, or F.
    """
    pixels, counts = inputs["pixel_values"], inputs.get("num_frames")
    if pixels.dim() not in (4, 5):
        rule = "Images are (N, C, H, W), videos (N, F, C, H, W)"
        raise ConfigError("pixel_values", tuple(pixels.shape), rule, "Stack the images of a batch along the first dim")
    if pixels.dim() == 4 or counts is None:
        return [1 if pixels.dim() == 4 else pixels.shape[1]] * len(pixels)
    return [int(count) for count in counts.tolist()]


def split_frames(inputs: Inputs) -> tuple[Tensor, list[int]]:
    """Return the frames (N, C, H, W) of ``pixel_values``, and how many each item has, as `frame_counts`."""
    pixels, frames = inputs["pixel_values"], frame_counts(inputs)
    if pixels.dim() == 4:
        return pixels, frames
    if pixels.is_meta or inputs.get("num_frames") is None:
        return pixels.flatten(0, 1)[: sum(frames)], frames
    return torch.cat([video[:count] for video, count in zip(pixels, frames, strict=True)]), frames


def _patch_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    (*_, rows, columns), (height, width) = inputs["pixel_values"].shape, pair(config.patch_size)
    return [size_of_grid(rows // height, columns // width, count) for count in frame_counts(inputs)]


def called_on_images(model: nn.Module, pixels: Tensor, layer: int) -> Tensor:
    """Return a layer's result for frames; positions are interpolated where the encoder can and sizes are unusual."""
    expected = getattr(model.config, "image_size", None)
    known = inspect.signature(type(model).forward).parameters
    if expected is None or pair(expected) == tuple(pixels.shape[-2:]) or "interpolate_pos_encoding" not in known:
        return hidden_state(model, layer, pixel_values=pixels)
    return hidden_state(model, layer, pixel_values=pixels, interpolate_pos_encoding=True)


def _patch_rows(model: nn.Module, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    states = called_on_images(model, split_frames(inputs)[0], layer)
    length = math.prod(sizes[0].grid or ()) if sizes else 0
    return states[:, states.shape[1] - length :].flatten(0, 1)


_hidden_size = attrgetter("hidden_size")

PATCHES = known_kind(("pixel_values", "num_frames"), _patch_sizes, _patch_rows, _hidden_size)


# --- images of unlike sizes ---


def _shape_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    return [size_of_grid(height, width) for height, width in inputs["spatial_shapes"].tolist()]


def _naflex_rows(model: nn.Module, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    mask = inputs.get("pixel_attention_mask")
    if mask is None:  # transformers wants one
        places = torch.arange(inputs["pixel_values"].shape[1], device=inputs["pixel_values"].device)
        mask = (places < inputs["spatial_shapes"].prod(-1, keepdim=True)).long()
    named = {name: inputs[name] for name in ("pixel_values", "spatial_shapes")}
    return kept_rows(hidden_state(model, layer, pixel_attention_mask=mask, **named), sizes)


NAFLEX = known_kind(
    ("pixel_values", "spatial_shapes", "pixel_attention_mask"), _shape_sizes, _naflex_rows, _hidden_size, required=2
)


def _pixtral_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    patch, given = config.patch_size, inputs.get("image_sizes")
    shapes = (
        [tuple(inputs["pixel_values"].shape[-2:])] * len(inputs["pixel_values"]) if given is None else given.tolist()
    )
    return [size_of_grid(height // patch, width // patch) for height, width in shapes]


def _pixtral_rows(model: nn.Module, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    shapes = inputs.get("image_sizes")
    return hidden_state(model, layer, inputs["pixel_values"], image_sizes=shapes).squeeze(0)


PIXTRAL = known_kind(("pixel_values", "image_sizes"), _pixtral_sizes, _pixtral_rows, _hidden_size)


# --- Qwen's encoders: patches of all images and videos in a row, merged by the encoder ---


def _merged_sizes(config: Any, inputs: Inputs) -> list[ItemSize]:
    merge = config.spatial_merge_size
    grids = inputs["image_grid_thw"].tolist()
    return [size_of_grid(height // merge, width // merge, frames) for frames, height, width in grids]


def _merged_rows(model: nn.Module, inputs: Inputs, sizes: list[ItemSize], layer: int) -> Tensor:
    result_only(model, layer)
    return model(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output


def _merged_width(config: Any) -> int:
    return getattr(config, "out_hidden_size", config.hidden_size)


MERGED = known_kind(("pixel_values", "image_grid_thw"), _merged_sizes, _merged_rows, _merged_width, required=2)

IMAGE_KINDS = {
    **dict.fromkeys(
        (
            *("clip_vision_model", "siglip_vision_model", "vit", "deit", "dinov2", "dinov2_with_registers"),
            *("dinov3_vit", "internvl_vision"),
        ),
        PATCHES,
    ),
    "siglip2_vision_model": NAFLEX,
    "pixtral": PIXTRAL,
    "qwen2_vl_vision": MERGED,
    "qwen2_5_vl_vision": MERGED,
    "qwen3_vl_vision": MERGED,
}
"""by ``model_type`` of the encoder's config"""


_MOST_PREFIX_TOKENS = 16


def general_kind(model_or_config: Any) -> EncoderKind:
    """Return the kind of an encoder that is known by its results alone."""
    built = isinstance(model_or_config, nn.Module)
    main = _first_input(model_or_config) if built else _first_input(_bare(_text(model_or_config)))
    images = main == "pixel_values"
    encode = _encode_images if images else functools.partial(_encode_others, main)
    return EncoderKind(
        names=(main, "num_frames") if images else (main,),
        required=(main,),
        sizes=functools.partial(_sizes, main, encode),
        encode=encode,
        width=lambda config: _channels(_bare(_text(config))),
    )


def built_bare(config: Any) -> nn.Module:
    """Build a model of transformers on the meta device, in evaluation mode.

    Raises:
        ConfigError: transformers has no model for the config.
    """
    with torch.device("meta"):
        try:
            model = AutoModel.from_config(config)
        except ValueError:
            rule = "It is no encoder that is known, and transformers builds no model of it"
            raise ConfigError("config.model_type", config.model_type, rule, "Use an encoder of AutoModel") from None
        if getattr(config, "is_encoder_decoder", False):
            model = model.get_encoder()
    return model.eval()


def _encode_images(model: nn.Module, inputs: Inputs, layer: int) -> ItemRows:
    pixels, frames = split_frames(inputs)
    states = called_on_images(model, pixels, layer)
    if states.dim() == 4:  # maps of features: (N, D, H, W), or (N, H, W, D)
        last = states.shape[1] != states.shape[-1] == _channels(model)
        maps = states if last else states.movedim(1, -1)
        grid: tuple[int, int] | None = (maps.shape[1], maps.shape[2])
        states, length = maps.flatten(1, 2), maps.shape[1] * maps.shape[2]
    else:
        grid, length = _grid(model, states.shape[1], pixels)
    if layer != -1 and states.shape[-1] != _channels(model):
        rule = f"{type(model).__name__} has another width there than at its end"
        raise ConfigError("feature_layer", layer, rule, "Use -1, the encoder's own result")
    rows = states[:, states.shape[1] - length :].flatten(0, 1)
    return ItemRows(rows, [ItemSize(length * count, grid, count) for count in frames])


def _encode_others(main: str, model: nn.Module, inputs: Inputs, layer: int) -> ItemRows:
    states = hidden_state(model, layer, inputs[main])
    return ItemRows(states.flatten(0, 1), [ItemSize(states.shape[1])] * len(states))


def _grid(model: nn.Module, length: int, pixels: Tensor) -> tuple[tuple[int, int] | None, int]:
    """The grid of an image's patches and their number, of `length` rows that may begin with prefix tokens."""
    height, width = pixels.shape[-2:]
    patch = getattr(getattr(model, "timm_model", None), "patch_embed", getattr(model, "config", None))
    if (size := getattr(patch, "patch_size", None)) is not None:
        grid = height // pair(size)[0], width // pair(size)[1]
        if 0 <= length - grid[0] * grid[1] <= _MOST_PREFIX_TOKENS:
            return grid, grid[0] * grid[1]
    rows = math.isqrt(length * height // width)
    return (rows, length // rows) if rows and rows * (length // rows) == length else None, length


def _first_input(model: nn.Module) -> str:
    names = list(inspect.signature(type(model).forward).parameters)
    main = getattr(model, "main_input_name", None)
    return main if main in names else names[1]


def _channels(model: nn.Module) -> int:
    timm, config = getattr(model, "timm_model", None), getattr(model, "config", None)
    known = timm.num_features if timm is not None else getattr(config, "hidden_size", None)
    if known is None and (sizes := getattr(config, "hidden_sizes", None)):
        known = sizes[-1]
    if known is None:
        rule = "The width of its features cannot be told from its configuration"
        raise ConfigError("ModalityEncoder.model", type(model).__name__, rule, "Pass a projector module of your own")
    return known


# --- without a forward on data ---


def _text(config: Any) -> str:
    return json.dumps({**config.to_dict(), "model_type": config.model_type}, sort_keys=True, default=str)


@functools.lru_cache(maxsize=32)
def _bare(text: str) -> nn.Module:
    """The model of a config, without memory."""
    fields = json.loads(text)
    return built_bare(AutoConfig.for_model(fields.pop("model_type"), **fields))


@functools.lru_cache(maxsize=1024)
def _size(text: str, main: str, shape: tuple[int, ...], encode: Callable[..., ItemRows]) -> ItemSize:
    item = {main: torch.empty(1, *shape, device="meta")}
    return encode(_bare(text), item, -1).sizes[0]


def _sizes(main: str, encode: Callable[..., ItemRows], config: Any, inputs: Inputs) -> list[ItemSize]:
    values = inputs[main]
    if main != "pixel_values":
        return [_size(_text(config), main, tuple(values.shape[1:]), encode)] * len(values)
    frames, counts = split_frames(inputs)
    size = _size(_text(config), main, tuple(frames.shape[1:]), encode)
    return [ItemSize(size.length * count, size.grid, count) for count in counts]


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


WAVES = _kind("input_values", _wave_sizes, _wave_rows, _wave_width)
AUDIO_KINDS = {
    "whisper": _kind("input_features", _whisper_sizes, _whisper_rows, attrgetter("d_model")),
    "qwen2_audio_encoder": _kind("input_features", _qwen_audio_sizes, _qwen_audio_rows, attrgetter("d_model")),
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat"), WAVES),
    "phi4_multimodal_audio": _kind("input_features", _conformer_sizes, _conformer_rows, _hidden_size),
}
"""by ``model_type`` of the encoder's config"""


__all__ = ["ItemRows", "ItemSize", "count_rows", "encode", "encoder_of", "input_names", "own_inputs", "width"]

_FROM_PROCESSORS = {
    "attention_mask": MASK,
    "audio_attention_mask": MASK,
    "input_features_mask": MASK,
    "audio_input_features": "input_features",
    "pixel_values_videos": "pixel_values",
    "video_grid_thw": "image_grid_thw",
}
_PARTS = ("vision_model", "visual", "vision_tower", "audio_tower")


def input_names(model_or_config: Any) -> tuple[str, ...]:
    """Return the names of the inputs that an encoder takes; some of them are optional."""
    return _kind_of(model_or_config).names


def own_inputs(model_or_config: Any, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of an encoder from what its image processor or feature extractor returned.

    Names that processors use otherwise are replaced: an audio encoder's ``attention_mask`` becomes
    ``feature_attention_mask``, ``pixel_values_videos`` becomes ``pixel_values``. Fields that it does not take are left
    out.
    """
    names = input_names(model_or_config)
    renamed = {_FROM_PROCESSORS.get(key, key): value for key, value in outputs.items() if key not in names}
    renamed |= {key: value for key, value in outputs.items() if key in names}
    frames = outputs.get("audio_input_features")  # of Phi-4, whose extractor makes no mask for a single item
    if frames is not None and renamed.get(MASK) is None:
        renamed[MASK] = torch.ones(frames.shape[:2], dtype=torch.bool)
    return {name: renamed[name] for name in names if renamed.get(name) is not None}


def encode(model: nn.Module, inputs: Mapping[str, Tensor | None], layer: int = -1) -> ItemRows:
    """Call an encoder and return the rows of features of each item, without padding and prefix tokens.

    Args:
        model: the encoder, with its ``config``.
        inputs: by the names that `input_names` returns; optional ones may be missing or None.
        layer: -1 for the encoder's own result, after its last norm where it has one; -2 for the hidden state that
            enters its last layer, and so on, as transformers counts hidden states.

    Raises:
        ConfigError: an input is missing, or the encoder has no such layer.
    """
    kind = _kind_of(model)
    given = _given(kind, inputs)
    result = kind.encode(model, given, layer)
    expected = sum(size.length for size in result.sizes)
    if len(result.rows) != expected:
        rule = f"{type(model).__name__} returned {len(result.rows)} rows of features, where its inputs tell {expected}"
        fix = "Pass the inputs that belong together, from one call of the encoder's processor"
        raise ConfigError("inputs", {name: tuple(value.shape) for name, value in given.items()}, rule, fix)
    return result


def count_rows(config: Any, inputs: Mapping[str, Tensor | None]) -> list[ItemSize]:
    """Return the size of each item as `encode` does, from the encoder's config and inputs, without a forward."""
    kind = _kind_of(config)
    return kind.sizes(config, _given(kind, inputs))


def width(config: Any) -> int:
    """Return the width D of an encoder's features."""
    return _kind_of(config).width(config)


def encoder_of(model: Any) -> nn.Module:
    """Return the encoder in a model that has more beside it: CLIP's vision model, the encoder of Whisper."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and getattr(model, "decoder", None) is not None:
        return model.get_encoder()
    kind = getattr(config, "model_type", None)
    if kind not in IMAGE_KINDS and kind not in AUDIO_KINDS:
        for holder in (model, getattr(model, "model", None)):
            for name in _PARTS:
                if isinstance(part := getattr(holder, name, None), nn.Module) and hasattr(part, "config"):
                    return encoder_of(part)
    return model


# --- kinds ---


def _kind_of(model_or_config: Any) -> EncoderKind:
    config = getattr(model_or_config, "config", None) if isinstance(model_or_config, nn.Module) else model_or_config
    name = getattr(config, "model_type", "")
    return IMAGE_KINDS.get(name) or AUDIO_KINDS.get(name) or general_kind(model_or_config)


def _given(kind: EncoderKind, inputs: Mapping[str, Tensor | None]) -> Inputs:
    given = {name: value for name in kind.names if (value := inputs.get(name)) is not None}
    for name in kind.required:
        if name not in given:
            rule = f"This encoder takes {', '.join(kind.names)}, of which {', '.join(kind.required)} must be there"
            raise ConfigError("inputs", sorted(inputs), rule, f"Pass {name!r}")
    return given
