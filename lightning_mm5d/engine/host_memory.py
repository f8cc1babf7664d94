"""Copies tensors of a device to host memory and back, beside what the device computes.

On CUDA a copy runs on a stream of its own, from and to pinned memory. Elsewhere it is over when the call returns. A CPU
is its own host, and still copies: so what moves there is what would move on a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.engine.free_memory import free_memory


class HostMemory:
    """The host memory of one rank.

    Args:
        device: where the rank computes.
        ranks: of this host.

    Attributes:
        bytes_out: copied to the host so far.
        bytes_back: copied to the device so far.
        bytes_held: on the host now.
    """

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        self._ranks = ranks
        self.bytes_out = self.bytes_back = self.bytes_held = 0
        self.device = device
        is_cuda = device.type == "cuda"
        # what comes back is waited for sooner than what leaves
        self._out: Any = torch.cuda.Stream(device) if is_cuda else None
        self._back: Any = torch.cuda.Stream(device, priority=-1) if is_cuda else None

    def check_room(self, field: str, count: int, what: str) -> None:
        """Refuse to begin what the host has no room for.

        Args:
            field: path of the field that asks for it.
            count: bytes that each rank of this host will keep there.
            what: these bytes are.

        Raises:
            ConfigError: the ranks of the host would keep more than it has.
        """
        free, need = free_memory(), count * self._ranks
        if free is not None and need > free:
            rule = f"The {self._ranks} ranks of this host would keep {need / 2**30:.3g} GiB of {what} there"
            raise ConfigError(
                field,
                "activations",
                f"{rule}, and it has {free / 2**30:.3g} GiB free",
                "Use activation_checkpointing, fewer or smaller microbatches, or leave it out",
            )

    def store(self, tensor: Tensor) -> Stored:
        """Begin to copy a tensor of the device to the host; the caller may let go of it at once."""
        with self._after_computing(self._out):
            host = torch.empty_like(tensor, device="cpu", pin_memory=self._out is not None)
            host.copy_(tensor, non_blocking=self._out is not None)
            if self._out is not None:
                tensor.record_stream(self._out)  # its memory is not given away before it is copied
        size = tensor.numel() * tensor.element_size()
        self.bytes_out += size
        self.bytes_held += size
        return Stored(self, host, self._out and self._out.record_event())

    def load(self, stored: Stored) -> tuple[Tensor, Any]:
        """Begin to copy a tensor back; return it with the event that computations with it wait for."""
        # allocated for the stream that computes, in whose order its memory is given away again
        tensor = torch.empty_like(stored.host, device=self.device)
        with self._after_computing(self._back):
            if stored.written is not None:
                self._back.wait_event(stored.written)
            tensor.copy_(stored.host, non_blocking=self._back is not None)
            if self._back is not None:
                tensor.record_stream(self._back)
        self.bytes_back += tensor.numel() * tensor.element_size()
        return tensor, self._back and self._back.record_event()

    def _after_computing(self, stream: Any) -> Any:
        """Enter `stream`, which waits for what the device was told to compute so far."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)


class Stored:
    """A tensor in host memory, until it is dropped.

    Args:
        memory: that holds it.
        host: its copy.
        written: the event after which the copy is whole; None where it is.
    """

    def __init__(self, memory: HostMemory, host: Tensor, written: Any) -> None:
        self.host, self.written = host, written
        self._memory = memory
        self._loading: tuple[Tensor, Any] | None = None

    def __del__(self) -> None:
        self._memory.bytes_held -= self.host.numel() * self.host.element_size()

    def fetch(self) -> None:
        """Begin to copy it back to the device."""
        if self._loading is None:
            self._loading = self._memory.load(self)

    def take(self) -> Tensor:
        """Return it on the device, for the stream that computes now; the same tensor each time."""
        self.fetch()
        assert self._loading is not None
        tensor, event = self._loading
        if event is not None:
            torch.cuda.current_stream(self._memory.device).wait_event(event)
        return tensor

    def drop(self) -> None:
        """Forget what `fetch` copied, which lives as long as others use it."""
        self._loading = None

    def wait(self) -> Tensor:
        """Return the copy on the host when it is whole."""
        if self.written is not None:
            self.written.synchronize()
            self.written = None
        return self.host
