"""Compares what first batches give with what their microbatches give: losses, logged numbers and results of steps.

It warns where the loss of the first training batch is not the mean of its microbatches' losses, and where a training,
validation or test step logs or returns something else for a batch than what is made of its microbatches.

A schedule trains the weighted mean of the losses of microbatches. That is the loss of the batch only where this is a
mean over samples, or over what ``loss_weight`` counts: not a sum, not a comparison of samples with each other, not
what batch statistics or counters change. Nobody would see the difference in a falling loss. Nor would anybody see that
a logged count is halved, or that one number for each class is taken for one row for each sample, because there are by
chance as many. Phases, after the first batch of each step and dataloader of a run, and once more: after the second
training batch, because microbatches of the first may have equal counts by chance, and after the first batch that is
evaluated after the sanity check, in which a step may do less:

1. Each stage runs, without gradients, the first two microbatches, both as one, and the first one again
   (`joined_step.py`).
2. The first rank where the first replica's step ends compares, and tells of nothing twice; where the first microbatch
   has two losses, it compares nothing.
3. What the runs have changed is put back: buffers, attributes, metrics, parameters, random generators.
4. Where a step has written to buffers, all of it once more: these begin with other values, so that averages
   of weights show which begin as a copy of them.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_mm5d.data.joining import Sizes, merge
from lightning_mm5d.data.loader import split_replicas
from lightning_mm5d.data.microbatch import Microbatch
from lightning_mm5d.features.first_batch.joined_step import JoinedStep, Listed, put_back, tensor_of
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.remote_value import plain
from lightning_mm5d.sharded.removable import meanwhile
from lightning_mm5d.source.loops import appended_by_data
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.kept_values import is_per_batch, joined_entries
from lightning_mm5d.trainer.logs import merged_value
from lightning_mm5d.trainer.process_group import decided
from lightning_mm5d.trainer.steps import FirstBatch
from lightning_mm5d.trainer.user_step import UserStep

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_log = logging.getLogger("lightning.pytorch")  # shows what it is told, where Lightning does


class FirstBatchChecks(Feature):
    """Looks at first batches of each fit that begins with untrained weights, and at those of each evaluation."""

    def attach(self, running: Running) -> Attached:
        """Watch the first steps of each kind."""
        return _Checks(running)


class _Checks(Attached):
    def __init__(self, running: Running) -> None:
        self._module, self._device, self._layout = running.module, running.device, running.plan.layout
        self._rank, self._ownership = running.rank, running.plan.ownership
        self._steps = running.steps
        self._told = set[str]()
        self.put_attribute(running.steps, "first", self)

    def stepped(self, first: FirstBatch) -> None:
        """Compare, if all ranks can, what two microbatches give with what both as one give; or say why not."""
        joined = self._joined(first) if first.counts and not first.is_gathered else {}
        lacks = self._anywhere(len(joined) < len(first.parts))
        why = self._why_lacking(first) if lacks else self._compares(first, joined)
        is_told = self._steps.writes and any(len(parts) > 1 for parts in first.parts.values())
        if why and first.counts and is_told and first.name not in self._told:
            self._told.add(first.name)
            of_step = "the loss of a batch is the mean of its microbatches' losses"
            if first.name != "training_step":
                of_step = f"{first.name} logs and returns of a batch what is made of its microbatches"
            _log.info(f"Not checked: whether {of_step}, because {why}. {_SEE}")

    def _joined(self, first: FirstBatch) -> dict[int, list[Microbatch]]:
        """Return the first two microbatches, both as one and the first again, of replicas where these are known."""
        batch_parts = self._steps.batch_parts
        is_equal = self._layout.num_replicas == 1 or batch_parts.is_equal_everywhere()
        if batch_parts.is_compiled or not is_equal or self._has_file():
            return {}
        batches = zip(first.parts.items(), split_replicas(first.batch, len(first.parts)), strict=True)
        joined = {number: (parts, batch_parts.joined(batch, parts)) for (number, parts), batch in batches}
        return {number: [*parts[:2], both, parts[0]] for number, (parts, both) in joined.items() if both is not None}

    def _has_file(self) -> bool:
        """Whether a module keeps an open file, to which its step may write."""
        return any(isinstance(value, io.IOBase) for module in self._module.modules() for value in vars(module).values())

    def _compares(self, first: FirstBatch, joined: Mapping[int, list[Microbatch]]) -> str:
        """Run the joined step, and compare; return what stood in the way, "" for nothing."""
        step = self._run(first, joined)
        if self._anywhere(step.lacks_graph):
            step = self._run(first, joined, has_graph=True)
        with self._once():
            if self._steps.writes:
                compare(self._module, step)
            self._compare_buffers(first, joined, step)
        if step.opens:
            return f"{first.name} opens a file to write it"
        return f"{first.name} draws random numbers, or fails on a batch of another size" if step.fails else ""

    @contextmanager
    def _once(self) -> Iterator[None]:
        """Enter around comparisons, which then warn of each thing once."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for warning in caught:
            subject = str(warning.message).partition(" is ")[0]
            if subject not in self._told:
                self._told.add(subject)
                warnings.warn(warning.message, stacklevel=4)

    def _anywhere(self, holds: bool) -> bool:
        """Whether something holds on any rank."""
        return decided(holds, all_ranks=False, device=message_device(self._device))

    def _run(
        self, first: FirstBatch, joined: Mapping[int, list[Microbatch]], others: Collection[str] = (), **options: bool
    ) -> JoinedStep:
        """Run the step on both microbatches and on both as one; `others` begin with other values than they have."""
        given = self._module, first.name, first.arguments, joined, first.weights
        with meanwhile(self._steps, writes=False), put_back(self._module, self._device) as state:
            step = JoinedStep(*given, state=state, others=others, **options, **first.options)
            with step.uncounted(repeats=True):
                self._steps.run(step, frozenset())
                step.keep_logs()
        return step

    def _compare_buffers(self, first: FirstBatch, joined: Mapping[int, list[Microbatch]], step: JoinedStep) -> None:
        """Compare what is left in buffers, on all ranks if any has written to such."""
        unlike = self._unlike(step)
        with plain():
            buffers = dict(self._module.named_buffers())
        written = set() if step.fails else {name for name in step.written if buffers[name].is_floating_point()}
        if self._anywhere(any(map(self._is_primary, written - unlike))):
            unlike |= self._unlike(self._run(first, joined, written, has_graph=step.has_graph))
        tell_of_buffers(step, unlike)

    def _unlike(self, step: JoinedStep) -> set[str]:
        """Return what this rank saves, and microbatches leave otherwise than both as one."""
        # a replica of an encoder that takes turns with others runs a part of these
        if step.fails or not step.buffers.keys() >= {0, 1, 2}:
            return set()
        return {name for name in unlike_buffers(self._module, step) if self._is_primary(name)}

    def _is_primary(self, name: str) -> bool:
        """Whether the value that is saved of a buffer or parameter is that of this rank."""
        return self._ownership.primary_ranks(name)[:1] == (self._rank,)

    def _why_lacking(self, first: FirstBatch) -> str:
        """Say why two microbatches and both as one are not known, or must not run."""
        if first.is_gathered:
            return "parameters are gathered within a step (zero_stage: 3)"
        if self._steps.batch_parts.is_compiled:
            return "modules are compiled"
        if self._has_file():
            return "a module keeps an open file"
        return "two of them cannot be joined to one, or replicas may have batches of unlike sizes"


