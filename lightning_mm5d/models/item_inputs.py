"""Runs images, sounds and other items through their processors, one item at a time, and joins the results.

Each item is processed alone, so that what an encoder sees of it does not depend on its neighbours in a batch. Results
of unlike shapes are padded at the end where a mask or sizes among them tell which part is real, and refused elsewhere.

Shapes: N items of a batch, F frames of a video, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import FeatureExtractionMixin, ImageProcessingMixin, ProcessorMixin
from transformers.video_processing_utils import BaseVideoProcessor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.encoder_kinds import input_names, own_inputs
from lightning_mm5d.models.media import read_item

Values = dict[str, Tensor]
Processor = Callable[..., Any]

_TELL_REAL_PARTS = ("mask", "sizes", "shapes", "num_frames", "lengths")


def plain_processor(name: str, processor: Any) -> Processor:
    """The image processor, video processor or feature extractor in `processor`, or the function that it is.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(processor, ProcessorMixin):  # CLIP's, Whisper's: it has a tokenizer beside
        parts = [getattr(processor, part, None) for part in ("image_processor", "feature_extractor", "video_processor")]
        processor = next((part for part in parts if part is not None), None)
    if not callable(processor):
        rule = "Items go through an image processor, a video processor or a feature extractor of transformers, or a "
        rule += "function of a list of items"
        raise ConfigError(f"processors[{name!r}]", processor, rule, "Use AutoImageProcessor or AutoFeatureExtractor")
    return processor


def item_values(name: str, processor: Processor, config: Any, value: Any, frames: int | None = None) -> Values:
    """One item as its encoder takes it, under the encoder's own names.

    Args:
        name: of the modality, for errors.
        processor: of the modality.
        config: of the encoder.
        value: a path or an item.
        frames: at most so many of a video.

    Raises:
        ConfigError: the file cannot be read, or the processor gives nothing that the encoder takes.
    """
    item = read_item(value, sampling_rate=getattr(processor, "sampling_rate", None), frames=frames)
    names = input_names(config)
    is_video = isinstance(processor, ImageProcessingMixin) and _is_video(item)
    found = _called(processor, list(item) if is_video else [item])
    values = {key: torch.as_tensor(part) for key, part in own_inputs(config, found).items()}
    if not values:
        rule = f"Its processor returned {sorted(found)}, of which the encoder takes none ({', '.join(names)})"
        raise ConfigError(name, type(processor).__name__, rule, "Use the processor of the encoder's own family")
    if is_video and "num_frames" in names:  # [F, C, H, W] of one item
        pixels = values["pixel_values"]
        values = {**values, "pixel_values": pixels.unsqueeze(0), "num_frames": torch.tensor([len(pixels)])}
    return values


def joined(name: str, values: Sequence[Values], padding_value: float = 0.0) -> Values:
    """What the encoder takes of all items together: one after the other along dim 0.

    Args:
        name: of the modality, for errors.
        values: of each item or group of items, under the same names.
        padding_value: for floating point values.

    Raises:
        ConfigError: items differ in shape, and nothing tells how large each is.
    """
    keys = {key for value in values for key in value}
    for key in keys:
        if any(key not in value for value in values):
            rule = f"Its processor returned {key} for some items and not for others"
            raise ConfigError(name, sorted(keys), rule, "Use one processor and one kind of item for a modality")
    tell = any(key.endswith(_TELL_REAL_PARTS) for key in keys)
    return {key: _stacked(name, key, [value[key] for value in values], padding_value, tell) for key in keys}


def _stacked(name: str, key: str, parts: list[Tensor], padding_value: float, tell: bool) -> Tensor:
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) == 1:
        return torch.cat(parts)
    if not tell or len({len(shape) for shape in shapes}) > 1:
        rule = f"Items of a batch differ in the shape of {key}, and no mask or sizes tell their real parts"
        fix = "Let the processor resize or pad all items to one size"
        raise ConfigError(name, sorted(tuple(shape) for shape in shapes), rule, fix)
    full = [max(sizes) for sizes in zip(*shapes, strict=True)]
    fill = padding_value if parts[0].is_floating_point() else 0
    padded = []
    for part in parts:
        result = part.new_full((len(part), *full), fill)
        result[tuple(slice(size) for size in part.shape)] = part
        padded.append(result)
    return torch.cat(padded)


def _called(processor: Processor, items: list[Any]) -> Mapping[str, Any]:
    if isinstance(processor, BaseVideoProcessor):
        return dict(processor(videos=items, return_tensors="pt"))
    if isinstance(processor, ImageProcessingMixin):
        return dict(processor(images=items, return_tensors="pt"))
    if isinstance(processor, FeatureExtractionMixin):
        _check_sound(processor, items[0])
        options = {"sampling_rate": getattr(processor, "sampling_rate", None), "return_attention_mask": True}
        return dict(processor(items[0], return_tensors="pt", **options))
    return dict(processor(items))


def _check_sound(processor: Any, sound: Any) -> None:
    """Refuse what a feature extractor would take for several sounds, or of which it would leave out the end."""
    shape = tuple(getattr(sound, "shape", (len(sound),)))
    limit = getattr(processor, "n_samples", None)
    if len(shape) != 1 or shape[0] == 0:
        fix = "Take the mean over its channels, or remove it"
        raise ConfigError("sound", shape, "A sound is one row of samples", fix)
    if limit is not None and shape[0] > limit:
        rule = f"Its feature extractor leaves out what is beyond {limit} samples"
        raise ConfigError("sound", shape, rule, "Cut the sound into several, or set a longer chunk_length")


def _is_video(item: Any) -> bool:
    return isinstance(item, list | tuple) or (getattr(item, "ndim", 0) == 4)
