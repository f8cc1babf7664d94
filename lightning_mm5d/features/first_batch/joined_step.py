"""A step on two microbatches, on both as one, and on the first one again, of which nothing stays.

It keeps no graph, unless the step itself asks for gradients: then all of it runs once more, with graphs.

Dropout lets everything pass meanwhile. Any other random number ends it, because a batch and its microbatches draw
unlike ones; so does an error, as of code that knows the size of microbatches, and a file that is opened to be written.

A value that a step writes and that does not change tells nothing: a moving average of weights begins as a copy of them.
So runs note what they write, and begin, where they are told so, with other values of these buffers and frozen weights.

The end compares what a `JoinedStep` has given for two microbatches with what it has given for both as one, and warns.
"""

from __future__ import annotations

import builtins
import dataclasses
import io
import math
import random
import threading
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_mm5d.data.joining import Sizes, merge
from lightning_mm5d.data.microbatch import Microbatch, with_tensors
from lightning_mm5d.data.random_state import kept_random_state, seed_of
from lightning_mm5d.sharded.own_backwards import ORIGINALS
from lightning_mm5d.sharded.remote_value import is_remote, plain
from lightning_mm5d.sharded.removable import meanwhile, put
from lightning_mm5d.sharded.tensor import written_by
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.stage.payload import detached
from lightning_mm5d.trainer.kept_values import KeptState
from lightning_mm5d.trainer.logs import LogCall, LogOptions, merged_value
from lightning_mm5d.trainer.user_step import UserStep

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_DROPOUTS = frozenset(
    (
        *(F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout),
        *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout),
    )
)
_DROPOUT_AT: dict[Any, tuple[str, int]] = {
    F.scaled_dot_product_attention: ("dropout_p", 4),
    F.multi_head_attention_forward: ("dropout_p", 10),
}
_DRAWING = frozenset(
    (
        *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "rand_like", "randn_like", "randint_like"),
        *("multinomial", "poisson", "binomial", "uniform_", "normal_", "random_", "exponential_", "geometric_"),
        *("cauchy_", "log_normal_", "bernoulli_", "rrelu", "rrelu_", "gumbel_softmax", "_standard_gamma"),
    )
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class JoinedStep(UserStep):
    """A step without gradients, on two microbatches, on both as one, and on the first one again.

    Args:
        args: as for `UserStep`.
        state: of the module before.
        others: names of buffers that begin with other values than they have.
        has_graph: whether the step may ask for gradients; also an attribute.
        kwargs: as for `UserStep`.

    Attributes:
        before: attributes of the module, by name.
        losses: of a training step in the last stage, by index of the microbatch.
        rows: what the step put into attributes of the module there: arrays by name, by index of the microbatch.
        numbers: those that it put into attributes there, by name, by index of the microbatch.
        buffers: that runs on this rank have changed, by index of the microbatch.
        start: with what these began, but where the second microbatch went on.
        written: names of all buffers of this rank that runs have written to, changed or not.
        opens: whether it ended because it opened a file to write it.
        lacks_graph: whether it asked for gradients, as in a step that adapts weights, and has no graph.
        logs: numbers that the step logged there, by index of the microbatch, and by what and when.
    """

    forgives = (Exception,)

    def __init__(
        self, *args: Any, state: KeptState, others: Collection[str] = (), has_graph: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.losses: dict[int, Tensor] = {}
        self.rows: dict[int, dict[str, Any]] = {}
        self.numbers: dict[int, dict[str, float]] = {}
        self.buffers: dict[int, dict[str, Tensor]] = {}
        self.start: dict[str, Tensor] = {}
        self.written = set[str]()
        self.opens = self.lacks_graph = False
        self.logs: dict[int, dict[tuple[LogOptions, int], LogCall]] = {}
        self._state, self.before, self._others = state, dict(vars(self._module)), others
        self.has_graph = has_graph

    def structure(self, batch: Any) -> Any:
        """Return a key of its own, so that what real steps are found to do does not come from here."""
        return "joined", super().structure(batch)

    def run(self, microbatch: Microbatch, index: int, place: tuple[Hashable, int] = (None, 0)) -> Any:
        """Call the step; all but the second microbatch begin with the state before the step."""
        if index != 1:
            self._state.begin()
            self._metrics.restart()
        before = _drawn()
        with ExitStack() as stack:
            begun = self._begun(index)
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # or layers are compiled again
            stack.enter_context(self._no_writes())
            stack.enter_context(torch.set_grad_enabled(self.has_graph))
            watched = stack.enter_context(_Watched(self, self._module))
            try:
                result = super().run(microbatch, index, place)
            finally:  # also where the stage ends
                self._note(index, begun, watched)
        self.fails |= _drawn() != before
        return result

    def _begun(self, index: int) -> dict[str, _Begun]:
        """Give buffers the values that a run begins with; return these by name.

        Args:
            index: of the microbatch; the second one goes on with what the first has left.
        """
        values = self.buffers.get(0, {}) if index == 1 else {}
        with plain(), torch.no_grad():
            for name, tensor in _buffers(self._module).items():
                if name in self._others and name not in self.start:
                    self.start[name] = _other(name, tensor)
                value = values.get(name, self.start[name] if name in self._others else None)
                if value is not None:
                    _replace(self._module, tensor, value.clone())
            return {name: _Begun.of(tensor) for name, tensor in _buffers(self._module).items()}

    def _note(self, index: int, begun: Mapping[str, _Begun], watched: _Watched) -> None:
        """Note what a run has written, and what it has left."""
        left = self.buffers.setdefault(index, {})
        for name, tensor in _buffers(self._module).items():
            if name not in begun:
                continue
            if begun[name].is_written(tensor, watched.written):
                self.written.add(name)
            if not _is_equal(tensor, begun[name].value):
                left[name] = tensor.detach().clone()
                if index != 1 or name not in self.buffers.get(0, {}):
                    self.start.setdefault(name, begun[name].value)

    @contextmanager
    def _no_writes(self) -> Iterator[None]:
        """Enter around a run, which ends where it opens a file to write it."""
        original, thread = builtins.open, threading.get_ident()

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and not {*mode}.isdisjoint("wax+"):
                self.opens = self.fails = True
                raise PermissionError(f"{file} is not written while first batches are compared")
            return original(file, mode, *args, **kwargs)

        with ExitStack() as stack:
            for owner in (builtins, io):
                stack.callback(put(owner, "open", opened))
            yield

    def _batch(self, microbatch: Microbatch) -> Any:
        """The batch with tensors of its own, which the step may write to."""
        return with_tensors(super()._batch(microbatch), lambda _, tensor: tensor.clone())

    def keep_logs(self) -> None:
        """Keep what the step has logged, which `uncounted` drops."""
        self.logs = self._capture.plain()

    def finish(self, result: Any, index: int) -> None:
        """Keep the loss of a training step, what the step returns beside it, and what it puts into attributes."""
        rest = result
        if self.name == "training_step":
            loss = result.get("loss") if isinstance(result, Mapping) else result
            rest = {name: value for name, value in result.items() if name != "loss"} if loss is not result else None
            if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
                self.losses[index] = loss.detach()
        self.results[index] = detached(rest)
        new = {name: value for name, value in vars(self._module).items() if value is not self.before.get(name)}
        self.rows[index] = {name: value for name, value in new.items() if isinstance(value, (Tensor, np.ndarray))}
        self.numbers[index] = {name: float(value) for name, value in new.items() if self._is_number(name, value)}

    def _is_number(self, name: str, value: Any) -> bool:
        """Whether an attribute is a number, also in a tensor that was one before."""
        return type(value) in (float, int) or (
            type(value) is Tensor
            and value.numel() == 1
            and not value.is_complex()
            and isinstance(self.before.get(name), (Tensor, float, int))
        )


class _Watched(TorchFunctionMode):
    """Lets dropout pass everything, notes random numbers, and copies parameters before they are written to.

    Args:
        step: ends where a random number is drawn.
        module: whose parameters are put back at the end.

    Attributes:
        written: addresses of all tensors that were written to in place.
    """

    def __init__(self, step: JoinedStep, module: nn.Module) -> None:
        super().__init__()
        self._step = step
        self._data: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}  # by address
        self._copies: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.written = set[int]()
        with plain(), torch.no_grad():
            for parameter in module.parameters():
                if not is_remote(parameter) and parameter.numel():
                    self._data.setdefault(_address(parameter), []).append((parameter, parameter.data))

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _DROPOUT_AT:
            name, place = _DROPOUT_AT[func]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif name in kwargs:
                kwargs[name] = 0.0
        if getattr(func, "__name__", "") in _DRAWING:
            self._step.fails = True
        if func is ORIGINALS["grad"] and not torch.is_grad_enabled():
            self._step.lacks_graph = True
        if func is not Tensor.requires_grad_:
            self._keep(written_by(func, args, kwargs))
        return func(*args, **kwargs)

    def _keep(self, written: Sequence[Tensor]) -> None:
        for tensor in written:
            if is_remote(tensor):
                continue
            address = _address(tensor)
            self.written.add(address)
            if address in self._data and address not in self._copies:
                self._copies[address] = [(data, data.clone()) for _, data in self._data[address]]

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        with plain(), torch.no_grad():
            for parameter, data in chain.from_iterable(self._data.values()):
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
            for data, copy in chain.from_iterable(self._copies.values()):
                data.copy_(copy)


