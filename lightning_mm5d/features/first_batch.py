"""Compares what first batches give with what their microbatches give: losses, logged numbers and results of steps.

It warns where the loss of the first training batch is not the mean of its microbatches' losses, and where a training,
validation or test step logs or returns something else for a batch than what is made of its microbatches. It also
refuses a training step that writes to frozen weights, which would write for each microbatch and stage.

A schedule trains the weighted mean of the losses of microbatches. That is the loss of the batch only where this is a
mean over samples, or over what ``loss_weight`` counts: not a sum, not a comparison of samples with each other, not
what batch statistics or counters change. Nobody would see the difference in a falling loss. Nor would anybody see that
a logged count is halved, or that one number for each class is taken for one row for each sample, because there are by
chance as many. Phases, once in a run for each step and dataloader, after the first batch:

1. Each stage runs, without gradients, the first two microbatches, both as one, and the first one again.
2. The first rank where the first replica's step ends compares; where the first microbatch has two losses, nothing.
3. What the runs have changed is put back: buffers, attributes, metrics, parameters, random generators.

Dropout lets everything pass meanwhile. Any other random number ends the check, because a batch and its microbatches
draw unlike ones; so does an error, as of code that knows the size of microbatches, and a file that is opened to be
written, which would have lines twice.
"""

from __future__ import annotations

import builtins
import dataclasses
import io
import logging
import math
import random
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.batches import split_replicas
from lightning_mm5d.data.joining import merge
from lightning_mm5d.data.microbatch import Microbatch, with_tensors
from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.remote_value import is_remote, plain
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.stage.payload import detached, tensors_in
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.kept_values import KeptState
from lightning_mm5d.trainer.logs import LogCall, LogOptions, merged_value
from lightning_mm5d.trainer.steps import FirstBatch
from lightning_mm5d.trainer.user_step import UserStep

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


_ROUNDING, _LOW_ROUNDING = 5e-5, 1e-2  # relative; in half precision and tf32, batches of unlike sizes round unlike
_LEAST = 0.01  # of these, what two losses of one microbatch may differ by; and of 1, what is small
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
_NUMBERS = (Tensor, np.ndarray, float, int)
_SEE = 'See "Losses that are no mean" in the documentation of batches.'


_NORMED = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
_log = logging.getLogger("lightning.pytorch")  # shows what it is told, where Lightning does


class FirstBatchChecks(Feature):
    """Looks at the first batch of each fit that begins with untrained weights, and at the first of each evaluation."""

    def attach(self, running: Running) -> Attached:
        """Watch the first step of each kind."""
        return _Checks(running)


class _Checks(Attached):
    def __init__(self, running: Running) -> None:
        self._module, self._device, self._layout = running.module, running.device, running.plan.layout
        self._rank, self._ownership = running.rank, running.plan.ownership
        self._frozen = dict[str, Tensor]()
        self._steps = running.steps
        self.put_attribute(running.steps, "first", self)

    def begin(self, *, is_gathered: bool) -> None:
        """Keep the norms of frozen parameters."""
        self._frozen = {} if is_gathered else self._norms()

    def _norms(self) -> dict[str, Tensor]:
        """Return the norms of the frozen parameters that this rank has."""
        with plain():
            named = self._module.named_parameters(remove_duplicate=False)
            found = {name: p for name, p in named if not (p.requires_grad or is_remote(p))}
            found = {name: p for name, p in found.items() if p.dtype in _NORMED and p.layout == torch.strided}
            norms = torch._foreach_norm([p.detach() for p in found.values()]) if found else ()
        return dict(zip(found, norms, strict=True))

    def ran(self, runs: int) -> None:
        """Refuse, on all ranks, a step that writes to frozen weights (a momentum encoder's) and runs several times."""
        before, self._frozen = self._frozen, {}
        after = self._norms() if before and runs > 1 else {}
        changed = [name for name in before if name in after and bool(before[name] != after[name])]
        most = torch.tensor(runs if changed else 0, device=message_device(self._device))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if most:
            raise ConfigError(
                "training_step",
                f"a write to {changed[0]!r}" if changed else "a write to a frozen parameter of another rank",
                f"The step runs {int(most)} times a batch, for each microbatch and stage, and would write as often",
                "Write in on_train_batch_start or on_train_batch_end, which run once and see all weights",
            )

    def stepped(self, first: FirstBatch) -> None:
        """Compare, if all ranks can, what two microbatches give with what both as one give; or say why not."""
        joined = self._joined(first) if first.counts and not first.is_gathered else {}
        lacking = torch.tensor(len(first.parts) - len(joined), device=message_device(self._device))
        dist.all_reduce(lacking, dist.ReduceOp.MAX)
        why = self._why_lacking(first) if lacking else self._compares(first, joined)
        is_told = self._steps.writes and any(len(found) > 1 for found in first.parts.values())
        if why and first.counts and is_told:
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
        joined = {number: (found, batch_parts.joined(one, found)) for (number, found), one in batches}
        return {number: [*found[:2], both, found[0]] for number, (found, both) in joined.items() if both is not None}

    def _has_file(self) -> bool:
        """Whether a module keeps an open file, to which its step may write."""
        return any(isinstance(one, io.IOBase) for module in self._module.modules() for one in vars(module).values())

    def _compares(self, first: FirstBatch, joined: Mapping[int, list[Microbatch]]) -> str:
        """Run the joined step, and compare; return what stood in the way, "" for nothing."""
        writes, self._steps.writes = self._steps.writes, False
        given = self._module, first.name, first.arguments, joined, first.weights
        try:
            with _put_back(self._module, self._device) as state:
                step = _JoinedStep(*given, state=state, **first.options)
                with step.uncounted():
                    self._steps.run(step, frozenset())
                    step.keep_logs()
        finally:
            self._steps.writes = writes
        if writes:
            _compare(self._module, step)
        # a replica of an encoder that takes turns with others runs a part of these
        if first.name == "training_step" and not step.fails and step.buffers.keys() >= {0, 1, 2}:
            _compare_buffers(self._module, step, {name for name in step.buffers[2] if self._is_primary(name)})
        if step.opens:
            return f"{first.name} opens a file to write it"
        return f"{first.name} draws random numbers, or fails on a batch of another size" if step.fails else ""

    def _is_primary(self, name: str) -> bool:
        """Whether the value that is saved of a buffer is that of this rank."""
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


