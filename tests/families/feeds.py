"""Batches for any family, found by what its forward takes: text, placeholder tokens, pixels, patches and sounds.

Names of arguments say what a model eats; shapes that they leave open are tried one after the other until a forward
gives a finite loss that depends on every input. How many placeholder tokens an image or a clip needs is what the
model's own `get_image_features` and its like return for it. Every sample has the same number of labels, so that the
loss of a batch is the mean of the losses of its equal parts.

Shapes: B samples, S tokens, P patches, C channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

Batch = dict[str, Any]

LABELS, FIRST_TEXT_ID, VOCABULARY = 6, 16, 64
VISION_START, VISION_END = 6, 7
METHODS = {"image": "get_image_features", "audio": "get_audio_features", "video": "get_video_features"}
PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index", "img_token_id", "image_pad_token_id"),
    "audio": ("audio_token_id", "audio_token_index", "speech_token_id", "speech_token_index"),
    "video": ("video_token_id", "video_token_index"),
}


def arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configuration and those of its parts."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)


def first(config: PreTrainedConfig, names: tuple[str, ...], default: Any = None) -> Any:
    """The first value that the configuration or one of its parts has under one of the names."""
    for part in parts_of(config):
        part.allow_global_per_layer_attribute_access = True
        for name in names:
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return default


def number(value: Any) -> int:
    return number(value[-1]) if isinstance(value, list | tuple) else int(value)


def images(config: PreTrainedConfig, takes: set[str], samples: int) -> Iterator[Batch]:
    """Arguments that bring one image to each sample."""
    seen = [part for part in parts_of(config) if getattr(part, "patch_size", None) is not None] or [config]
    size = number(first(seen[0], ("image_size",), first(config, ("image_size",), 16)))
    patch = number(getattr(seen[0], "patch_size", 4))
    frames = number(first(config, ("temporal_patch_size", "patch_temporal"), 1))
    channels = 3
    for key in sorted(takes & {"pixel_values", "flattened_patches", "image_pixel_values"}):
        if "image_grid_thw" in takes:
            grid = {"image_grid_thw": torch.tensor([[1, 4, 4]] * samples)}
            if "image_merge_sizes" in takes:
                grid["image_merge_sizes"] = torch.tensor([2] * samples)
            for deep in dict.fromkeys((frames, 1)):
                yield {key: torch.randn(16 * samples, channels * deep * patch * patch)} | grid
                yield {key: torch.randn(16 * samples, channels, patch, patch)} | grid
                yield {key: torch.randn(16 * samples, channels, deep, patch, patch)} | grid
        if key == "flattened_patches":
            places = torch.stack(torch.meshgrid(torch.arange(1, 5), torch.arange(1, 5), indexing="ij"), -1).view(16, 2)
            wide = torch.randn(samples, 16, channels * patch * patch)
            yield {key: torch.cat([places.expand(samples, 16, 2).to(wide), wide], -1)}
        extras: list[Batch] = [{}]
        if "image_sizes" in takes:
            extras.insert(0, {"image_sizes": torch.tensor([[size, size]] * samples)})
        if "spatial_shapes" in takes:
            shapes = {"spatial_shapes": torch.tensor([[4, 4]] * samples)}
            wide = torch.randn(samples, 16, channels * patch * patch)
            yield {key: wide, "pixel_attention_mask": torch.ones(samples, 16).long()} | shapes
        if "image_position_ids" in takes:
            places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).view(1, 16, 2)
            yield {
                key: torch.randn(samples, 16, channels * patch * patch),
                "image_position_ids": places.repeat(samples, 1, 1),
            }
        if "image_patches" in takes:
            yield {key: torch.randn(samples, 16, channels * patch * patch)}
        for extra in extras:
            for shape in ((samples,), (samples, 1), (samples, 2), (samples, 1, 1)):
                for side in dict.fromkeys((size, 4 * patch, 32, 64)):
                    yield {key: torch.randn(*shape, channels, side, side)} | extra


def sounds(config: PreTrainedConfig, takes: set[str], samples: int) -> Iterator[Batch]:
    """Arguments that bring one clip to each sample."""
    names = ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_dim", "input_size")
    bins = number(first(config, names, 8))
    frames = 2 * number(first(config, ("max_source_positions",), 16))
    masks = takes & {"input_features_mask", "feature_attention_mask", "padding_mask"}
    for key in sorted(takes & {"input_features", "audio_input_features"}):
        for length, shape in product(
            dict.fromkeys((frames, 32, 64)),
            ("bt", "tb", "1bt", "1tb"),
        ):
            order = {"bt": (bins, length), "tb": (length, bins), "1bt": (1, bins, length), "1tb": (1, length, bins)}
            seen = {mask: torch.ones(samples, length).long() for mask in masks}
            yield {key: torch.randn(samples, *order[shape])} | seen
            if masks:  # some masks are of features, not of frames
                yield {key: torch.randn(samples, *order[shape])}
    if "input_values" in takes:
        masks = takes & {"padding_mask"}
        for length in (400, 1600, 6400):
            seen = {mask: torch.ones(samples, length).long() for mask in masks}
            yield {"input_values": torch.randn(samples, length)} | seen
            yield {"input_values": torch.randn(samples, 1, length)} | seen


def videos(config: PreTrainedConfig, takes: set[str], samples: int) -> Iterator[Batch]:
    size = number(first(config, ("image_size",), 16))
    frames = number(first(config, ("num_frames",), 2))
    for count in dict.fromkeys((frames, 2, 4)):
        yield {"pixel_values_videos": torch.randn(samples, count, 3, size, size)}


def method(model: nn.Module, kind: str) -> Any:
    for part in (model, getattr(model, "model", None), getattr(model, "vlm", None)):
        if part is not None and hasattr(part, METHODS[kind]):
            return getattr(part, METHODS[kind])
    return None


def rows(found: Any) -> int:
    """How many features a `get_..._features` returned."""
    for name in ("pooler_output", "last_hidden_state"):
        if getattr(found, name, None) is not None:
            found = getattr(found, name)
            break
    if isinstance(found, Tensor):
        return found[..., 0].numel()
    return sum(rows(one) for one in found)


def text(samples: int, counts: dict[int, int], takes: set[str]) -> Batch:
    """Tokens with `counts` placeholders (id -> number) in each sample, each kind between a start and an end."""
    length = 2 + sum(count + 2 for count in counts.values()) + 2 + LABELS
    ids = torch.randint(FIRST_TEXT_ID, VOCABULARY, (samples, length))
    kinds, at = torch.zeros(samples, length, dtype=torch.int), 1
    for kind, (placeholder, count) in enumerate(counts.items(), 1):
        ids[:, at], ids[:, at + 1 + count] = VISION_START, VISION_END
        ids[:, at + 1 : at + 1 + count] = placeholder
        kinds[:, at + 1 : at + 1 + count] = kind
        at += count + 2
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for key in ("token_type_ids", "mm_token_type_ids"):
        if key in takes:
            batch[key] = kinds.long()
    return batch


def labels(batch: Batch, samples: int) -> Iterator[Batch]:
    """Labels of tokens, of a target, of a sample."""
    if "input_ids" in batch:
        marked = batch["input_ids"].clone()
        marked[:, :-LABELS] = -100
        yield {"labels": marked}
    yield {"labels": torch.randint(FIRST_TEXT_ID, VOCABULARY, (samples, LABELS))}
    yield {"labels": torch.randint(0, 2, (samples,))}
    yield {"labels": torch.rand(samples, 2)}


def candidates(model: nn.Module, samples: int) -> Iterator[Batch]:
    """Batches that the model might take, likely ones first."""
    config: Any = model.config
    takes = arguments(type(model).forward)
    given = [list(kind(config, takes, samples)) for kind in (images, sounds)]
    if not given[0] and not given[1] and "pixel_values_videos" in takes:
        given.append(list(videos(config, takes, samples)))
    kinds = [kind for kind in given if kind]
    if not kinds:
        yield from _with_text(model, takes, {}, samples)
        return
    # what an encoder itself refuses is not tried with text
    usable = [[one for one in kind if _encoded(model, one, samples) is not None] for kind in kinds]
    usable = [kind for kind in usable if kind] or kinds
    if len(usable) == 2 and not any("input_features" in one for one in usable[1]):
        usable = usable[:1]
    for combination in product(*usable):
        inputs = {key: value for one in combination for key, value in one.items()}
        yield from _with_text(model, takes, inputs, samples)


def _encoded(model: nn.Module, inputs: Batch, samples: int) -> dict[int, int] | None:
    """Placeholder ids and how many of each a sample has for `inputs`; None where the encoder refuses them."""
    config: Any = model.config
    counts: dict[int, int] = {}
    for kind in METHODS:
        keys = {"image": "pixel_values", "audio": "input_", "video": "pixel_values_videos"}[kind]
        if not any(key == keys or (kind == "audio" and key.startswith(keys)) for key in inputs):
            continue
        encode, placeholder = method(model, kind), first(config, PLACEHOLDERS[kind])
        if encode is None or placeholder is None:
            continue
        known = arguments(encode)
        known = set(inputs) if known & {"args", "kwargs"} else known
        chosen = {key: value for key, value in inputs.items() if key in known}
        if kind == "audio" and "attention_mask" in known and "feature_attention_mask" not in known:
            masks = [value for key, value in inputs.items() if key.endswith("mask") and key not in chosen]
            chosen |= dict(zip(["attention_mask"], masks, strict=False))
        try:
            with torch.no_grad():
                counts[number(placeholder)] = rows(encode(**chosen)) // samples
        except Exception:
            return None
    return counts


def _with_text(model: nn.Module, takes: set[str], inputs: Batch, samples: int) -> Iterator[Batch]:
    counts = _encoded(model, inputs, samples)
    if counts is None:
        return
    bodies = []
    if "input_ids" in takes:
        bodies.append(text(samples, counts, takes) | inputs)
    if not counts and inputs:
        bodies.append(inputs)
    for body in bodies:
        if "labels" in takes:
            for label in labels(body, samples):
                yield body | label
        elif "decoder_input_ids" in takes:
            yield body | {"decoder_input_ids": torch.randint(FIRST_TEXT_ID, VOCABULARY, (samples, LABELS))}
        else:
            yield body


def loss_of(result: Any) -> Tensor:
    """The loss of a model's output, else a number that depends on all that it returns."""
    loss = getattr(result, "loss", None)
    if loss is not None:
        return loss
    tensors = [value for value in result.values() if isinstance(value, Tensor) and value.is_floating_point()]
    return torch.stack([(v * torch.linspace(-1, 1, v.shape[-1])).square().mean() for v in tensors]).sum()


