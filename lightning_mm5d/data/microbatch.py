"""Cuts a batch into microbatches.

A batch is any nesting of mappings (``BatchEncoding`` included), lists, tuples, named tuples and dataclasses.
Tensors and lists with one row per sample are cut into views, packed fields by the samples that own their rows
(see ``packed``), and anything without a length is repeated. It knows nothing of ranks or of the model, and
refuses a batch in which the number of samples, or the owner of a row, would have to be guessed.

Microbatches hold samples in the order of the batch, or those that a `Dealer` gives them.

Shapes: B batch (samples), M microbatches, S sequence.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from weakref import ref

import torch

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.lazy import LazyTensor, Waiting, on_device
from lightning_mm5d.data.packed_images import (
    REMEDY,
    PackedTokens,
    Path,
    asked_ways,
    counted_ways,
    is_table,
    is_told,
    kind_of,
    owns_other_rows,
    packed_rows,
)
from lightning_mm5d.data.random_state import seeded
from lightning_mm5d.layout.layout import even_lengths

# Where tensors disagree on dim 0, the first of these names on which they do agree says what a sample is.
_SAMPLE_WISE = (
    *("input_ids", "inputs_embeds", "decoder_input_ids", "labels", "attention_mask"),
    *("pixel_values", "input_features", "input_values"),
)


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Some samples of a batch, in a container of the batch's own type.

    Attributes:
        batch: the samples.
        samples: their number; 1 where it is not known.
        is_counted: whether it is known.
        places: where in the batch its samples stand; None where they follow those of the microbatch before.
    """

    batch: Any
    samples: int
    is_counted: bool = True
    places: tuple[int, ...] | None = None


class Owned(NamedTuple):
    """What each of the B samples has of a packed kind.

    Attributes:
        rows: how many rows.
        pairs: how many pairs of rows attend to each other: those of an image, or of each frame of a video, where a
            table of ``(frames, height, width)`` tells them; else 0.
    """

    rows: list[int]
    pairs: list[int]


Dealer = Callable[[Mapping[str, Owned], Sequence[int]], "list[list[int]] | None"]
"""Deals the samples of a batch out to microbatches.

Takes what every sample owns of each packed kind, ``{"image": Owned([2, 0, 5], [0, 0, 0])}``, and the sizes of the
microbatches; returns the samples of each, in rising order; None leaves the order of the batch.
"""


_Rows = tuple[tuple[Hashable, ...], int, int | None, int]
"""names of fields, their rows, and how many microbatches there are or how large they are"""
Ends = dict[_Rows, "list[int] | None"]
"""where batches with one row for each sample are cut; None for those whose rows must be looked at"""


class _Cut(NamedTuple):
    """Where one leaf is cut: part m is ``[bounds[m], bounds[m + 1])`` along ``dim``, a microbatch or a sample.

    A part without items, counted by ``[items[m], items[m + 1])``, is None: of packed rows, or of nothing but padding.
    """

    dim: int
    bounds: list[int]
    items: list[int] | None = None

    def at(self, ends: Sequence[int]) -> _Cut:
        """Return the cut into parts that end at these parts of this one."""
        items = None if self.items is None else [self.items[end] for end in ends]
        return self._replace(bounds=[self.bounds[end] for end in ends], items=items)


def batch_samples(batch: Any) -> int | None:
    """The number of samples B: the size that dim 0 of all tensors, or of the text tensors, has.

    A list of tensors of unequal lengths counts as one with as many rows as tensors; so does a list with as many
    elements as all tensors outside of lists have rows, as of the images of each sample, and so do lists of one length
    beside each other (images, and dicts of what is seen in each), and a list of dicts that are no batches by
    themselves. Where some tensors have a row for each item of a sample, and integers say how many these are, it is the
    number of those (`counted_ways`).

    Returns:
        None where tensors disagree and no field's name decides, and where nothing has a length.
    """
    if _lists_dicts(batch):
        return len(batch)
    arrays = {path: value for path, value in leaves(batch) if is_array(value) or _is_ragged(value)}
    sizes = {len(value) for value in arrays.values()}
    parts = [part for _, part in children_of(batch) or () if _has_length(part)]
    if len(sizes) > 1 or any(map(_lists_samples, parts)):
        outside = {len(value) for path, value in arrays.items() if not any(isinstance(step, int) for step in path)}
        outside = outside or {*map(len, parts)}
        for size in outside if len(outside) == 1 else ():
            if all(len(value) == size for _, value in leaves(batch, size) if _has_length(value)):
                return size
    for name in _SAMPLE_WISE:
        of_name = {len(value) for path, value in arrays.items() if path[-1:] == (name,)}
        if len(of_name) == 1:
            return of_name.pop()
    sizes = sizes or {len(value) for _, value in leaves(batch) if is_plain_sequence(value)}
    if len(sizes) > 1:
        counts = {len(way) for way in counted_ways(arrays).values() if sizes <= {len(way), sum(way)}}
        return counts.pop() if len(counts) == 1 else None
    return sizes.pop() if len(sizes) == 1 else None