_ROUNDING, _LOW_ROUNDING = 5e-5, 1e-2  # relative; in half precision and tf32, batches of unlike sizes round unlike
_LEAST = 0.01  # of these, what two losses of one microbatch may differ by; and of 1, what is small
_ARRAYS = (Tensor, np.ndarray)
_SEE = 'See "Losses that are no mean" in the documentation of batches.'


def compare(module: LightningModule, step: JoinedStep) -> None:
    """Warn where two microbatches as one have another loss, logs or results than what is made of theirs.

    Args:
        module: the user's module.
        step: that has run.
    """
    if step.fails or len(step.results) < len(next(iter(step.microbatches.values()))):
        return
    dtype = torch.bfloat16 if "bf16" in str(module.trainer.precision) else torch.float32
    rounding = _rounding(module, step.losses[0].dtype if step.losses else dtype)
    losses = [float(step.losses[index]) for index in sorted(step.losses)]
    _compare_logs(step, losses[:3], rounding)
    _compare_results(step, rounding)
    _compare_numbers(step, rounding)
    _compare_entries(module, step, rounding)
    if len(losses) == len(step.results):
        _compare_losses(step, losses, rounding)


def _compare_losses(step: JoinedStep, losses: Sequence[float], rounding: float) -> None:
    """Warn where the loss of two microbatches as one is not the mean of theirs."""
    first, second, joined, again = losses
    weights = step.weights.of_replica[:2]
    parts = [loss * weight for loss, weight in zip((first, second), weights, strict=True) if weight]
    mean = sum(parts) / sum(weights) if parts else math.nan
    if not math.isfinite(joined) or not parts or _differ(first, again, rounding * _LEAST):
        return
    if _differ(mean, joined, rounding):
        warnings.warn(
            f"training_step: the loss of the first two microbatches is {joined:.6g} as one batch, and {mean:.6g} as "
            f"the mean of both, by which they train. {_advice(first, second, joined, rounding)} {_SEE}",
            stacklevel=2,
        )


