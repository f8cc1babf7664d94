"""Which rows of a packed value belong to which sample.

Multimodal batches pack what a sample may hold any number of: the patches of all images lie in a
row along dim 0 of ``pixel_values``, the images themselves along dim 0 of ``image_grid_thw``, and so on for
videos and audio. Nothing in such a tensor says where a sample ends. A field ``<modality>_items`` says how many
items each sample has; without it this module counts the placeholder tokens in ``input_ids``. An *item* is one image,
video or piece of audio (or one tile, where a family packs tiles). It knows field names and token ids, no model's code,
and refuses to guess: unless the counts fit every sample exactly, the batch is refused with the remedy.

Shapes: B batch (samples), S sequence, N items of one kind.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from lightning_mm5d.config.errors import ConfigError

Path = tuple[Hashable, ...]
"""The steps from the root of a batch to a leaf; the last one is the field's name."""

REMEDY = (
    "Give a function that returns a list of batches: microbatching=function of (batch, num_microbatches), in YAML its "
    "import path, or a method split_batch(self, batch, num_microbatches) of the LightningModule; or set "
    'microbatching="loader"'
)

_NAMES = {  # how processors name the fields that travel with each kind of item; the first match decides
    "video": r"_videos$|_per_video$|^video_(grid|second|merge|position|sizes|compression)|^second_per_grid_ts$",
    "image": r"^pixel_|_pixel_values$|^image_(grid|sizes|merge|position|embeds)|^spatial_shapes$|^num_local",
    "audio": r"^(input|audio)_features?(_|$)|^feature_attention_mask$|^(input|audio)_values$",
}
_COUNTS = re.compile(r"(^|_)(counts?|nums?|number|lengths?|lens?|items)(_|$)|^n_")
_SYNONYMS = {"vision": "image", "speech": "audio"}
_TYPE_IDS = {"image": 1, "video": 2, "audio": 3}  # in transformers' ``mm_token_type_ids``


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """Ids of the placeholder tokens that mark items in ``input_ids``; None where a model has no such kind.

    Attributes:
        image: of images.
        video: of videos.
        audio: of pieces of audio.
        named: for modalities that a model names itself, the id and the fields of a batch that its encoder takes.
        required: packed fields without which a model cannot be called: ``pixel_values`` of BLIP-2.
    """

    image: int | None = None
    video: int | None = None
    audio: int | None = None
    named: Mapping[str, tuple[int | None, frozenset[str]]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()


def describe(module: torch.nn.Module) -> PackedTokens:
    """Reads the placeholder ids from the first ``config`` in ``module``'s tree that names each kind.

    Looked for are ``image_token_id`` and ``image_token_index``, likewise for video and audio, on the
    ``config`` attribute of any submodule, outermost first. A submodule with ``encoder_inputs``, which holds for each
    modality the fields of a batch by the names that its encoder has for them, says the names of its modalities.
    """
    token_ids: dict[str, int] = {}
    named: dict[str, tuple[int | None, frozenset[str]]] = {}
    models: list[type[torch.nn.Module]] = []  # of transformers, outermost first; their parts may require more
    for submodule in module.modules():
        config = getattr(submodule, "config", None)
        inputs, ids = getattr(submodule, "encoder_inputs", None), getattr(config, "token_ids", None)
        if isinstance(inputs, Mapping) and isinstance(ids, Mapping):
            named |= {name: (ids.get(name), frozenset(keys.values())) for name, keys in inputs.items()}
        for kind in _NAMES:
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
                if isinstance(value, int):
                    token_ids.setdefault(kind, value)
                    if any(base.__module__.startswith("transformers.") for base in type(submodule).__mro__):
                        models.append(type(submodule))
    arguments = [argument for model in models[:1] for argument in inspect.signature(model.forward).parameters.values()]
    required = frozenset(
        argument.name for argument in arguments if argument.default is argument.empty and kind_of(argument.name)
    )
    return PackedTokens(**token_ids, named=named, required=required)


def kind_of(name: Hashable) -> str | None:
    """``"image"``, ``"video"`` or ``"audio"`` if processors give packed fields this ``name``, else None."""
    return next((kind for kind, pattern in _NAMES.items() if re.search(pattern, str(name))), None)


def is_told(name: Hashable, tokens: PackedTokens) -> bool:
    """Whether the rows of a field of this `name` may be others than one for each sample, or tell so of other fields."""
    text = str(name)
    may_be_packed = kind_of(name) is not None or any(name in fields for _, fields in tokens.named.values())
    return may_be_packed or text == "position_ids" or text.endswith("_items") or bool(_COUNTS.search(text))


def is_table(value: Any) -> bool:
    """Whether a list holds the sizes of items as pairs or triples of numbers: ``image_sizes`` as ``[(336, 672)]``."""
    rows = value if isinstance(value, list | tuple) else ()
    is_row = [isinstance(row, list | tuple) and all(isinstance(size, int) for size in row) for row in rows]
    return bool(is_row) and all(is_row) and {*map(len, rows)} in ({2}, {3})


def packed_rows(fields: Mapping[Path, Any], samples: int, tokens: PackedTokens) -> dict[Path, list[int]]:
    """Tells how many rows of each packed field every sample owns.

    Args:
        fields: the leaves of a batch that have a length (tensors with a dim 0, lists), by path.
        samples: B.
        tokens: the placeholder ids. Where ``mm_token_type_ids`` is among the fields, it serves as well.

    Returns:
        For each field that is packed, B row counts that sum to its length. For images that Idefics pads to one
        row per sample, 0 where the row is all padding, else 1. A field that is not in the result has one row per
        sample, or nothing is known of it.

    Raises:
        ConfigError: a field is packed, but no way of counting fits every sample exactly.
    """
    rows: dict[Path, list[int]] = {}
    by_kind = _members(fields, tokens)
    claimed = {path for members in by_kind.values() for path in members}
    claimed |= {path for path in fields if path[-1:] == ("position_ids",)}  # of text, [3, B, S] by chance as many items
    others = {path: value for path, value in fields.items() if path and path not in claimed and len(value) != samples}
    for kind, members in by_kind.items():
        rows |= {path: [0] * samples for path, value in members.items() if len(value) == 0}
        members = {path: value for path, value in members.items() if len(value) > 0}
        told = _told_items(fields, samples, kind)
        token = tokens.named[kind][0] if kind in tokens.named else getattr(tokens, kind, None)
        masks = _placeholders(fields, samples, kind, token)
        padded = None if told is not None else _padded_per_sample(members, samples)
        if padded is not None and masks and padded.ndim == 5:  # Mllama attends to padding, too
            has_items = masks[0].any(dim=1).long().tolist()
            rows |= {path: has_items for path, value in members.items() if len(value) == samples}
        if not members or padded is not None or (told is None and not masks):
            continue
        tables = [table for value in members.values() if (table := _table(value)) is not None]
        items = len(tables[0]) if tables else min(len(value) for value in members.values())
        tables = [table for table in tables if len(table) == items]
        owned = _items_per_sample(masks, items, tables) if told is None else told if sum(told) == items else None
        if owned is None:
            rule = "fit the placeholders of the samples" if told is None else f"are as many as {told} says"
            raise _cannot_count(kind, members, f"its {items} items {rule}", masks)
        ways = [owned, *(_sum_by(owned, table) for table in tables)]
        triples = [_table(value) for value in members.values() if getattr(value, "shape", ())[1:] == (3,)]
        grids = [table for table in triples if table is not None]
        for path, value in (members | others).items():
            merged = [_shared(_sum_by(owned, grid), len(value)) for grid in grids if path in members]
            fitting = [way for way in ways if sum(way) == len(value)] or [way for way in merged if way is not None]
            fitting += [rows[path]] if path in rows and fitting else []
            if any(way != fitting[0] for way in fitting):
                raise _cannot_count(kind, {path: value}, "there is one way to assign its rows", masks)
            if fitting:
                rows[path] = fitting[0]
    return rows


def counted_ways(fields: Mapping[Path, Any]) -> dict[Path, list[int]]:
    """Return what integers of a batch say of how many rows each sample has: ``counts``, ``num_boxes``, ``n_images``.

    Without such a name they are known as the second of a pair, ``(images, counts)``, inside of the batch.
    """
    ways = {}
    for path, value in fields.items():
        if not isinstance(value, torch.Tensor) or value.ndim != 1 or value.is_floating_point() or not path:
            continue
        owner, step = path[:-1], path[-1]
        is_second = bool(owner) and step == 1 and sum(other[: len(owner)] == owner for other in fields) == 2
        if value.dtype != torch.bool and (is_second or _COUNTS.search(str(step))):
            ways[path] = value.tolist()
    return {path: way for path, way in ways.items() if all(count >= 0 for count in way)}


def ways_of(path: Path, ways: Mapping[Path, list[int]]) -> dict[Path, list[int]]:
    """Return those of `ways`, by the fields that say them, whose names are about the field `path`.

    ``num_images`` is about ``images``, and about ``pixel_values``, which hold images.
    """
    words = _words(path)
    return {counts: way for counts, way in ways.items() if words & _words(counts)}


def asked_ways(path: Path, fields: Mapping[Path, Any], ways: Mapping[Path, list[int]]) -> Collection[list[int]]:
    """Return the counts that may say whose rows a field holds: those of its name, else those of no field's name."""
    others = {counts for other in fields if other not in ways for counts in ways_of(other, ways)}
    unnamed = [way for counts, way in ways.items() if counts not in others]
    return ways_of(path, ways).values() or unnamed or ways.values()


def owns_other_rows(path: Path, value: Any, ways: Mapping[Path, list[int]]) -> bool:
    """Whether samples own other rows than one each of an array that has as many rows as samples by chance.

    Images, [N, C, H, W], do where counts say so, and [N, D] of what is counted. What may be padded to one row a sample
    does not: [B, items, ...] with as many items as a sample has at most, or with one value in place of those it lacks.
    """
    is_image = value.ndim == 4 and "image" in _words(path)
    own_ways = ways_of(path, ways) if value.ndim > 1 and path not in ways else {}
    own_ways = {counts: way for counts, way in own_ways.items() if sum(way) == len(value) and {*way} != {1}}
    return any(is_image or not _is_padded(value, way, _words(path) <= _words(name)) for name, way in own_ways.items())


def _is_padded(value: Any, way: list[int], is_counted: bool) -> bool:
    """Whether the rows of an array may each hold as many items as `way` says, and one value in place of others.

    Args:
        value: [B, items, ...]; or [N, D], with as many rows.
        way: items of each sample.
        is_counted: whether nothing but its rows has the name of what `way` counts.
    """
    if max(way) >= value.shape[1] or not is_counted:
        return max(way) <= value.shape[1]
    rest = torch.cat([torch.as_tensor(row)[count:].flatten() for row, count in zip(value, way, strict=True)])
    return bool(((rest == rest[0]) | rest.isnan()).all())


def _words(path: Path) -> set[str]:
    """The things that a field is about, in the singular, by its name; ``image`` and ``audio`` of all their names."""
    name = str(path[-1]) if path else ""
    words = {word.removesuffix("s") for word in re.split(r"[^a-z]+", _COUNTS.sub("_", name.lower()))}
    topics = {_SYNONYMS.get(word, "audio" if word == "sound" else word) for word in words} | {kind_of(name) or ""}
    return topics - {"", "input", "value"}


def _members(fields: Mapping[Path, Any], tokens: PackedTokens) -> dict[str, dict[Path, Any]]:
    """The fields of each modality that the model names, of each that ``<modality>_items`` names, and of each kind."""
    unclaimed = {path: value for path, value in fields.items() if path}
    told = [str(path[-1]).removesuffix("_items") for path in unclaimed if str(path[-1]).endswith("_items")]
    members: dict[str, dict[Path, Any]] = {}
    for name in dict.fromkeys([*tokens.named, *(n for n in told if _SYNONYMS.get(n, n) not in _NAMES), *_NAMES]):
        if name in tokens.named:
            members[name] = {path: value for path, value in unclaimed.items() if path[-1] in tokens.named[name][1]}
        elif name in _NAMES:
            members[name] = {path: value for path, value in unclaimed.items() if kind_of(path[-1]) == name}
        else:
            members[name] = {path: value for path, value in unclaimed.items() if str(path[-1]).startswith(f"{name}_")}
            members[name] = {path: value for path, value in members[name].items() if path[-1] != f"{name}_items"}
        unclaimed = {path: value for path, value in unclaimed.items() if path not in members[name]}
    return members


def _told_items(fields: Mapping[Path, Any], samples: int, kind: str) -> list[int] | None:
    """What ``<modality>_items`` says: how many items each of the B samples has."""
    names = [f"{name}_items" for name in (kind, *(name for name, other in _SYNONYMS.items() if other == kind))]
    for path, value in fields.items():
        if path and path[-1] in names and len(value) == samples:
            return [int(count) for count in value]
    return None


def _placeholders(fields: Mapping[Path, Any], samples: int, kind: str, token: int | None) -> list[torch.Tensor]:
    """The masks [B, S] that may mark ``kind``'s placeholders, those without any left out."""
    marks = {"mm_token_type_ids": _TYPE_IDS.get(kind), "input_ids": token}
    pairs = [(value, marks[str(path[-1])]) for path, value in fields.items() if path and path[-1] in marks]
    masks = [ids == mark for ids, mark in pairs if mark is not None and isinstance(ids, torch.Tensor)]
    return [mask for mask in masks if mask.ndim == 2 and len(mask) == samples and mask.any()]


def _padded_per_sample(members: Mapping[Path, Any], samples: int) -> torch.Tensor | None:
    """Images that are [B, images, C, H, W], one padded row per sample, as Idefics has them; tiles [..] of Mllama."""
    pixels = next((value for path, value in members.items() if path[-1] == "pixel_values"), None)
    sizes = any(path[-1] == "image_sizes" for path in members)
    is_padded = isinstance(pixels, torch.Tensor) and pixels.ndim >= 5 and len(pixels) == samples and not sizes
    return pixels if is_padded else None


def _table(value: Any) -> list[int] | None:
    """The product of each item's sizes, if ``value`` is a table of those: integers [N], [N, 2] or [N, 3]."""
    if is_table(value):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        return None
    if value.ndim == 2 and value.shape[1] in (2, 3):
        return value.prod(dim=1).tolist()
    return value.tolist() if value.ndim == 1 else None


def _items_per_sample(masks: list[torch.Tensor], items: int, tables: list[list[int]]) -> list[int] | None:
    """How many of the N ``items`` each of the B samples owns, by the surest rule that fits, or None."""
    per_sample = [mask.sum(dim=1).tolist() for mask in masks]
    for count in per_sample:  # as many items as samples with placeholders: one each
        if sum(c > 0 for c in count) == items:
            return [int(c > 0) for c in count]
    for table in tables:  # an item has placeholders in proportion to its size
        for count in per_sample:
            if (owned := _assign(count, table)) is not None:
                return owned
    for mask in masks:  # each run of placeholders is an item
        starts = mask.clone()
        starts[:, 1:] &= ~mask[:, :-1]
        if int(starts.sum()) == items:
            return starts.sum(dim=1).tolist()
    for count in per_sample:  # all items have the same number of placeholders
        if (owned := _assign(count, [1] * items)) is not None:
            return owned
    return None


def _assign(count: list[int], sizes: list[int]) -> list[int] | None:
    """Assigns items in order, item i worth ``sizes[i]`` shares of all placeholders; None unless exact."""
    total, shares = sum(count), sum(sizes)
    if not shares or any(size * total % shares or size <= 0 for size in sizes):
        return None
    worth = [size * total // shares for size in sizes]
    owned, taken = [], 0
    for need in count:
        first = taken
        while need > 0 and taken < len(worth):
            need -= worth[taken]
            taken += 1
        if need:
            return None
        owned.append(taken - first)
    return owned


def _shared(way: list[int], rows: int) -> list[int] | None:
    """``rows`` in proportion to ``way``, as each four patches are merged into one; None unless exact."""
    total = sum(way)
    return None if not total or any(part * rows % total for part in way) else [part * rows // total for part in way]


def _sum_by(owned: list[int], sizes: list[int]) -> list[int]:
    """The rows of each sample when item i has ``sizes[i]`` of them."""
    return [sum(sizes[start:end]) for start, end in pairwise(accumulate(owned, initial=0))]


def _cannot_count(kind: str, members: Mapping[Path, Any], rule: str, masks: list[torch.Tensor]) -> ConfigError:
    return ConfigError(
        "batch",
        {str(path[-1]): tuple(getattr(value, "shape", (len(value),))) for path, value in members.items()},
        f"A batch is split only if {rule}"
        + (f" (its samples hold {masks[-1].sum(dim=1).tolist()} {kind} tokens)" if masks else ""),
        REMEDY,
    )