class _Begun(NamedTuple):
    """A tensor as a run begins with it, with a copy of its value."""

    tensor: Tensor
    address: int
    version: int
    value: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Begun:
        return cls(tensor, _address(tensor), version_of(tensor), tensor.detach().clone())

    def is_written(self, now: Tensor, addresses: Collection[int]) -> bool:
        """Whether `now`, which has its name after the run, is another tensor, or was written to."""
        is_same = now is self.tensor and _address(now) == self.address and version_of(now) == self.version
        return not is_same or self.address in addresses


def _buffers(module: LightningModule) -> dict[str, Tensor]:
    """The buffers that this rank has, but those of batch norms, of which losses tell."""
    norms = {name for name, child in module.named_modules() if isinstance(child, _BATCH_NORMS)}
    with plain():
        named = {
            name: buffer
            for name, buffer in module.named_buffers()
            if not is_remote(buffer) and buffer.layout == torch.strided
        }
    return {name: buffer for name, buffer in named.items() if name.rpartition(".")[0] not in norms}


def _replace(module: nn.Module, buffer: Tensor, new: Tensor) -> None:
    """Put `new` in the place of a buffer, wherever modules share it."""
    for owner in module.modules():
        for name, value in owner._buffers.items():
            if value is buffer:
                owner._buffers[name] = new


