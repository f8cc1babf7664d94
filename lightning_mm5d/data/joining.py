"""Joins what microbatches returned into what their batch would have returned.

Samples that were dealt to microbatches are put back into the order of the batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from lightning_mm5d.data.lazy import on_device
from lightning_mm5d.data.microbatch import Microbatch, children_of, is_array, is_plain_sequence, leaves, rebuilt


class BatchNumber(int):
    """An integer that belongs to a whole batch, as ``batch_idx`` does: `merge` keeps it where it sums counts.

    Copies, pickles, and what is computed from it are plain integers.
    """

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class Sizes(tuple[int, ...]):
    """The numbers of samples of microbatches, and where in the batch these samples stand if not one after the other.

    Attributes:
        order: the place of each sample in the batch; None where they stand one after the other.
        weights: of the microbatches in a mean, as losses and logs have them; their samples where it is empty.
    """

    order: list[int] | None = None
    weights: Sequence[float] = ()

    @classmethod
    def of(cls, parts: Sequence[Microbatch], weights: Sequence[float] = ()) -> Sizes:
        """Return those of all microbatches of a batch."""
        sizes = cls(part.samples for part in parts)
        sizes.weights = weights
        if any(part.places is not None for part in parts):
            sizes.order = [place for part in parts for place in part.places or ()]
        return sizes

    def weighing(self) -> dict[int, float]:
        """Return the weight in a mean of each microbatch that has one: a mean over no tokens is NaN, and left out."""
        weights = self.weights if sum(self.weights) else self
        return {index: weight for index, weight in enumerate(weights) if weight}

    def restored(self, rows: list[Any]) -> list[Any]:
        """Return a list with an element for each sample of the microbatches in the order of the batch."""
        if self.order is None:
            return rows
        return [row for _, row in sorted(zip(self.order, rows, strict=True), key=itemgetter(0))]


def merge(
    outputs: Sequence[Any],
    samples: Sequence[int],
    where: str = "",
    *,
    tells: bool = True,
    reads: bool = True,
    lists: set[str] | None = None,
) -> Any:
    """Joins what M microbatches returned into what the batch would have returned.

    Tensors and NumPy arrays with one row per sample, and lists with one element per sample, are concatenated; floats
    and 0-dim tensors of them become their mean, weighted as the loss is; integers and 0-dim tensors of them are
    counts, and become their sum, but for a `BatchNumber`; containers are joined field by field; other equal values
    stay one value. What cannot be joined (rows of different shapes, fields that not all have, unequal bools) becomes
    the list of the M outputs. A tuple is a container unless it holds strings only.

    Samples lie along dim 0, or along dim 1 where only that has their number (states of an LSTM). A warning tells of an
    integer that is equal in all microbatches and not their number of samples, of a dim that is a guess, and of rows
    that are numbered anew in each microbatch.

    Args:
        outputs: M outputs of a step.
        samples: M numbers of samples; `Sizes` put the samples back into the order of the batch, and weigh means.
        where: path of the outputs in what the step gave, for warnings.
        tells: whether to warn of tensors that become a list because they have no rows of samples.
        reads: whether to look at rows of whole numbers, for a warning, also on a device, for which the host waits.
        lists: paths of lists with an element per sample in earlier batches, to which it adds: fewer samples may be as
            many by chance as their elements have rows.
    """
    lists = set() if lists is None else lists
    outputs, samples = list(outputs), samples if isinstance(samples, Sizes) else Sizes(samples)
    if len(outputs) != len(samples):
        raise ValueError(f"merge: got {len(outputs)} outputs and {len(samples)} numbers of samples.")
    if len(outputs) == 1:
        return outputs[0]
    first, *_ = outputs = unsqueezed(outputs, samples)
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return _merge_tensors(outputs, samples, where, tells, reads)
    if all(isinstance(output, int) for output in outputs) and not any(isinstance(output, bool) for output in outputs):
        return _merge_integers(outputs, samples, where)
    if all(isinstance(output, float) for output in outputs):
        weights = samples.weighing()
        return sum(outputs[index] * weight for index, weight in weights.items()) / sum(weights.values())
    if all(isinstance(output, np.ndarray) for output in outputs) and _are_rows(outputs, samples):
        rows = np.concatenate(outputs)
        return rows if samples.order is None else rows[np.argsort(samples.order)]
    if any(type(output) is not type(first) or is_array(output) for output in outputs):
        return outputs
    if _hold_samples(outputs, samples, where in lists):
        lists.add(where)
        return type(first)(samples.restored([element for output in outputs for element in output]))
    if children_of(first) is not None:
        fields = [dict(children_of(output) or ()) for output in outputs]
        if any(list(other) != list(fields[0]) for other in fields):
            return outputs
        tree = {step: [other[step] for other in fields] for step in fields[0]}
        told: dict[str, Any] = {"tells": tells, "reads": reads, "lists": lists}
        return rebuilt(first, [merge(nodes, samples, f"{where}[{step!r}]", **told) for step, nodes in tree.items()])
    return first if all(output == first for output in outputs) else outputs


def unsqueezed(outputs: list[Any], samples: Sequence[int]) -> list[Any]:
    """Give tensors of microbatches of a sample back the dim of samples, which `squeeze()` took, where others have it.

    Args:
        outputs: M values.
        samples: M numbers of samples.
    """
    if not all(isinstance(output, (torch.Tensor, np.ndarray)) for output in outputs):
        return outputs
    dims = max(output.ndim for output in outputs)
    pairs = zip(outputs, samples, strict=True)
    return [output[None] if size == 1 and output.ndim == dims - 1 else output for output, size in pairs]


def _merge_integers(outputs: list[int], samples: Sizes, where: str) -> int:
    first = outputs[0]
    if all(isinstance(output, BatchNumber) and output == first for output in outputs):
        return int(first)
    if first and outputs != [*samples] and all(output == first for output in outputs):
        _warn(where, "an integer that is equal in all microbatches, is summed as a count: make a constant a float")
    return sum(outputs)


def _warn(where: str, what: str) -> None:
    warnings.warn(f"what a step gave{f' in {where}' if where else ''}, {what}", stacklevel=2)


def _merge_tensors(outputs: list[torch.Tensor], samples: Sizes, where: str, tells: bool, reads: bool) -> Any:
    first = outputs[0]
    if all(output.ndim == 0 and output.dtype == torch.bool for output in outputs):
        return first if all(torch.equal(output, first) for output in outputs) else outputs
    if all(output.ndim == 0 and not output.is_floating_point() and not output.is_complex() for output in outputs):
        return torch.stack(outputs).sum()
    if all(output.ndim == 0 and output.is_floating_point() for output in outputs):
        wide = torch.promote_types(first.dtype, torch.float32)
        weights, numbers = samples.weighing(), torch.stack(outputs).to(wide)
        shares = [weight / sum(weights.values()) for weight in weights.values()]
        # numbers of Python: a copy of them would wait for the device
        weighed = torch._foreach_mul([numbers[index] for index in weights], shares)
        return torch.stack(weighed).sum().to(first.dtype)
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
        if same_rows and (reads or first.device.type == "cpu") and _count_up(outputs):
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
        places = torch.tensor(samples.order, device="cpu").argsort()
        return joined.index_select(dims[0], on_device(places, joined.device))
    if all(torch.equal(output, first) for output in outputs):
        return first
    if tells and any(output.ndim for output in outputs):
        pairs = zip(outputs, samples, strict=True)
        (each, rest), *others = {divmod(math.prod(output.shape[:1]), max(size, 1)) for output, size in pairs}
        is_multiple = each > 1 and not rest and not others  # by chance, or in an order of rows that nothing tells
        example = f" (x.unflatten(0, (-1, {each})), if the rows of a sample follow each other)" if is_multiple else ""
        _warn(
            where,
            f"a tensor of {tuple(first.shape)} for {samples[0]} samples, has no row for each sample, and becomes a "
            f"list of those of the microbatches. Return a row for each sample{example}, or set "
            "num_microbatches: 1",
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
    return all(output.shape == (size, *outputs[0].shape[1:]) for output, size in zip(outputs, samples, strict=True))


def _hold_samples(outputs: list[Any], samples: Sequence[int], is_known: bool) -> bool:
    """Whether sequences hold one element per sample, as `is_known` of lists, and no fields with one row per sample."""
    pairs = list(zip(outputs, samples, strict=True))
    if any(not is_plain_sequence(output) or len(output) != size for output, size in pairs):
        return False
    if isinstance(outputs[0], tuple):
        return all(isinstance(element, str) for output in outputs for element in output)
    return is_known or any({len(leaf) for _, leaf in leaves(o) if is_array(leaf)} != {size} for o, size in pairs)