def counted(batch: Any, samples: int | None) -> Microbatch:
    """Return a microbatch of so many samples; None where their number is not known."""
    return Microbatch(batch, 1 if samples is None else samples, is_counted=samples is not None)


def part_samples(parts: Sequence[Any], batch: Any) -> list[int | None]:
    """The number of samples of each part that a function made of ``batch``, as `batch_samples` counts them.

    Where that is not known, the lengths of what the function cut tell it, tensors and lists, if all of these agree.

    Args:
        parts: of the batch.
        batch: that was cut.
    """
    counts = [batch_samples(part) for part in parts]
    if None not in counts:
        return counts
    lengths = set(_cut_lengths(batch, parts))
    whole, *cut = lengths.pop() if len(lengths) == 1 else (0,)
    return [*cut] if whole and sum(cut) == whole else counts


def _cut_lengths(batch: Any, parts: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """Yield the lengths, of the batch and of each part, of all that is shorter in a part."""
    if all(_has_length(node) for node in (batch, *parts)):
        lengths = tuple(len(node) for node in (batch, *parts))
        if len(set(lengths)) > 1:
            yield lengths
            return
    children = [dict(children_of(node) or ()) for node in (batch, *parts)]
    for step in children[0]:
        if all(step in others for others in children[1:]):
            yield from _cut_lengths(children[0][step], [others[step] for others in children[1:]])


def split(
    batch: Any,
    num_microbatches: int | None = None,
    *,
    size: int = 1,
    image_tokens: PackedTokens | None = None,
    dealer: Dealer | None = None,
    known: Ends | None = None,
) -> list[Microbatch]:
    """Cuts ``batch`` into M microbatches whose sizes differ by at most one sample, or into ones of ``size`` samples.

    Of M the larger ones come first; of a size the last has what is left.

    Tensors become views. A packed field of which a microbatch owns no rows (``pixel_values`` where no sample
    has an image) is None there, or has no rows where the model cannot be called without it (BLIP-2), and one of Idefics
    that has nothing but padding there is None. A packed field is known
    by the name that processors give it; one of another name that happens to have B rows is taken to have one row per
    sample.

    Args:
        batch: a nesting of containers with B samples.
        num_microbatches: M, at least 1; None where microbatches have a size.
        size: samples of each microbatch but the last, where M is None.
        image_tokens: placeholder ids by which packed images, videos and audio are assigned to samples.
        dealer: says which samples each microbatch has; without it these follow each other. Tensors are then copied.
        known: remembers where batches of one structure are cut, from call to call.

    Returns:
        min(B, M) microbatches, or ceil(B / size). One microbatch is the batch itself, whatever is in it.

    Raises:
        ConfigError: there are no samples, tensors disagree on their number, or packed rows cannot be assigned exactly.
    """
    if num_microbatches is not None and num_microbatches < 1:
        raise ConfigError("batching.num_microbatches", num_microbatches, "It counts microbatches", "Use 1 or more")
    if known is not None and dealer is None:
        key = _of_rows(batch, num_microbatches, size)
        if key is not None and key not in known:
            names, count, *_ = key
            told = any(is_told(name, image_tokens or PackedTokens()) for name in names)
            known[key] = None if told else _ends(count, num_microbatches, size)
        if key is not None and (ends := known[key]) is not None and len(ends) > 2:
            pairs = pairwise(ends)
            return [Microbatch({name: x[a:b] for name, x in batch.items()}, b - a) for a, b in pairs]
    samples = batch_samples(batch)
    if samples == 0:
        rule = "A batch has at least one sample"
        raise ConfigError("batch", "0 samples", rule, "Use drop_last=True, or a sampler that gives no empty batch")
    if num_microbatches == 1 or (num_microbatches is None and samples is not None and samples <= size):
        return [counted(batch, samples)]
    if samples is None and not any(_has_length(value) for _, value in leaves(batch)):
        rule = "A batch that is split into microbatches holds tensors or lists with one row per sample"
        raise ConfigError("batch", batch, rule, REMEDY)
    if samples is None:
        rule = "The tensors of a batch must agree on dim 0, or some must have names such as input_ids"
        raise _disagreement(dict(leaves(batch)), rule)
    if _may_list_images(batch):
        rule = "Dicts in a list may be samples with images [C, H, W], or batches of several dataloaders"
        raise _disagreement(dict(leaves(batch)), rule)
    ends = _ends(samples, num_microbatches, size)
    cuts = _plan(batch, samples, ends if dealer is None else [*range(samples + 1)], image_tokens or PackedTokens())
    if dealer is not None:
        sizes = [end - start for start, end in pairwise(ends)]
        dealt = dealer(_packed_sizes(batch, cuts), sizes)
        if dealt is not None:
            return [Microbatch(_taken(batch, cuts, _rows_of(deal)), len(deal), places=tuple(deal)) for deal in dealt]
        cuts = {path: cut.at(ends) for path, cut in cuts.items()}
    return [Microbatch(_taken(batch, cuts, _part(m)), end - start) for m, (start, end) in enumerate(pairwise(ends))]


def _ends(samples: int, num_microbatches: int | None, size: int) -> list[int]:
    """Where microbatches begin and end: ``[0, 3, 5]`` of 5 samples in two."""
    if num_microbatches is None:
        return [*range(0, samples, size), samples]
    return list(accumulate(even_lengths(samples, min(samples, num_microbatches)), initial=0))


def _of_rows(batch: Any, num_microbatches: int | None, size: int) -> _Rows | None:
    """Return what decides where a dict of tensors with equal numbers of rows is cut; None of any other batch."""
    if type(batch) is not dict:
        return None
    lengths = {len(x) if type(x) is torch.Tensor and x.ndim else 0 for x in batch.values()}
    return (tuple(batch), lengths.pop(), num_microbatches, size) if len(lengths) == 1 and 0 not in lengths else None


def joined_parts(batch: Any, parts: Sequence[Microbatch], image_tokens: PackedTokens) -> Microbatch:
    """Returns the first microbatches of a batch, as `split` has made them, as one.

    Args:
        batch: as for `split`.
        parts: the first ones.
        image_tokens: as for `split`.
    """
    samples, count = batch_samples(batch), sum(part.samples for part in parts)
    if samples is None or samples <= count:
        return counted(batch, samples)
    places = [place for part in parts for place in part.places or ()]
    if not places:
        return Microbatch(_taken(batch, _plan(batch, samples, [0, count, samples], image_tokens), _part(0)), count)
    cuts = _plan(batch, samples, [*range(samples + 1)], image_tokens)
    return Microbatch(_taken(batch, cuts, _rows_of(places)), count, places=tuple(places))


def _packed_sizes(batch: Any, cuts: Mapping[Path, _Cut]) -> dict[str, Owned]:
    """What every sample owns of each kind, by its field with the most elements: of patches, frames, texts."""
    largest: dict[str, tuple[int, list[int]]] = {}
    tables: list[list[list[list[int]]]] = []  # [B][items][frames, height, width]
    for path, value in leaves(batch):
        cut = cuts.get(path)
        if cut is None or cut.dim or not (is_array(value) or _is_ragged(value)):
            continue
        is_ragged = not is_array(value)
        rows = [len(sample) for sample in value] if is_ragged else [end - start for start, end in pairwise(cut.bounds)]
        if type(value) is torch.Tensor and value.shape[1:] == (3,) and not value.is_floating_point():
            sizes = value.tolist()
            tables.append([sizes[start:end] for start, end in pairwise(cut.bounds)])
        if len({*rows}) > 1:
            kind = (kind_of(path[-1]) if path else None) or str(path)
            elements = sum(rows) * math.prod((value[0] if is_ragged else value).shape[1:])
            largest[kind] = max(largest.get(kind, (0, rows)), (elements, rows))
    return {kind: Owned(rows, _pairs(rows, tables)) for kind, (_, rows) in largest.items()}


def _pairs(rows: list[int], tables: list[list[list[list[int]]]]) -> list[int]:
    """The pairs of rows within a frame of each sample, by the table whose items have as many rows as the samples."""
    for table in tables:
        if [sum(math.prod(size) for size in items) for items in table] == rows:
            return [sum(frames * (height * width) ** 2 for frames, height, width in items) for items in table]
    return [0] * len(rows)


def _taken(node: Any, cuts: Mapping[Path, _Cut], take: Callable[[Any, _Cut], Any], path: Path = ()) -> Any:
    """Return a batch with what `take` gives of each leaf that is cut."""
    if (cut := cuts.get(path)) is not None:
        return take(node, cut)
    children = children_of(node)
    if not children:
        return node
    return rebuilt(node, [_taken(child, cuts, take, (*path, step)) for step, child in children])


def _part(number: int) -> Callable[[Any, _Cut], Any]:
    """Take the part `number` of a leaf, as a view."""

    def take(node: Any, cut: _Cut) -> Any:
        start, end = cut.bounds[number], cut.bounds[number + 1]
        if cut.items is not None and cut.items[number] == cut.items[number + 1]:
            return None
        if isinstance(node, LazyTensor) and cut.dim == 0:
            return node.rows(start, end)
        return node[:, start:end] if cut.dim == 1 else node[start:end]

    return take


def _rows_of(samples: Sequence[int]) -> Callable[[Any, _Cut], Any]:
    """Take the rows of the given samples of a leaf that is cut into single ones."""

    def take(node: Any, cut: _Cut) -> Any:
        rows = [row for sample in samples for row in range(cut.bounds[sample], cut.bounds[sample + 1])]
        if cut.items is not None and all(cut.items[sample] == cut.items[sample + 1] for sample in samples):
            return None
        if is_plain_sequence(node):
            return type(node)(node[row] for row in rows)
        if isinstance(node, torch.Tensor):
            index = torch.tensor(rows, dtype=torch.int64, device="cpu")
            if isinstance(node, Waiting):
                return node.chosen(index, cut.dim)
            return node.index_select(cut.dim, on_device(index, node.device))
        return node[:, rows] if cut.dim == 1 else node[rows]

    return take


def split_each(
    batch: Any, num_microbatches: int, samples: Sequence[int], *, image_tokens: PackedTokens
) -> list[Microbatch]:
    """Cuts the batches of several dataloaders, which hold unlike numbers of samples, each by itself.

    Args:
        batch: holds a batch, or None, for each dataloader.
        num_microbatches: M, at least 2.
        samples: of the batches that are there.
        image_tokens: as for `split`.

    Returns:
        M microbatches, each with an equal share of every batch.

    Raises:
        ConfigError: some batch does not divide into M equal parts, so that its mean would not be that of its parts.
    """
    if uneven := [count for count in samples if count % num_microbatches]:
        rule = (
            f"Batches of several dataloaders with unlike numbers of samples are split into equal parts, and one has "
            f"{uneven[0]} samples"
        )
        fix = "Use batch sizes that it divides, and drop_last=True. " + REMEDY
        raise ConfigError("batching.num_microbatches", num_microbatches, rule, fix)
    parts = [
        [value] * num_microbatches
        if value is None
        else [part.batch for part in split(value, num_microbatches, image_tokens=image_tokens)]
        for _, value in children_of(batch) or ()
    ]
    share = samples[0] // num_microbatches
    return [Microbatch(rebuilt(batch, list(values)), share) for values in zip(*parts, strict=True)]


def with_tensors(batch: Any, function: Callable[[Path, torch.Tensor], torch.Tensor], path: Path = ()) -> Any:
    """Returns ``batch`` with what ``function`` returns of its tensors and their paths; itself where nothing changes."""
    if isinstance(batch, torch.Tensor):
        return function(path, batch)
    children = children_of(batch)
    if not children:
        return batch
    values = [with_tensors(child, function, (*path, step)) for step, child in children]
    if all(value is child for value, (_, child) in zip(values, children, strict=True)):
        return batch
    return rebuilt(batch, values)


def copied(batch: Any) -> Any:
    """Return ``batch`` with new containers of the same tensors and other leaves."""
    children = children_of(batch)
    return rebuilt(batch, [copied(child) for _, child in children]) if children else batch


class RepeatedItems(Iterator):
    """Gives the items of an iterator from a place on, which are taken once for a batch; after it, what is left.

    The first run of a step gets an item as it is, later ones a copy as it was.

    Args:
        source: the iterator.
        draws: lives as long as the batch; has its ``items`` by the id of this object, and its ``random_key``.

    Attributes:
        place: of the next item in the batch.
    """

    def __init__(self, source: Any, draws: Any) -> None:
        self.source, self.place, self._draws = source, 0, ref(draws)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # a copy that has none yet
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def __next__(self) -> Any:
        if (draws := self._draws()) is None:
            return next(self.source)
        items = draws.items.setdefault(id(self), [])
        if self.place < len(items):
            self.place += 1
            return with_tensors(copied(items[self.place - 1]), _cloned)
        with nullcontext() if draws.random_key is None else seeded(*draws.random_key, "iterator", len(items)):
            item = next(self.source)  # again at its end, which stays
        self.place += 1
        items.append(with_tensors(copied(item), _cloned))
        return item


def _cloned(_: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.requires_grad else tensor.clone()


def _plan(batch: Any, samples: int, ends: list[int], tokens: PackedTokens) -> dict[Path, _Cut]:
    """Decides for each leaf of ``batch`` where it is cut; leaves that are repeated have no entry."""
    fields = {path: value for path, value in leaves(batch, samples) if _has_length(value)}
    rows: dict[Path, list[int]] = {}
    for scope in _scopes(fields):
        rows |= packed_rows(scope, samples, tokens)
    cuts, unresolved = {}, {}
    counts = {path: way for path, way in counted_ways(fields).items() if len(way) == samples}
    for path, value in fields.items():
        name = path[-1] if path else None
        mrope = name == "position_ids" and is_array(value) and value.ndim == 3
        if path in rows:
            row_ends = list(accumulate(rows[path], initial=0))
            items = [row_ends[end] for end in ends]
            is_packed = row_ends[-1] == len(value)
            cuts[path] = _Cut(0, items if is_packed else ends, None if is_packed and name in tokens.required else items)
        elif mrope and value.shape[1] == samples:  # Qwen's [3 or 4, B, S]
            cuts[path] = _Cut(1, ends)
        elif len(value) == samples and not (is_array(value) and owns_other_rows(path, value, counts)):
            cuts[path] = _Cut(0, ends)
        elif (is_array(value) or _is_ragged(value)) and not (name == "position_ids" and len(value) == 1):
            ways = [way for way in asked_ways(path, fields, counts) if sum(way) == len(value) and is_array(value)]
            if ways and all(way == ways[0] for way in ways):
                row_ends = list(accumulate(ways[0], initial=0))
                cuts[path] = _Cut(0, [row_ends[end] for end in ends])
            else:
                unresolved[path] = value
    if unresolved:
        rule = f"The batch has {samples} samples, and these have neither that many rows nor a known packing"
        raise _disagreement(unresolved, rule)
    return cuts


def _scopes(leaves: dict[Path, Any]) -> list[dict[Path, Any]]:
    """Groups leaves with the ``input_ids`` that count for them: all with the only one, else by mapping."""
    owners = [path[:-1] for path in leaves if path[-1:] == ("input_ids",)]
    if len(owners) < 2:
        return [leaves]
    return [{path: leaf for path, leaf in leaves.items() if path[: len(owner)] == owner} for owner in owners]


def leaves(node: Any, samples: int | None = None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a batch: arrays, lists with one element per sample, lists of scalars, and what holds nothing.

    Args:
        node: the batch.
        samples: that it has, where lists of samples are leaves.
        path: of `node`.
    """
    children = children_of(node)
    nested = any(is_array(child) or children_of(child) is not None for _, child in children or ())
    if (
        children is None
        or (is_plain_sequence(node) and not nested)
        or _is_sample_list(node, samples, path)
        or (samples is not None and path and kind_of(path[-1]) is not None and is_table(node))
        or _is_ragged(node)
    ):
        yield path, node
        return
    lists = [child for _, child in children if is_plain_sequence(child) and len(child) == samples]
    are_samples = any(_is_ragged([*seq]) or (_lists_samples(seq) and not isinstance(seq[0], str)) for seq in lists)
    for step, child in children:  # where one of them lists samples, all do
        is_leaf = are_samples and any(child is seq for seq in lists)
        yield from [((*path, step), child)] if is_leaf else leaves(child, samples, (*path, step))


def _is_sample_list(node: Any, samples: int | None, path: Path) -> bool:
    """Whether ``node`` lists samples (strings, tensors of any shapes, dicts of those) rather than fields."""
    if samples is None or not is_plain_sequence(node) or len(node) != samples:
        return False
    if not path and _lists_dicts(node):
        return True
    if _lists_fields(node, samples, path):
        return False
    inside = [(path, value) for path, value in leaves(node) if is_array(value)]
    # images [C, H, W] may have as many channels as there are samples
    images = samples in (3, 4) and all(is_array(image) and len(image.shape) == 3 for image in node)
    unlike = not inside or any(len(value) != samples for _, value in inside)
    return (images or unlike) and not any(path[-1] == "input_ids" for path, _ in inside)


def _lists_dicts(batch: Any) -> bool:
    """Whether a batch is a list of samples, dicts of equal keys, as without a collation, and not of several batches."""
    return _has_equal_keys(batch) and any(
        len(_rows_in(sample)) > 1 and batch_samples(sample) is None for sample in batch
    )


def _may_list_images(batch: Any) -> bool:
    """Whether dicts of equal keys may be samples with images [C, H, W] that have by chance as many boxes as channels.

    So may be batches of three samples, of several dataloaders.
    """
    if not _has_equal_keys(batch) or len(batch) < 2 or any(len(_rows_in(sample)) > 1 for sample in batch):
        return False
    arrays = [value for _, value in leaves(batch) if is_array(value)]
    return any(len(value.shape) == 3 and len(value) == 3 for value in arrays)


def _has_equal_keys(batch: Any) -> bool:
    """Whether a batch is a list of dicts of equal keys."""
    is_list = isinstance(batch, list) and bool(batch) and all(isinstance(sample, Mapping) for sample in batch)
    return is_list and all(sample.keys() == batch[0].keys() for sample in batch)


def _rows_in(sample: Any) -> set[int]:
    """The lengths of the arrays in a dict."""
    return {len(value) for _, value in leaves(sample) if is_array(value)}


def _lists_fields(node: Any, samples: int, path: Path) -> bool:
    """Whether each part of a node has an element for each sample, and is a field by its kind or that of the node."""
    are_long = all(_has_length(part) and len(part) == samples for part in node)
    kinds = [{_kind(element) for element in part} if is_plain_sequence(part) else {"rows"} for part in node]
    is_table = {*map(len, kinds)} == {1} and any(kind != kinds[0] for kind in kinds)
    return are_long and (is_table or all(map(_is_texts, node)) or (isinstance(node, tuple) and not path))


def _lists_samples(value: Any) -> bool:
    """Whether a list holds what `default_collate` makes no field of: dicts, tuples (not of texts), rowless values."""
    return is_plain_sequence(value) and bool(value) and not any(map(_is_collated, value))


def _is_collated(value: Any) -> bool:
    may_be = isinstance(value, list) or is_array(value)
    return _is_texts(value) or (may_be and any(is_array(leaf) for _, leaf in leaves(value)))


def _is_texts(value: Any) -> bool:
    """Whether a value is what `default_collate` makes of texts."""
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


def _kind(element: Any) -> object:
    return (element.dtype, len(element.shape)) if is_array(element) else type(element)


def _is_ragged(node: Any) -> bool:
    """Whether ``node`` is a list of samples by itself: tensors of one kind that have unequal lengths.

    One-dimensional integers may be fields: labels, tokens of all samples, and where those of each begin.
    """
    if not isinstance(node, list) or not all(is_array(sample) for sample in node):
        return False
    is_ragged = len({*map(_kind, node)}) == 1 and len({*map(len, node)}) > 1
    return is_ragged and (node[0].ndim > 1 or "float" in str(node[0].dtype))


def is_array(value: Any) -> bool:
    """Whether ``value`` has a dim 0: a tensor, a NumPy array, or another array."""
    return hasattr(value, "__getitem__") and len(getattr(value, "shape", ())) > 0


def is_plain_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _has_length(value: Any) -> bool:
    return is_array(value) or is_plain_sequence(value)


def children_of(node: Any) -> list[tuple[Any, Any]] | None:
    """The steps and children of a container, None for anything else."""
    if is_array(node):
        return None
    if isinstance(node, Mapping):
        return list(node.items())
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    if isinstance(node, list | tuple):
        return list(zip(getattr(node, "_fields", range(len(node))), node, strict=True))
    return None


def rebuilt(node: Any, values: list[Any]) -> Any:
    """A container of ``node``'s type with other children, in the order of `children_of`."""
    if isinstance(node, list | tuple):
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    steps = [step for step, _ in children_of(node) or ()]
    new = copy.copy(node)
    for step, value in zip(steps, values, strict=True):
        if isinstance(node, Mapping):
            new[step] = value
        else:
            object.__setattr__(new, step, value)
    return new


def _disagreement(leaves: dict[Path, Any], rule: str) -> ConfigError:
    sizes = {
        "batch" + "".join(f"[{step!r}]" for step in path): tuple(getattr(value, "shape", (len(value),)))
        for path, value in leaves.items()
        if _has_length(value)
    }
    return ConfigError("batch", sizes, rule, REMEDY)