def _other(name: str, tensor: Tensor) -> Tensor:
    """Return other values of a tensor, the same for its name on all ranks: in its range, with its signs."""
    generator = torch.Generator().manual_seed(seed_of(name))
    share = 0.25 * (1.0 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64)).to(tensor)
    return torch.where(tensor == 0, share, tensor.detach() * (1.0 - share))


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(tensor, other)


def _drawn() -> tuple[Any, ...]:
    """The states of Python's and numpy's generators."""
    state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def put_back(module: LightningModule, device: torch.device) -> Iterator[KeptState]:
    """Enter around a `JoinedStep`; everything is then as it was, but metrics and logs, of which nothing counts.

    Args:
        module: the user's module; its loggers log nothing meanwhile.
        device: whose generators are meant, beside those of the CPU.
    """
    state = KeptState(module, vars(module.trainer)["callbacks"])
    loggers = [DummyLogger() for _ in module.trainer.loggers]
    with meanwhile(module.trainer, loggers=loggers), kept_random_state(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step has warned already
        try:
            yield state
        finally:
            state.restore()


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
    first, second, joined, again = losses
    weights = step.weights.of_replica[:2]
    parts = [loss * weight for loss, weight in zip((first, second), weights, strict=True) if weight]
    mean = sum(parts) / sum(weights) if parts else math.nan
    if not math.isfinite(joined) or not parts or _differ(first, again, rounding * _LEAST):
        return
    if _differ(mean, joined, rounding):
        warnings.warn(
            f"training_step: the loss of the first two microbatches is {joined:.6g} as one batch, and {mean:.6g} as "
            f"the mean of both, by which they train. {_advice(first, second, joined, rounding)} {SEE}",
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
    samples = Sizes.of(next(iter(step.microbatches.values()))[:2], step.weights.of_replica[:2])
    samples.order = None
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
    elif isinstance(joined, _NUMBERS) and isinstance(whole, _NUMBERS):
        joined_tensor, whole_tensor = torch.as_tensor(joined), torch.as_tensor(whole)
        if joined_tensor.shape != whole_tensor.shape or not _are_equal(joined_tensor, whole_tensor, rounding):
            yield where, joined, whole


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
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    data = torch.as_tensor(value)
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