def _compare_logs(step: JoinedStep, losses: Sequence[float], rounding: float) -> None:
    """Warn of each number that two microbatches log otherwise than both as one; but for the loss itself."""
    for call in step.logs.get(0, {}):
        logs = [log for index in range(4) if (log := step.logs.get(index, {}).get(call)) is not None]
        values = [float(log.value) for log in logs if log.value is not None]
        if len(values) < 4 or not math.isfinite(values[2]) or _differ(values[0], values[3], rounding * _LEAST):
            continue
        logged = merged_value(call[0], logs[:2])
        is_loss = bool(losses) and call[0].reduce_fx == "mean"
        is_loss = is_loss and not any(_differ(a, b, rounding) for a, b in zip(values, losses, strict=False))
        if logged is None or is_loss or not _differ(logged, values[2], rounding):
            continue
        is_sum = call[0].reduce_fx == "mean" and not _differ(values[0] + values[1], values[2], rounding)
        is_sum = is_sum and values[1] != values[2]  # which is what earlier microbatches have left, too
        what, fix = "no mean over samples", "Log a torchmetrics.Metric itself, which counts the batch as one"
        if is_sum:
            what, fix = "a sum over samples", 'Log a mean, or say reduce_fx="sum"'
        warnings.warn(
            f"{step.name}: {call[0].name!r} is logged as {values[2]:.6g} of the first two microbatches as one batch, "
            f"and as {logged:.6g} of both. It is {what}. {fix}, or set num_microbatches: 1.",
            stacklevel=2,
        )


