"""Compares what a `JoinedStep` has given for two microbatches with what it has given for both as one, and warns."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_mm5d.data.joining import merge
from lightning_mm5d.features.first_batch.joined_step import JoinedStep
from lightning_mm5d.trainer.logs import merged_value
from lightning_mm5d.trainer.user_step import UserStep

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_ROUNDING, _LOW_ROUNDING = 5e-5, 1e-2  # relative; in half precision and tf32, batches of unlike sizes round unlike
_LEAST = 0.01  # of these, what two losses of one microbatch may differ by; and of 1, what is small
_NUMBERS = (Tensor, np.ndarray, float, int)
SEE = 'See "Losses that are no mean" in the documentation of batches.'


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
    if len(losses) == len(step.results):
        _compare_losses(step, losses, rounding)


def _compare_losses(step: JoinedStep, losses: Sequence[float], rounding: float) -> None:
    """Warn where the loss of two microbatches as one is not the mean of theirs."""
    one, other, joined, again = losses
    weights = step.weights.own[:2]
    parts = [loss * weight for loss, weight in zip((one, other), weights, strict=True) if weight]
    mean = sum(parts) / sum(weights) if parts else math.nan
    if not math.isfinite(joined) or not parts or _differ(one, again, rounding * _LEAST):
        return
    if _differ(mean, joined, rounding):
        warnings.warn(
            f"training_step: the loss of the first two microbatches is {joined:.6g} as one batch, and {mean:.6g} as "
            f"the mean of both, by which they train. {_advice(one, other, joined, rounding)} {SEE}",
            stacklevel=2,
        )


def _compare_logs(step: JoinedStep, losses: Sequence[float], rounding: float) -> None:
    """Warn of each number that two microbatches log otherwise than both as one; but for the loss itself."""
    for call in step.logs.get(0, {}):
        found = [log for index in range(4) if (log := step.logs.get(index, {}).get(call)) is not None]
        values = [float(log.value) for log in found if log.value is not None]
        if len(values) < 4 or not math.isfinite(values[2]) or _differ(values[0], values[3], rounding * _LEAST):
            continue
        logged = merged_value(call[0], found[:2])
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
    samples = [part.samples for part in next(iter(step.microbatches.values()))[:2]]
    one, other, both, again = (step.results[index] for index in range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # merging has told of what it guesses
        joined = merge([one, other], samples)
        differing = [] if [*_unlike(one, again, rounding * _LEAST)] else [*_unlike(joined, both, rounding)]
        found = [(f"what it returns{where}", got, expected) for where, got, expected in differing]
        for name, expected in step.rows[2].items():
            first, second, before = step.rows[0].get(name), step.rows[1].get(name), step.before.get(name)
            if first is None or second is None or second is first or first.shape[:1] != (samples[0],):
                continue
            if getattr(before, "shape", None) == first.shape:  # which may go on: a sum over batches
                continue
            rows = merge([first, second], samples)
            if np.shape(rows) != np.shape(expected):
                found.append((f"self.{name}", rows, expected))
    for what, got, expected in found:
        if isinstance(expected, list) or np.shape(expected):
            fix = "Give a row for each sample, or add up in an attribute (self.counts += counts)"
        else:
            fix = "Log a torchmetrics.Metric, which counts the batch as one, or return a count as an integer"
        warnings.warn(
            f"{step.name}: {what} is {_said(expected)} for the first two microbatches as one batch, and {_said(got)} "
            f"joined of both. {fix}, or set num_microbatches: 1.",
            stacklevel=2,
        )


def _compare_numbers(step: JoinedStep, rounding: float) -> None:
    """Warn of numbers in attributes that two microbatches, one after the other, leave otherwise than both as one."""
    one, other, joined, again = (step.numbers[index] for index in range(4))
    for name in (name for name in joined if name in one and name in other and name in again):
        if _differ(other[name], joined[name], rounding) and not _differ(one[name], again[name], rounding * _LEAST):
            warnings.warn(
                f"{step.name}: self.{name} is {joined[name]:.6g} after the first two microbatches as one batch, and "
                f"{other[name]:.6g} after one and the other. Set it in {step.hooks}_end, or set "
                "num_microbatches: 1.",
                stacklevel=2,
            )


def unlike_buffers(module: LightningModule, step: JoinedStep) -> set[str]:
    """Return the names of what microbatches, one after the other, leave otherwise than both as one.

    Args:
        module: the user's module.
        step: that has run.
    """
    first, second, whole = (step.buffers[index] for index in range(3))
    rounding, found = _rounding(module, torch.float32), set[str]()
    for name in first.keys() | second.keys() | whole.keys():
        start = step.start[name]
        one, joined = first.get(name, start), whole.get(name, start)
        parts = second.get(name, one)
        if [*_unlike(parts, joined, rounding)] or _moves_on(one, parts, joined):
            found.add(name)
    return found


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
    elif isinstance(joined, _NUMBERS) and isinstance(whole, _NUMBERS):
        one, other = torch.as_tensor(joined), torch.as_tensor(whole)
        if one.shape != other.shape or not _are_equal(one, other, rounding):
            yield where, joined, whole


def _are_equal(one: Tensor, other: Tensor, rounding: float) -> bool:
    """Whether tensors of one shape are equal but for rounding, by which indices of low precision may differ, too."""
    if not one.numel() or one.is_complex():
        return True
    if not one.is_floating_point():
        return rounding > _ROUNDING or torch.equal(one, other)
    one, other = one.double(), other.double()
    largest = float(other.abs().nan_to_num(posinf=0.0).max())
    return torch.allclose(one, other, rtol=0.0, atol=rounding * (largest + _LEAST), equal_nan=True)


def _said(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    found = torch.as_tensor(value)
    return (
        f"{float(found):.6g}" if found.numel() == 1 and not found.is_complex() else f"a tensor of {tuple(found.shape)}"
    )


def _advice(one: float, other: float, joined: float, rounding: float) -> str:
    if not _differ(one + other, joined, rounding):
        return (
            "It is a sum over samples: return a mean, or set num_microbatches: 1 (and a smaller batch), or the sum is "
            "divided by the number of microbatches."
        )
    if min(one, other) <= joined <= max(one, other) or not math.isfinite(one + other):
        return (
            "If it is a mean over something else than samples (labels that count, weights of classes, a mask), give a "
            "function of a microbatch that counts it: loss_weight=function, or a method `loss_weight(self, batch)`. If "
            "samples depend on each other, as in BatchNorm, set num_microbatches: 1."
        )
    return (
        "It depends on which samples are in a microbatch together, or on what earlier ones leave (contrastive losses, "
        "mixup, BatchNorm, queues, counters): set num_microbatches: 1."
    )


def _differ(one: float, other: float, rounding: float) -> bool:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return False
    return not abs(one - other) <= rounding * (max(abs(one), abs(other)) + _LEAST)


def _rounding(module: LightningModule, loss: torch.dtype) -> float:
    """Return how much two losses of `module` may differ, relative, by the order in which they are computed."""
    dtypes = {parameter.dtype for parameter in module.parameters()} | {loss}
    is_full = dtypes <= {torch.float32, torch.float64} and "16" not in str(module.trainer.precision)
    if is_full and (module.device.type == "cpu" or dtypes == {torch.float64}):
        return _ROUNDING
    return max(_LOW_ROUNDING, 4 * torch.finfo(loss).eps)