class _JoinedStep(UserStep):
    """A step without gradients, on two microbatches, on both as one, and on the first one again.

    Args:
        args: as for `UserStep`.
        state: of the module before.
        kwargs: as for `UserStep`.

    Attributes:
        losses: of a training step in the last stage, by index of the microbatch.
        rows: what the step put into attributes of the module there: arrays by name, by index of the microbatch.
        buffers: that runs on this rank have changed, by index of the microbatch.
        opens: whether it ended because it opened a file to write it.
        logs: numbers that the step logged there, by index of the microbatch, and by what and when.
    """

    forgives = (Exception,)

    def __init__(self, *args: Any, state: KeptState, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: dict[int, Tensor] = {}
        self.rows: dict[int, dict[str, Any]] = {}
        self.buffers: dict[int, dict[str, Tensor]] = {}
        self.opens = False
        self.logs: dict[int, dict[tuple[LogOptions, int], LogCall]] = {}
        self._state, self._before = state, dict(vars(self._module))

    def structure(self, batch: Any) -> Any:
        """Return a key of its own, so that what real steps are found to do does not come from here."""
        return "joined", super().structure(batch)

    def run(self, microbatch: Microbatch, index: int) -> Any:
        """Call the step; all but the second microbatch begin with the state before the step."""
        if index != 1:
            self._state.begin()
        before, buffers = _drawn(), self._begun_buffers(index)
        eager = torch.compiler.set_stance("force_eager")  # or layers are compiled again
        with eager, self._no_writes(), _Watched(self, self._module):
            try:
                result = super().run(microbatch, index)
            finally:  # also where the stage ends
                now = _buffers(self._module)
                changed = {name for name, one in now.items() if name in buffers and not torch.equal(one, buffers[name])}
                self.buffers.setdefault(index, {}).update((name, now[name].clone()) for name in changed)
        self.fails |= _drawn() != before
        return result

    def _begun_buffers(self, index: int) -> dict[str, Tensor]:
        """Let the second microbatch go on with what the first has left in buffers; return copies of all."""
        for name, buffer in self.buffers.get(0, {}).items() if index == 1 else ():
            owner, _, own = name.rpartition(".")
            self._module.get_submodule(owner)._buffers[own] = buffer.clone()
        return {name: buffer.clone() for name, buffer in _buffers(self._module).items()}

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
        kept = result
        if self.name == "training_step":
            loss = result.get("loss") if isinstance(result, Mapping) else result
            kept = {name: one for name, one in result.items() if name != "loss"} if loss is not result else None
            if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
                self.losses[index] = loss.detach()
        self.results[index] = detached(kept)
        new = {name: one for name, one in vars(self._module).items() if one is not self._before.get(name)}
        self.rows[index] = {name: one for name, one in new.items() if isinstance(one, (Tensor, np.ndarray))}


class _Watched(TorchFunctionMode):
    """Lets dropout pass everything, notes random numbers, and copies parameters before they are written to.

    Args:
        step: ends where a random number is drawn.
        module: whose parameters are put back at the end.
    """

    def __init__(self, step: _JoinedStep, module: nn.Module) -> None:
        super().__init__()
        self._step = step
        self._data: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}  # by address
        self._copies: dict[int, list[tuple[Tensor, Tensor]]] = {}
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
        name = getattr(func, "__name__", "")
        if name in _DRAWING:
            self._step.fails = True
        is_in_place = name.startswith(("__setitem__", "__i")) or (name.endswith("_") and not name.startswith("__"))
        if is_in_place and name != "requires_grad_":
            self._keep(args[:1])
        elif kwargs.get("out") is not None:
            self._keep(kwargs["out"])
        return func(*args, **kwargs)

    def _keep(self, written: Any) -> None:
        for _, tensor in tensors_in(written):
            address = None if is_remote(tensor) else _address(tensor)
            if address in self._data and address not in self._copies:
                self._copies[address] = [(data, data.clone()) for _, data in self._data[address]]

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        with plain(), torch.no_grad():
            for parameter, data in (pair for pairs in self._data.values() for pair in pairs):
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
            for data, copy in (pair for pairs in self._copies.values() for pair in pairs):
                data.copy_(copy)


