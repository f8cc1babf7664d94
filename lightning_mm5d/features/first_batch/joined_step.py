"""A step on two microbatches, on both as one, and on the first one again, of which nothing stays.

It keeps no graph, unless the step itself asks for gradients: then all of it runs once more, with graphs.

Dropout lets everything pass meanwhile. Any other random number ends it, because a batch and its microbatches draw
unlike ones; so does an error, as of code that knows the size of microbatches, and a file that is opened to be written.

A value that a step writes and that does not change tells nothing: a moving average of weights begins as a copy of them.
So runs note what they write, and begin, where they are told so, with other values of these buffers and frozen weights.
"""

from __future__ import annotations

import builtins
import io
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

from lightning_mm5d.data.microbatch import Microbatch, with_tensors
from lightning_mm5d.data.random_state import kept_random_state, seed_of
from lightning_mm5d.partition.parts import is_lightnings
from lightning_mm5d.sharded.own_backwards import ORIGINALS
from lightning_mm5d.sharded.remote_value import is_remote, plain
from lightning_mm5d.sharded.removable import meanwhile, put
from lightning_mm5d.sharded.tensor import written_by
from lightning_mm5d.sharded.torch_internals import version_of
from lightning_mm5d.stage.payload import detached
from lightning_mm5d.trainer.kept_values import LONG, KeptState
from lightning_mm5d.trainer.logs import LogCall, LogOptions
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
_MOST = 2**20
"""elements of a tensor in an attribute that is compared"""
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
        entries: what containers, tensors and texts in attributes hold there, by name, by index of the microbatch.
        held: the same before all runs.
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
        self.entries: dict[int, dict[str, Any]] = {}
        self.buffers: dict[int, dict[str, Tensor]] = {}
        self.start: dict[str, Tensor] = {}
        self.written = set[str]()
        self.opens = self.lacks_graph = False
        self.logs: dict[int, dict[tuple[LogOptions, int], LogCall]] = {}
        self._state, self.before, self._others = state, dict(vars(self._module)), others
        self.held = _entries(self._module)
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
        arrays = {name: value for name, value in new.items() if isinstance(value, (Tensor, np.ndarray))}
        self.rows[index] = {name: value for name, value in arrays.items() if tensor_of(value) is not None}
        self.numbers[index] = {name: float(value) for name, value in new.items() if self._is_number(name, value)}
        self.entries[index] = _entries(self._module)

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


class Listed(NamedTuple):
    """A list, and what it held."""

    owner: list[Any]
    values: list[Any]


def _entries(module: LightningModule) -> dict[str, Any]:
    """What attributes of a module and dicts there hold: copies of lists, tensors and arrays, and texts.

    Of dicts and sets how many entries they have; numbers in dicts alone; no tensors that `tensor_of` leaves out.
    """
    entries: dict[str, Any] = {}
    for name, value in vars(module).items():
        if is_lightnings(module, name):
            continue
        inner = value.items() if isinstance(value, dict) and len(value) <= LONG else ()
        for path, part in ((name, value), *((f"{name}[{key!r}]", entry) for key, entry in inner)):
            if isinstance(part, (dict, set)):
                entries[path] = len(part)
            elif isinstance(part, str) or (path is not name and type(part) in (int, float)):
                entries[path] = part
            elif isinstance(part, list):
                entries[path] = Listed(part, [*part])
            elif type(part) is np.ndarray and part.size <= _MOST and tensor_of(part) is not None:
                entries[path] = part.copy()
            elif type(part) is Tensor and part.numel() <= _MOST and tensor_of(part) is not None:
                entries[path] = part.detach().clone()
    return entries


def tensor_of(value: Any) -> Tensor | None:
    """Return an array or a number as a tensor; None of what torch cannot compare: texts, sparse or nested tensors.

    Args:
        value: of any type.
    """
    if isinstance(value, Tensor):
        return None if value.layout != torch.strided or value.is_nested or value.is_meta else value
    if not isinstance(value, (np.ndarray, float, int)):
        return None
    try:
        return torch.as_tensor(value.copy() if isinstance(value, np.ndarray) else value)  # without negative strides
    except (TypeError, ValueError, RuntimeError):
        return None


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
    state = KeptState(module)
    loggers = [DummyLogger() for _ in module.trainer.loggers]
    with meanwhile(module.trainer, loggers=loggers), kept_random_state(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step has warned already
        try:
            yield state
        finally:
            state.restore()
