"""Answers of deferred tensors to what never reaches an operator: they answer as ordinary tensors would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mm5d.config.errors import private
from lightning_mm5d.weights.recorded import leaves, mapped

META = torch.device("meta")
SEQUENCES = list | tuple | range | np.ndarray
READERS = frozenset(
    {
        Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
        Tensor.__index__, Tensor.__contains__, torch.tensor, torch.as_tensor, torch.asarray,
    }
)  # fmt: skip


@contextmanager
def unrecorded() -> Iterator[None]:
    """Let operators and functions run without being seen."""
    with private(torch._C, "_DisableTorchDispatch")(), torch._C.DisableTorchFunction():
        yield


class Recorder(Protocol):
    """What answers are asked of."""

    def is_deferred(self, tensor: Tensor) -> bool: ...
    def device_of(self, tensor: Tensor) -> torch.device: ...
    def value(self, tensor: Tensor, asked_by: str) -> Tensor: ...
    def constant(self, tensor: Tensor) -> Tensor: ...


class OrdinaryAnswers(TorchFunctionMode):
    """The part of `DeferredInit` that sees functions rather than operators."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._handlers: dict[Any, Callable[..., Any]] = {
            private(Tensor.device, "__get__"): lambda t, *_: recorder.device_of(t),
            private(Tensor.is_meta, "__get__"): lambda *_: False,
            private(Tensor.is_cpu, "__get__"): lambda t, *_: recorder.device_of(t).type == "cpu",
            private(Tensor.is_cuda, "__get__"): lambda t, *_: recorder.device_of(t).type == "cuda",
            Tensor.cpu: self._cpu,
            Tensor.to: self._to,
            Tensor.new_tensor: self._new_tensor,
            Tensor.set_: self._set,
            Tensor.__getitem__: lambda t, index: t[_with_tensors(index)],
            Tensor.__setitem__: lambda t, index, value: t.__setitem__(_with_tensors(index), value),
        }
        self._set_data = private(Tensor.data, "__set__")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function == self._set_data:
            return self._put_data(*args)
        if function is Tensor.__deepcopy__ and not self._is_deferred(args[0]):
            with unrecorded():  # it sets the storage of an empty tensor
                return function(*args, **kwargs)
        if function in self._handlers and self._is_deferred(args[0]):
            return self._handlers[function](*args, **kwargs)
        if function in READERS and any(self._is_deferred(item) for item in leaves(list(args))):
            name = function.__name__
            args = mapped(lambda t: self._recorder.value(t, name) if self._is_deferred(t) else t, tuple(args))
        return function(*args, **kwargs)

    def _is_deferred(self, item: Any) -> bool:
        return isinstance(item, Tensor) and self._recorder.is_deferred(item)

    def _cpu(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._to(tensor, torch.device("cpu"))

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.to`, where the device that a tensor pretends to be on is no other device."""
        own = self._recorder.device_of(tensor)

        def same(item: Any) -> Any:
            if isinstance(item, str | torch.device) and torch.device(item) == own:
                return tensor.device
            return item

        return tensor.to(*[same(item) for item in args], **{name: same(item) for name, item in kwargs.items()})

    def _new_tensor(self, tensor: Tensor, data: Any, **kwargs: Any) -> Tensor:
        options: dict[str, Any] = {"dtype": tensor.dtype, "device": self._recorder.device_of(tensor)} | kwargs
        return torch.tensor(data, **options)

    def _set(self, tensor: Tensor, *source: Any) -> Tensor:
        """`Tensor.set_`, which makes a deferred tensor real where the source is."""
        if source and source[0].device.type != "meta":
            with unrecorded():
                real = torch.empty(0, dtype=tensor.dtype, device=source[0].device).set_(*source)
                torch.utils.swap_tensors(tensor, real)
            return tensor
        return tensor.set_(*source)

    def _put_data(self, tensor: Tensor, data: Tensor) -> None:
        """`tensor.data = data`, also between deferred and real tensors."""
        if self._is_deferred(tensor) and not data.is_meta:
            data = self._recorder.constant(data)
        if self._is_deferred(data) and not tensor.is_meta:
            other = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
            torch.utils.swap_tensors(tensor, other)
            return
        tensor.data = data


def _with_tensors(index: Any) -> Any:
    """An index with tensors in place of sequences, whose numbers torch would move to the meta device."""
    if isinstance(index, tuple):
        return tuple(torch.tensor(item) if isinstance(item, SEQUENCES) else item for item in index)
    return torch.tensor(index) if isinstance(index, SEQUENCES) else index
