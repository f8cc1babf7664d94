"""Cuts a batch into microbatches, and joins what the microbatches returned.

A batch is any nesting of mappings (``BatchEncoding`` included), lists, tuples, named tuples and dataclasses.
Tensors and lists with one row per sample are cut into views, packed fields by the samples that own their rows
(see ``packed``), and anything without a length is repeated. It knows nothing of ranks or of the model, and
refuses a batch in which the number of samples, or the owner of a row, would have to be guessed.

Microbatches hold samples in the order of the batch, or those that a `Dealer` gives them; what they returned is then put
back into that order.

Shapes: B batch (samples), M microbatches, S sequence.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.lazy import LazyTensor
from lightning_mm5d.data.packed_images import REMEDY, PackedTokens, Path, counted_ways, kind_of, packed_rows
from lightning_mm5d.data.waiting import Waiting
from lightning_mm5d.layout.even_split import even_lengths

# Where tensors disagree on dim 0, the first of these names on which they do agree says what a sample is.
_SAMPLE_WISE = (
    "input_ids",
    "inputs_embeds",
    "decoder_input_ids",
    "labels",
    "attention_mask",
    "pixel_values",
    "input_features",
    "input_values",
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


Dealer = Callable[[Mapping[str, Sequence[int]], Sequence[int]], "list[list[int]] | None"]
"""Deals the samples of a batch out to microbatches.

