"""A stream of the device for messages, beside the one that computes; without CUDA there is one order for both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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