def _buffers(module: LightningModule) -> dict[str, Tensor]:
    """The buffers that this rank has, but those of batch norms, of which losses tell."""
    norms = {name for name, one in module.named_modules() if isinstance(one, _BATCH_NORMS)}
    with plain():
        named = {name: one for name, one in module.named_buffers() if not is_remote(one)}
    return {name: one for name, one in named.items() if name.rpartition(".")[0] not in norms}


def _drawn() -> tuple[Any, ...]:
    """The states of Python's and numpy's generators."""
    state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _put_back(module: LightningModule, device: torch.device) -> Iterator[KeptState]:
    """Enter around a `_JoinedStep`; everything is then as it was, but metrics and logs, of which nothing counts.

    Args:
        module: the user's module; its loggers log nothing meanwhile.
        device: whose generators are meant, beside those of the CPU.
    """
    loggers, state = module.trainer.loggers, KeptState(module)
    module.trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with kept_random_state(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step has warned already
            yield state
    finally:
        state.restore()
        module.trainer.loggers = loggers


def _compare(module: LightningModule, step: _JoinedStep) -> None:
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
    if len(losses) == len(step.results):
        _compare_losses(step, losses, rounding)


def _compare_losses(step: _JoinedStep, losses: Sequence[float], rounding: float) -> None:
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
            f"the mean of both, by which they train. {_advice(one, other, joined, rounding)} {_SEE}",
            stacklevel=2,
        )


def _compare_logs(step: _JoinedStep, losses: Sequence[float], rounding: float) -> None:
    """Warn of each number that two microbatches log otherwise than both as one; but for the loss itself."""
    for call in step.logs.get(0, {}):
        found = [log for index in range(4) if (log := step.logs.get(index, {}).get(call)) is not None]
        values = [float(log.value) for log in found if log.value is not None]
        if len(values) < 4 or not math.isfinite(values[2]) or _differ(values[0], values[3], rounding * _LEAST):
            continue
        logged = merged_value(call[0], found[:2])
        is_loss = bool(losses) and not any(_differ(a, b, rounding) for a, b in zip(values, losses, strict=False))
        if logged is None or is_loss or not _differ(logged, values[2], rounding):
            continue
        is_sum = call[0].reduce_fx == "mean" and not _differ(values[0] + values[1], values[2], rounding)
        what, fix = "no mean over samples", "Log a torchmetrics.Metric, which counts the batch as one"
        if is_sum:
            what, fix = "a sum over samples", 'Log a mean, or say reduce_fx="sum"'
        warnings.warn(
            f"{step.name}: {call[0].name!r} is logged as {values[2]:.6g} of the first two microbatches as one batch, "
            f"and as {logged:.6g} of both. It is {what}. {fix}, or set num_microbatches: 1.",
            stacklevel=2,
        )


def _compare_results(step: _JoinedStep, rounding: float) -> None:
    """Warn of what the step returns, or puts into attributes, for two microbatches otherwise than for both as one."""
    samples = [part.samples for part in next(iter(step.microbatches.values()))[:2]]
    one, other, both, again = (step.results[index] for index in range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # merging has told of what it guesses
        joined = merge([one, other], samples)
        differing = [] if [*_unlike(one, again, rounding * _LEAST)] else [*_unlike(joined, both, rounding)]
        found = [(f"what it returns{where}", got, expected) for where, got, expected in differing]
        for name, expected in step.rows[2].items():
            first, second, before = step.rows[0].get(name), step.rows[1].get(name), step._before.get(name)
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


def _compare_buffers(module: LightningModule, step: _JoinedStep, names: Collection[str]) -> None:
    """Warn of buffers in which microbatches, one after the other, leave something else than both as one.

    Args:
        module: the user's module.
        step: that has run.
        names: of buffers that both as one have changed.
    """
    parts, whole = step.buffers[0] | step.buffers[1], step.buffers[2]
    rounding = _rounding(module, torch.float32)
    found = [name for name in sorted(names) if name in parts and [*_unlike(parts[name], whole[name], rounding)]]
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        warnings.warn(
            f"training_step: the buffer {found[0]!r}{more} is written for each microbatch, and two leave something "
            "else in it than both as one batch. Write to it in on_train_batch_end, or set num_microbatches: 1.",
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


FEATURE = FirstBatchChecks