Takes how many rows of each packed kind every sample owns, ``{"image": [2, 0, 5]}``, and the sizes of the microbatches;
returns the samples of each, in rising order; None leaves the order of the batch.
"""


class Sizes(tuple[int, ...]):
    """The numbers of samples of microbatches, and where in the batch these samples stand if not one after the other."""

    order: list[int] | None = None

    @classmethod
    def of(cls, parts: Sequence[Microbatch]) -> Sizes:
        """Return those of all microbatches of a batch."""
        sizes = cls(part.samples for part in parts)
        if any(part.places is not None for part in parts):
            sizes.order = [place for part in parts for place in part.places or ()]
        return sizes

    def restored(self, rows: list[Any]) -> list[Any]:
        """Return a list with an element for each sample of the microbatches in the order of the batch."""
        return (
            rows if self.order is None else [row for _, row in sorted(zip(self.order, rows, strict=True), key=_place)]
        )


def _place(pair: tuple[int, Any]) -> int:
    return pair[0]


class BatchNumber(int):
    """An integer that belongs to a whole batch, as ``batch_idx`` does: `merge` keeps it where it sums counts.

    Copies, pickles, and what is computed from it are plain integers.
    """

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class _Cut(NamedTuple):
    """Where one leaf is cut: part m is ``[bounds[m], bounds[m + 1])`` along ``dim``, a microbatch or a sample."""

    dim: int
    bounds: list[int]
    packed: bool


def batch_samples(batch: Any) -> int | None:
    """The number of samples B: the size that dim 0 of all tensors, or of the text tensors, has.

    A list of tensors of unequal lengths counts as one with as many rows as tensors. Where some tensors have a row for
    each item of a sample, and integers say how many these are, it is the number of those integers (`counted_ways`).

    Returns:
        None where tensors disagree and no field's name decides, and where nothing has a length.
    """
    arrays = {path: value for path, value in leaves(batch) if _is_array(value) or _is_ragged(value)}
    for name in _SAMPLE_WISE:
        sizes = {len(value) for path, value in arrays.items() if path[-1:] == (name,)}
        if len(sizes) == 1:
            return sizes.pop()
    sizes = {len(value) for value in arrays.values()}
    if not arrays:
        sizes = {len(value) for _, value in leaves(batch) if _is_plain_sequence(value)}
    if len(sizes) > 1:
        counts = {len(way) for way in counted_ways(arrays) if sizes <= {len(way), sum(way)}}
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
    found = [batch_samples(part) for part in parts]
    if None not in found:
        return found
    lengths = set(_cut_lengths(batch, parts))
    whole, *cut = lengths.pop() if len(lengths) == 1 else (0,)
    return [*cut] if whole and sum(cut) == whole else found


def _cut_lengths(batch: Any, parts: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """Yield the lengths, of the batch and of each part, of all that is shorter in a part."""
    if all(_has_length(one) for one in (batch, *parts)):
        lengths = tuple(len(one) for one in (batch, *parts))
        if len(set(lengths)) > 1:
            yield lengths
            return
    children = [dict(_children(one) or ()) for one in (batch, *parts)]
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
) -> list[Microbatch]:
    """Cuts ``batch`` into M microbatches whose sizes differ by at most one sample, or into ones of ``size`` samples.

    Of M the larger ones come first; of a size the last has what is left.

    Tensors become views. A packed field of which a microbatch owns no rows (``pixel_values`` where no sample
    has an image) is None there. A packed field is known by the name that processors give it; one of another
    name that happens to have B rows is taken to have one row per sample.

    Args:
        batch: a nesting of containers with B samples.
        num_microbatches: M, at least 1; None where microbatches have a size.
        size: samples of each microbatch but the last, where M is None.
        image_tokens: placeholder ids by which packed images, videos and audio are assigned to samples.
        dealer: says which samples each microbatch has; without it these follow each other. Tensors are then copied.

    Returns:
        min(B, M) microbatches, or ceil(B / size). One microbatch is the batch itself, whatever is in it.

    Raises:
        ConfigError: there are no samples, tensors disagree on their number, or packed rows cannot be assigned exactly.
    """
    if num_microbatches is not None and num_microbatches < 1:
        raise ConfigError("batching.num_microbatches", num_microbatches, "It counts microbatches", "Use 1 or more")
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
    if num_microbatches is None:
        ends = [*range(0, samples, size), samples]
    else:
        ends = list(accumulate(even_lengths(samples, min(samples, num_microbatches)), initial=0))
    if dealer is not None:
        cuts = _plan(batch, samples, [*range(samples + 1)], image_tokens or PackedTokens())
        sizes = [end - start for start, end in pairwise(ends)]
        dealt = dealer(_packed_sizes(batch, cuts), sizes)
        if dealt is not None:
            return [Microbatch(_gathered(batch, (), cuts, own), len(own), places=tuple(own)) for own in dealt]
    cuts = _plan(batch, samples, ends, image_tokens or PackedTokens())
    return [Microbatch(_take(batch, (), cuts, m), end - start) for m, (start, end) in enumerate(pairwise(ends))]


def joined_parts(batch: Any, parts: Sequence[Microbatch], image_tokens: PackedTokens | None = None) -> Microbatch:
    """Returns the first microbatches of a batch, as `split` has made them, as one.

    Args:
        batch: as for `split`.
        parts: the first ones.
        image_tokens: as for `split`.
    """
    samples, count = batch_samples(batch), sum(part.samples for part in parts)
    if samples is None or samples <= count:
        return counted(batch, samples)
    tokens = image_tokens or PackedTokens()
    places = Sizes.of(parts).order
    if places is None:
        return Microbatch(_take(batch, (), _plan(batch, samples, [0, count, samples], tokens), 0), count)
    cuts = _plan(batch, samples, [*range(samples + 1)], tokens)
    return Microbatch(_gathered(batch, (), cuts, places), count, places=tuple(places))


def _packed_sizes(batch: Any, cuts: Mapping[Path, _Cut]) -> dict[str, list[int]]:
    """How many rows every sample owns of each kind, by its field with the most elements: of patches, frames, texts."""
    found: dict[str, tuple[int, list[int]]] = {}
    for path, value in leaves(batch):
        cut = cuts.get(path)
        if cut is None or cut.dim or not (_is_array(value) or _is_ragged(value)):
            continue
        is_ragged = not _is_array(value)
        rows = [len(one) for one in value] if is_ragged else [end - start for start, end in pairwise(cut.bounds)]
        if len({*rows}) > 1:
            kind = (kind_of(path[-1]) if path else None) or str(path)
            elements = sum(rows) * math.prod((value[0] if is_ragged else value).shape[1:])
            found[kind] = max(found.get(kind, (0, rows)), (elements, rows))
    return {kind: rows for kind, (_, rows) in found.items()}


def _gathered(node: Any, path: Path, cuts: Mapping[Path, _Cut], samples: Sequence[int]) -> Any:
    """The given samples of what is cut into single ones."""
    cut = cuts.get(path)
    if cut is None:
        children = _children(node)
        if not children:
            return node
        return _rebuild(node, [_gathered(child, (*path, step), cuts, samples) for step, child in children])
    rows = [row for sample in samples for row in range(cut.bounds[sample], cut.bounds[sample + 1])]
    if cut.packed and not rows:
        return None
    if _is_plain_sequence(node):
        return type(node)(node[row] for row in rows)
    if isinstance(node, torch.Tensor):
        index = torch.tensor(rows, device=node.device)
        return node.chosen(index, cut.dim) if isinstance(node, Waiting) else node.index_select(cut.dim, index)
    return node[:, rows] if cut.dim == 1 else node[rows]


def split_each(
    batch: Any, num_microbatches: int, samples: Sequence[int], *, image_tokens: PackedTokens | None = None
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
        for _, value in _children(batch) or ()
    ]
    share = samples[0] // num_microbatches
    return [Microbatch(_rebuild(batch, list(values)), share) for values in zip(*parts, strict=True)]


def merge(outputs: Sequence[Any], samples: Sequence[int], where: str = "", *, tells: bool = True) -> Any:
    """Joins what M microbatches returned into what the batch would have returned.

    Tensors and NumPy arrays with one row per sample, and lists with one element per sample, are concatenated; floats
    and 0-dim tensors of them become their mean, weighted by samples; integers and 0-dim tensors of them are
    counts, and become their sum, but for a `BatchNumber`; containers are joined field by field; other equal values
    stay one value. What cannot be joined (rows of different shapes, fields that not all have, unequal bools) becomes
    the list of the M outputs. A tuple is a container unless it holds strings only.

    Samples lie along dim 0, or along dim 1 where only that has their number (states of an LSTM). A warning tells of an
    integer that is equal in all microbatches and not their number of samples, of a dim that is a guess, and of rows
    that are numbered anew in each microbatch.

    Args:
        outputs: M outputs of a step.
        samples: M numbers of samples; `Sizes` put the samples back into the order of the batch.
        where: path of the outputs in what the step gave, for warnings.
        tells: whether to warn of tensors that become a list because they have no rows of samples.
    """
    outputs, samples = list(outputs), samples if isinstance(samples, Sizes) else Sizes(samples)
    if len(outputs) != len(samples):
        raise ValueError(f"merge: got {len(outputs)} outputs and {len(samples)} numbers of samples.")
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return _merge_tensors(outputs, samples, where, tells)
    if all(isinstance(output, int) for output in outputs) and not any(isinstance(output, bool) for output in outputs):
        return _merge_integers(outputs, samples, where)
    if all(isinstance(output, float) for output in outputs):
        return sum(o * s for o, s in zip(outputs, samples, strict=True)) / sum(samples)
    if all(isinstance(output, np.ndarray) for output in outputs) and _are_rows(outputs, samples):
        rows = np.concatenate(outputs)
        return rows if samples.order is None else rows[np.argsort(samples.order)]
    if any(type(output) is not type(first) or _is_array(output) for output in outputs):
        return outputs
    if _hold_samples(outputs, samples):
        return type(first)(samples.restored([element for output in outputs for element in output]))
    if _children(first) is not None:
        fields = [dict(_children(output) or ()) for output in outputs]
        if any(list(other) != list(fields[0]) for other in fields):
            return outputs
        inside = {step: [other[step] for other in fields] for step in fields[0]}
        merged = [merge(one, samples, f"{where}[{step!r}]", tells=tells) for step, one in inside.items()]
        return _rebuild(first, merged)
    return first if all(output == first for output in outputs) else outputs


def _merge_integers(outputs: list[int], samples: Sizes, where: str) -> int:
    first = outputs[0]
    if all(isinstance(output, BatchNumber) and output == first for output in outputs):
        return int(first)
    if first and outputs != [*samples] and all(output == first for output in outputs):
        _warn(where, "an integer that is equal in all microbatches, is summed as a count: make a constant a float")
    return sum(outputs)


def _warn(where: str, what: str) -> None:
    warnings.warn(f"what a step gave{f' in {where}' if where else ''}, {what}", stacklevel=2)


def with_tensors(batch: Any, function: Callable[[Path, torch.Tensor], torch.Tensor], path: Path = ()) -> Any:
    """Returns ``batch`` with what ``function`` returns of its tensors and their paths; itself where nothing changes."""
    if isinstance(batch, torch.Tensor):
        return function(path, batch)
    children = _children(batch)
    if not children:
        return batch
    values = [with_tensors(child, function, (*path, step)) for step, child in children]
    if all(value is child for value, (_, child) in zip(values, children, strict=True)):
        return batch
    return _rebuild(batch, values)


def copied(batch: Any) -> Any:
    """Return ``batch`` with new containers of the same tensors and other leaves."""
    children = _children(batch)
    return _rebuild(batch, [copied(child) for _, child in children]) if children else batch


def _merge_tensors(outputs: list[torch.Tensor], samples: Sizes, where: str, tells: bool) -> Any:
    first = outputs[0]
    if all(output.ndim == 0 and output.dtype == torch.bool for output in outputs):
        return first if all(torch.equal(output, first) for output in outputs) else outputs
    if all(output.ndim == 0 and not output.is_floating_point() and not output.is_complex() for output in outputs):
        return torch.stack(outputs).sum()
    if all(output.ndim == 0 and output.is_floating_point() for output in outputs):
        wide = torch.promote_types(first.dtype, torch.float32)
        weights = torch.tensor(samples, dtype=wide, device=first.device) / sum(samples)
        return (torch.stack(outputs).to(wide) * weights).sum().to(first.dtype)
    if dims := [dim for dim in (0, 1) if _have_samples(outputs, samples, dim)]:
        if dims == [1] and all(torch.equal(output, first) for output in outputs):
            return first
        same_rows = all(_without(output, dims[0]) == _without(first, dims[0]) for output in outputs)
        # under equal numbers of samples a dim may have theirs by chance: only batches with unequal ones tell
        if same_rows and dims != [0] and len({*samples}) == 1:
            _warn(
                where,
                f"a tensor of {tuple(first.shape)} for {samples[0]} samples, is joined along dim {dims[0]}. "
                "Where this is not the dim of samples, return another one first, or use microbatches of another size",
            )
        if same_rows and _count_up(outputs):
            _warn(
                where,
                "whole numbers that count up, start again in each microbatch. Take them from the batch, or set "
                "num_microbatches: 1",
            )
        if not same_rows:
            return outputs
        joined = torch.cat(outputs, dims[0])
        if samples.order is None:
            return joined
        return joined.index_select(dims[0], torch.tensor(samples.order, device=joined.device).argsort())
    if all(torch.equal(output, first) for output in outputs):
        return first
    if tells and first.ndim:
        _warn(
            where,
            f"a tensor of {tuple(first.shape)} for {samples[0]} samples, has no row for each sample, and becomes a "
            "list of those of the microbatches. Return a row for each sample, or set num_microbatches: 1",
        )
    return outputs


def _count_up(outputs: list[torch.Tensor]) -> bool:
    """Whether each is ``i, i + 1, i + 2, ...`` with the same i, as ``torch.arange(len(x))`` is."""
    first = outputs[0]
    if first.ndim != 1 or first.dtype == torch.bool or first.is_floating_point() or first.is_complex():
        return False
    least = min(map(len, outputs))  # of two or less it may be by chance
    if least < 3 or not torch.equal(first.diff(), torch.ones_like(first[1:])):
        return False
    return all(torch.equal(output[:least], first[:least]) for output in outputs)


def _have_samples(outputs: list[torch.Tensor], samples: Sequence[int], dim: int) -> bool:
    """Whether a dim has the number of samples: the first, or the second of a tensor with three or more."""
    pairs = zip(outputs, samples, strict=True)
    return all(output.ndim > 2 * dim and output.shape[dim] == size for output, size in pairs)


def _without(output: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*output.shape[:dim], *output.shape[dim + 1 :])


def _are_rows(outputs: Sequence[Any], samples: Sequence[int]) -> bool:
    """Whether arrays hold one row per sample, of one shape."""
    return all(one.shape == (size, *outputs[0].shape[1:]) for one, size in zip(outputs, samples, strict=True))


def _hold_samples(outputs: list[Any], samples: Sequence[int]) -> bool:
    """Whether sequences hold one element per sample, rather than fields with one row per sample."""
    pairs = list(zip(outputs, samples, strict=True))
    if any(not _is_plain_sequence(output) or len(output) != size for output, size in pairs):
        return False
    if isinstance(outputs[0], tuple):
        return all(isinstance(element, str) for output in outputs for element in output)
    return any({len(leaf) for _, leaf in leaves(o) if _is_array(leaf)} != {size} for o, size in pairs)


def _plan(batch: Any, samples: int, ends: list[int], tokens: PackedTokens) -> dict[Path, _Cut]:
    """Decides for each leaf of ``batch`` where it is cut; leaves that are repeated have no entry."""
    fields = {path: value for path, value in leaves(batch, samples) if _has_length(value)}
    rows: dict[Path, list[int]] = {}
    for scope in _scopes(fields):
        rows |= packed_rows(scope, samples, tokens)
    cuts, unresolved = {}, {}
    for path, value in fields.items():
        name = path[-1] if path else None
        mrope = name == "position_ids" and _is_array(value) and value.ndim == 3
        if path in rows:
            row_ends = list(accumulate(rows[path], initial=0))
            cuts[path] = _Cut(0, [row_ends[end] for end in ends], packed=True)
        elif mrope and value.shape[1] == samples:  # Qwen's [3 or 4, B, S]
            cuts[path] = _Cut(1, ends, packed=False)
        elif len(value) == samples:
            cuts[path] = _Cut(0, ends, packed=False)
        elif (_is_array(value) or _is_ragged(value)) and not (name == "position_ids" and len(value) == 1):
            unresolved[path] = value
    counts = [way for way in counted_ways(fields) if len(way) == samples] if unresolved else []
    for path, value in list(unresolved.items()):
        ways = [way for way in counts if sum(way) == len(value) and _is_array(value)]
        if ways and all(way == ways[0] for way in ways):
            row_ends = list(accumulate(ways[0], initial=0))
            cuts[path] = _Cut(0, [row_ends[end] for end in ends], packed=False)
            del unresolved[path]
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


def _take(node: Any, path: Path, cuts: dict[Path, _Cut], m: int) -> Any:
    cut = cuts.get(path)
    if cut is not None:
        start, end = cut.bounds[m], cut.bounds[m + 1]
        if cut.packed and start == end:
            return None
        if isinstance(node, LazyTensor) and cut.dim == 0:
            return node.rows(start, end)
        return node[:, start:end] if cut.dim == 1 else node[start:end]
    children = _children(node)
    if not children:
        return node
    return _rebuild(node, [_take(child, (*path, step), cuts, m) for step, child in children])


def leaves(node: Any, samples: int | None = None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a batch: arrays, lists with one element per sample, lists of scalars, and what holds nothing.

    Args:
        node: the batch.
        samples: that it has, where lists of samples are leaves.
        path: of `node`.
    """
    children = _children(node)
    nested = any(_is_array(child) or _children(child) is not None for _, child in children or ())
    if (
        children is None
        or (_is_plain_sequence(node) and not nested)
        or _is_sample_list(node, samples)
        or _is_ragged(node)
    ):
        yield path, node
        return
    for step, child in children:
        yield from leaves(child, samples, (*path, step))


