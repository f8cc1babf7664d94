"""Compares the loss of the first training batch with the mean of its microbatches' losses, and warns where it is none.

A schedule trains the weighted mean of the losses of microbatches. That is the loss of the batch only where this is a
mean over samples, or over what ``loss_weight`` counts: not a sum, not a comparison of samples with each other, not
what batch statistics or counters change. Nobody would see the difference in a falling loss. Phases, once in a run,
after the first step:

1. Each stage runs, without gradients, the first two microbatches, both as one, and the first one again.
2. The first rank where the first replica's step ends compares; where the first microbatch has two losses, nothing.
3. What the runs have changed is put back: buffers, attributes, metrics, parameters, random generators.

Dropout lets everything pass meanwhile. Any other random number ends the check, because a batch and its microbatches
draw unlike ones; so does an error, as of code that knows the size of microbatches.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_mm5d.data.microbatch import Microbatch, with_tensors
from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.sharded.remote_value import is_remote, plain
from lightning_mm5d.stage.payload import tensors_in
from lightning_mm5d.trainer.kept_values import KeptState
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
_SEE = 'See "Losses that are no mean" in the documentation of batches.'


class JoinedStep(UserStep):
    """A training step without gradients, on two microbatches, on both as one, and on the first one again.

    Args:
        args: as for `UserStep`.
        state: of the module before.
        kwargs: as for `UserStep`.

    Attributes:
        losses: of the last stage, by index of the microbatch.
    """

    forgives = (Exception,)

    def __init__(self, *args: Any, state: KeptState, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: dict[int, Tensor] = {}
        self._state = state

    def structure(self, batch: Any) -> Any:
        """Return a key of its own, so that what real steps are found to do does not come from here."""
        return "joined", super().structure(batch)

    def run(self, microbatch: Microbatch, index: int) -> Any:
        """Call `training_step`; all but the second microbatch begin with the state before the step."""
        if index != 1:
            self._state.begin()
        before = _drawn()
        with torch.compiler.set_stance("force_eager"), _Watched(self, self._module):  # or layers are compiled again
            result = super().run(microbatch, index)
        self.fails |= _drawn() != before
        return result

    def _batch(self, microbatch: Microbatch) -> Any:
        """The batch with tensors of its own, which the step may write to."""
        return with_tensors(super()._batch(microbatch), lambda _, tensor: tensor.clone())

    def finish(self, result: Any, index: int) -> None:
        """Keep the loss."""
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
            self.losses[index] = loss.detach()


class _Watched(TorchFunctionMode):
    """Lets dropout pass everything, notes random numbers, and copies parameters before they are written to.

    Args:
        step: ends where a random number is drawn.
        module: whose parameters are put back at the end.
    """

    def __init__(self, step: JoinedStep, module: nn.Module) -> None:
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
    loggers, state = module.trainer.loggers, KeptState(module)
    module.trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with kept_random_state(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step has warned already
            yield state
    finally:
        state.restore()
        module.trainer.loggers = loggers


def compare(module: LightningModule, step: JoinedStep) -> None:
    """Warn where the loss of two microbatches as one is not the mean of theirs.

    Args:
        module: the user's module.
        step: that has run.
    """
    if step.fails or len(step.losses) < len(next(iter(step.microbatches.values()))):
        return
    rounding = _rounding(module, step.losses[0].dtype)
    one, other, joined, again = (float(step.losses[index]) for index in range(4))
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
