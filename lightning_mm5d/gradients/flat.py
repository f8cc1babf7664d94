"""The memory of the gradients of one bucket: one flat tensor that is kept over steps, of which gradients are views.

Backwards add to these views, so gradients are not copied into a message, and no second copy of them exists. A view that
no backward has added to is no gradient: its version tells, which autograd counts up in host memory.

A flat tensor is used again when nobody holds a view of it. Gradients that are kept over steps stay as they are, and the
bucket gets other memory.

A stream of the device for messages, beside the one that computes; without CUDA there is one order for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import private
from lightning_mm5d.data_parallel.main_parameters import gradient_dtype


class SideStream:
    """The side stream of one rank.

    Args:
        device: where the rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Enter where messages are packed and sent: after what was computed so far, beside what comes."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def reads(self, tensor: Tensor) -> None:
        """Note that the side stream reads a tensor that is let go of before it has done so."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def join(self, results: Iterable[Tensor]) -> None:
        """Let what is computed from now on come after the side stream, and use its `results`."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for result in results:
            result.record_stream(current)


_ALIGNED = 16  # bytes; kernels over many tensors are slow where one begins elsewhere
_holders = private(torch._C, "_storage_Use_Count")


class Flat:
    """Gradients of `parameters` in one flat tensor.

    Args:
        parameters: of one dtype, in one order on all ranks.
        side: the stream on which `pack` and `pack_apart` are called.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], side: SideStream) -> None:
        self._parameters, self._side = parameters, side
        unit = max(_ALIGNED // gradient_dtype(parameters[0]).itemsize, 1)
        self._starts = [0]
        for parameter in parameters:
            self._starts.append(self._starts[-1] + -(-parameter.numel() // unit) * unit)
        # contiguous on all ranks, however a rank lays out a parameter
        self._strides = [torch.empty(parameter.shape, device="meta").stride() for parameter in parameters]
        self._memory: Tensor | None = None
        self._views: list[Tensor] = []

    @property
    def views(self) -> list[Tensor]:
        """The gradients that `lay` or `pack` has placed."""
        return self._views

    def lay(self) -> None:
        """Give each parameter without a gradient its view, before a backward."""
        if not self._views or all(parameter.grad is None for parameter in self._parameters):
            self._begin()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None and view._version == 0:
                parameter.grad = view

    def leave(self) -> None:
        """Take back the views that no backward has added to."""
        for parameter, view in zip(self._parameters, self._views, strict=False):
            if parameter.grad is view and view._version == 0:
                parameter.grad = None

    def pack(self) -> tuple[Tensor, list[bool]]:
        """Take the gradients out of their parameters; return all of them, and which of them were there."""
        self.leave()
        gradients = [parameter.grad for parameter in self._parameters]
        if not self._views:
            self._begin()
        targets, sources = [], []
        for gradient, view in zip(gradients, self._views, strict=True):
            if gradient is None and view._version:
                view.zero_()  # somebody has dropped this gradient after a backward
            elif gradient is not None and gradient is not view:
                targets.append(view)
                sources.append(gradient)
                self._side.reads(gradient)
        _copy(targets, sources)
        for parameter in self._parameters:
            parameter.grad = None
        assert self._memory is not None
        return self._memory, [gradient is not None for gradient in gradients]

    def pack_apart(self) -> tuple[Tensor, list[Tensor]]:
        """Take the gradients out of their parameters; return them in memory of their own, and its views."""
        assert self._memory is not None
        memory = torch.zeros_like(self._memory)
        views = self._cut(memory)
        for parameter, view in zip(self._parameters, views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                self._side.reads(parameter.grad)
            parameter.grad = None
        return memory, views

    def take(self) -> list[Tensor]:
        """Return the views; from now on only the caller holds them."""
        views, self._views = self._views, []
        return views

    def release(self) -> None:
        """Let go of the memory, which lives as long as somebody holds a gradient in it."""
        self._memory, self._views = None, []

    def _begin(self) -> None:
        """Have memory that is zero and that nobody else holds, and views of it."""
        self._views = []
        first = self._parameters[0]
        if self._memory is not None and self._memory.device == first.device and not _is_held(self._memory):
            self._memory.zero_()
        else:
            self._memory = None  # before there is another one
            self._memory = torch.zeros(self._starts[-1], dtype=gradient_dtype(first), device=first.device)
        self._views = self._cut(self._memory)

    def _cut(self, memory: Tensor) -> list[Tensor]:
        places = zip(self._parameters, self._strides, self._starts, strict=False)
        # detached from the flat tensor, so that each counts its own version
        return [memory.as_strided(parameter.shape, stride, start).data for parameter, stride, start in places]


def _is_held(memory: Tensor) -> bool:
    """Whether any tensor but `memory` has its storage."""
    storage = memory.untyped_storage()
    return bool(_holders(storage._cdata) > 2)  # the tensor and `storage`


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