def _compare_results(step: JoinedStep, rounding: float) -> None:
    """Warn of what the step returns, or puts into attributes, for two microbatches otherwise than for both as one."""
    samples = _samples(step)
    of_first, of_second, both, again = (step.results[index] for index in range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # merging has told of what it guesses
        joined = merge([of_first, of_second], samples)
        differing = [] if [*_unlike(of_first, again, rounding * _LEAST)] else [*_unlike(joined, both, rounding)]
        differences = [(f"what it returns{where}", got, expected) for where, got, expected in differing]
        for name, expected in step.rows[2].items():
            first, second, before = step.rows[0].get(name), step.rows[1].get(name), step.before.get(name)
            if first is None or second is None or second is first or first.shape[:1] != (samples[0],):
                continue
            if getattr(before, "shape", None) == first.shape:  # which may go on: a sum over batches
                continue
            rows = merge([first, second], samples)
            if np.shape(rows) != np.shape(expected):
                differences.append((f"self.{name}", rows, expected))
    for what, got, expected in differences:
        if isinstance(expected, list) or np.shape(expected):
            fix = "Give a row for each sample, or add up in an attribute (self.counts += counts)"
        else:
            fix = "Log a torchmetrics.Metric, which counts the batch as one, or return a count as an integer"
        warnings.warn(
            f"{step.name}: {what} is {_text(expected)} for the first two microbatches as one batch, and {_text(got)} "
            f"joined of both. {fix}, or set num_microbatches: 1.",
            stacklevel=2,
        )


def _compare_numbers(step: JoinedStep, rounding: float) -> None:
    """Warn of numbers in attributes that two microbatches, one after the other, leave otherwise than both as one."""
    first, second, joined, again = (step.numbers[index] for index in range(4))
    for name in (name for name in joined if name in first and name in second and name in again):
        if _differ(second[name], joined[name], rounding) and not _differ(first[name], again[name], rounding * _LEAST):
            warnings.warn(
                f"{step.name}: self.{name} is {joined[name]:.6g} after the first two microbatches as one batch, and "
                f"{second[name]:.6g} after one and the other. Set it in {step.hooks}_end, or set "
                "num_microbatches: 1.",
                stacklevel=2,
            )


def _compare_entries(module: LightningModule, step: JoinedStep, rounding: float) -> None:
    """Warn of what two microbatches, one after the other, leave in attributes otherwise than both as one.

    So do steps that keep the first samples of a batch: as many of each microbatch.
    """
    apart, samples = appended_by_data(type(module)), _samples(step)
    for name, whole in step.entries[2].items():
        values: list[Any] = [entries.get(name) for entries in (step.held, *(step.entries[i] for i in (0, 1, 3)))]
        held, first, both, again = values
        if not type(first) is type(both) is type(again) is type(whole):
            continue
        if isinstance(whole, Listed):
            added, new = [_added(first, held), _added(both, first)], _added(whole, held)
            first, both, whole, again = (listed.values for listed in (first, both, whole, again))
            is_other = _are_other_entries(added, new, samples, rounding, is_apart=name in apart)
            if is_other and new is whole and len(both) == len(whole):  # put anew, as the best of all
                is_other = _is_other(sorted(both, key=str), sorted(whole, key=str), rounding)
        elif isinstance(whole, _ARRAYS) and any(size == sum(samples) for size in whole.shape[:2]):
            is_other = both.shape == whole.shape and _is_other(both, whole, rounding)  # else they are rows of a batch
        else:
            is_other = _is_other(both, whole, rounding)
        if is_other and not _is_other(first, again, rounding * _LEAST):
            warnings.warn(
                f"{step.name}: self.{name} is {_text(whole)} after the first two microbatches as one batch, and "
                f"{_text(both)}{' that differs' * (_text(whole) == _text(both))} after one and the other. Keep a row "
                f"or an entry for each sample, write to it in {step.hooks}_end, or set num_microbatches: 1.",
                stacklevel=2,
            )


def _is_other(value: Any, whole: Any, rounding: float) -> bool:
    """Whether two values of one type differ."""
    return value != whole if isinstance(whole, str) else bool([*_unlike(value, whole, rounding)])


def _samples(step: JoinedStep) -> Sizes:
    """How many samples the first two microbatches have."""
    samples = Sizes.of(next(iter(step.microbatches.values()))[:2], step.weights.of_replica[:2])
    samples.order = None
    return samples


def _added(now: Listed, before: Any) -> list[Any]:
    """Return what was appended to `before`, also as ``self.values = self.values + new``; all of another list."""
    count = len(before.values) if isinstance(before, Listed) else 0
    begins = count and len(now.values) >= count and all(map(is_, now.values, before.values))
    goes_on = begins and (now.owner is before.owner or len(now.values) > count)
    return now.values[count:] if goes_on else now.values


def _are_other_entries(
    added: Sequence[list[Any]], whole: list[Any], samples: Sizes, rounding: float, *, is_apart: bool
) -> bool:
    """Whether entries that two microbatches have added are others than those of both as one.

    Args:
        added: by the two.
        whole: entries of both as one.
        samples: of the two.
        rounding: of numbers, relative.
        is_apart: whether entries of microbatches are not joined.
    """
    counts = [len(new) for new in added]
    if sum(counts) == len(whole):
        return False
    if is_apart or not is_per_batch(added, samples) or counts[0] != len(whole):
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joined = joined_entries(added, samples)
    is_other = counts[0] > 1 if joined is None else _is_other(joined, whole, rounding)
    triples = zip(added[0], added[1], whole, strict=True)
    return is_other or any(_is_part(*entries, rounding) for entries in triples)


def _is_part(first: Any, second: Any, whole: Any, rounding: float) -> bool:
    """Whether entries have tensors of one shape for any number of samples, which differ."""
    if isinstance(whole, Mapping) and isinstance(first, Mapping) and isinstance(second, Mapping):
        names = [name for name in whole if name in first and name in second]
        return any(_is_part(first[name], second[name], whole[name], rounding) for name in names)
    if isinstance(whole, (list, tuple)) and type(first) is type(second) is type(whole):
        return any(_is_part(*values, rounding) for values in zip(first, second, whole, strict=False))
    if not (isinstance(whole, _ARRAYS) and isinstance(first, _ARRAYS) and isinstance(second, _ARRAYS)):
        return False
    tensors = [tensor for value in (first, second, whole) if (tensor := tensor_of(value)) is not None]
    is_fixed = len(tensors) == 3 and tensors[2].ndim > 0 and {*(tensor.shape for tensor in tensors)} == {whole.shape}
    return is_fixed and not _are_equal(tensors[0], tensors[1], rounding)


def unlike_buffers(module: LightningModule, step: JoinedStep) -> set[str]:
    """Return the names of what microbatches, one after the other, leave otherwise than both as one.

    Args:
        module: the user's module.
        step: that has run.
    """
    first, second, whole = (step.buffers[index] for index in range(3))
    rounding, names = _rounding(module, torch.float32), set[str]()
    for name in first.keys() | second.keys() | whole.keys():
        start = step.start[name]
        after_first, joined = first.get(name, start), whole.get(name, start)
        parts = second.get(name, after_first)
        if [*_unlike(parts, joined, rounding)] or _moves_on(after_first, parts, joined):
            names.add(name)
    return names


def _moves_on(first: Tensor, second: Tensor, whole: Tensor) -> bool:
    """Whether a write that does not depend on the batch, as of an average of weights, leaves more the second time."""
    if not (whole.numel() and whole.is_floating_point() and first.dtype == whole.dtype and torch.equal(first, whole)):
        return False
    few = 16 * torch.finfo(whole.dtype).eps
    return not torch.allclose(second, whole, rtol=0.0, atol=few * float(whole.abs().max()), equal_nan=True)


def tell_of_buffers(step: UserStep, names: Collection[str]) -> None:
    """Warn of buffers in which the microbatches of a step leave something else than the batch."""
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        warnings.warn(
            f"{step.name}: the buffer {min(names)!r}{more} is written for each microbatch, and two leave something "
            f"else in it than both as one batch. Write to it in {step.hooks}_end, or set num_microbatches: 1.",
            stacklevel=2,
        )


def _unlike(joined: Any, whole: Any, rounding: float, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the paths, with both values, at which two results differ in numbers, shapes or lengths."""
    if dataclasses.is_dataclass(whole) and type(joined) is type(whole):
        joined, whole = vars(joined), vars(whole)
    if isinstance(joined, Mapping) and isinstance(whole, Mapping):
        for name in (name for name in whole if name in joined):
            yield from _unlike(joined[name], whole[name], rounding, f"{where}[{name!r}]")
    elif isinstance(joined, (list, tuple)) and isinstance(whole, (list, tuple)):
        if len(joined) != len(whole):
            yield where, joined, whole
        for index, pair in enumerate(zip(joined, whole, strict=False) if len(joined) == len(whole) else ()):
            yield from _unlike(*pair, rounding, f"{where}[{index}]")
    elif (tensor := tensor_of(joined)) is not None and (of_whole := tensor_of(whole)) is not None:
        is_equal = tensor.shape == of_whole.shape and _are_equal(tensor, of_whole, rounding)
        yield from () if is_equal else ((where, joined, whole),)


def _are_equal(tensor: Tensor, other: Tensor, rounding: float) -> bool:
    """Whether tensors of one shape are equal but for rounding, by which indices of low precision may differ, too."""
    if not tensor.numel() or tensor.is_complex():
        return True
    if not tensor.is_floating_point():
        return rounding > _ROUNDING or torch.equal(tensor, other)
    tensor, other = tensor.double(), other.double()
    largest = float(other.abs().nan_to_num(posinf=0.0).max())
    return torch.allclose(tensor, other, rtol=0.0, atol=rounding * (largest + _LEAST), equal_nan=True)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    data = tensor_of(value)
    if data is None:
        return f"of type {type(value).__name__}"
    return f"{float(data):.6g}" if data.numel() == 1 and not data.is_complex() else f"a tensor of {tuple(data.shape)}"


def _advice(first: float, second: float, joined: float, rounding: float) -> str:
    if not _differ(first + second, joined, rounding):
        return (
            "It is a sum over samples: return a mean, or set num_microbatches: 1 (and a smaller batch), or the sum is "
            "divided by the number of microbatches."
        )
    if min(first, second) <= joined <= max(first, second) or not math.isfinite(first + second):
        return (
            "If it is a mean over something else than samples (labels that count, weights of classes, a mask), give a "
            "function of a microbatch that counts it: loss_weight=function, or a method `loss_weight(self, batch)`. If "
            "samples depend on each other, as in BatchNorm, set num_microbatches: 1."
        )
    return (
        "It depends on which samples are in a microbatch together, or on what earlier ones leave (contrastive losses, "
        "mixup, BatchNorm, queues, counters): set num_microbatches: 1."
    )


def _differ(number: float, other: float, rounding: float) -> bool:
    if number == other or (math.isnan(number) and math.isnan(other)):
        return False
    return not abs(number - other) <= rounding * (max(abs(number), abs(other)) + _LEAST)


def _rounding(module: LightningModule, loss: torch.dtype) -> float:
    """Return how much two losses of `module` may differ, relative, by the order in which they are computed."""
    dtypes = {parameter.dtype for parameter in module.parameters()} | {loss}
    is_full = dtypes <= {torch.float32, torch.float64} and "16" not in str(module.trainer.precision)
    if is_full and (module.device.type == "cpu" or dtypes == {torch.float64}):
        return _ROUNDING
    return max(_LOW_ROUNDING, 4 * torch.finfo(loss).eps)


FEATURE = FirstBatchChecks