def _is_sample_list(node: Any, samples: int | None) -> bool:
    """Whether ``node`` lists samples (strings, tensors of any shapes, dicts of those) rather than fields."""
    if samples is None or not _is_plain_sequence(node) or len(node) != samples:
        return False
    inside = [(path, value) for path, value in leaves(node) if _is_array(value)]
    fields = any(path[-1] == "input_ids" for path, _ in inside)
    return not fields and (not inside or any(len(value) != samples for _, value in inside))


def _is_ragged(node: Any) -> bool:
    """Whether ``node`` is a list of samples by itself: tensors of one kind that have unequal lengths.

    One-dimensional integers may be fields: labels, tokens of all samples, and where those of each begin.
    """
    if not isinstance(node, list) or not all(_is_array(one) for one in node):
        return False
    kinds = {(one.dtype, len(one.shape)) for one in node}
    return len(kinds) == 1 and len({len(one) for one in node}) > 1 and (node[0].ndim > 1 or _is_float(node[0]))


def _is_float(value: Any) -> bool:
    return str(value.dtype).removeprefix("torch.").startswith(("float", "bfloat"))


def _is_array(value: Any) -> bool:
    """Whether ``value`` has a dim 0: a tensor, a NumPy array, or another array."""
    return hasattr(value, "__getitem__") and len(getattr(value, "shape", ())) > 0


def _is_plain_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _has_length(value: Any) -> bool:
    return _is_array(value) or _is_plain_sequence(value)


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """The steps and children of a container, None for anything else."""
    if _is_array(node):
        return None
    if isinstance(node, Mapping):
        return list(node.items())
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    if isinstance(node, list | tuple):
        return list(zip(getattr(node, "_fields", range(len(node))), node, strict=True))
    return None


def _rebuild(node: Any, values: list[Any]) -> Any:
    """A container of ``node``'s type with other children, in the order of ``_children``."""
    if isinstance(node, list | tuple):
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    steps = [step for step, _ in _children(node) or ()]
    new = copy.copy(node)
    put = new.__setitem__ if isinstance(node, Mapping) else partial(object.__setattr__, new)
    for step, value in zip(steps, values, strict=True):
        put(step, value)
    return new


def _disagreement(leaves: dict[Path, Any], rule: str) -> ConfigError:
    sizes = {
        "batch" + "".join(f"[{step!r}]" for step in path): tuple(getattr(value, "shape", (len(value),)))
        for path, value in leaves.items()
        if _has_length(value)
    }
    return ConfigError("batch", sizes, rule, REMEDY)