def suits(model: nn.Module, batch: Batch, fixed: Batch) -> str:
    """Why the batch does not suit the model: an error, a loss that is not finite or ignores an input."""
    floats = {key: value.clone().requires_grad_() for key, value in batch.items() if value.is_floating_point()}
    try:
        with torch.no_grad():
            loss = loss_of(model(**batch, **fixed))
        if not loss.isfinite():
            return "the loss is not finite"
        ignored = without_gradient(model, batch, floats, fixed)
        for key in ignored:  # an input that becomes tokens has no gradient
            with torch.no_grad():
                other = loss_of(model(**(batch | {key: torch.randn_like(batch[key])}), **fixed))
            if torch.equal(loss, other):
                return f"the loss does not depend on {key}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without_gradient(model: nn.Module, batch: Batch, floats: Batch, fixed: Batch) -> list[str]:
    """Inputs that the loss has no gradient of, or all of them where the model refuses inputs that take one."""
    try:
        loss = loss_of(model(**(batch | floats), **fixed))
        gradients = torch.autograd.grad(loss, list(floats.values()), allow_unused=True) if floats else ()
    except RuntimeError:
        return list(floats)
    return [key for key, one in zip(floats, gradients, strict=True) if one is None or not one.abs().max() > 0]


def feed(model: nn.Module, fixed: Batch, samples: int, more: Callable[[Batch], Batch], *, tries: int = 200) -> Batch:
    """The first candidate that suits; an error that names why the likeliest one does not, where none does.

    Args:
        model: what is fed.
        fixed: arguments of every call.
        samples: B.
        more: gives a candidate the arguments that are this family's own.
        tries: how many candidates to try.
    """
    why: list[str] = []
    for _, candidate in zip(range(tries), candidates(model, samples), strict=False):
        try:
            batch = more(candidate)
        except KeyError:  # a candidate without what the family's own arguments go with
            continue
        reason = suits(model, batch, fixed)
        if not reason:
            return batch
        why.append(reason)
    raise ValueError(f"no batch suits: {why[0] if why else 'its encoder takes none of the inputs that were tried'}")
