"""The one wire format: a header in JSON that is sent once, and the bytes of tensors.

Used between stages (`Transport`), within a group and from rank to rank (`TreeChannel`). Nothing is ever unpickled.
Both ends compute from the same sizes which message holds what:

1. The first message: two int64 (slot of the header; its bytes, 0 when the receiver knows the header), then the header
   and as many tensors as there is room for.
2. The header, where the first message had no room for it.
3. The other tensors, in one message where they are small.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.config.errors import RemoteParameterError
from lightning_mm5d.stage.payload import Packer, rebuild

CONTROL_BYTES = 16
PACK_BYTES = 64 * 1024  # smaller tensors that have no room in the first message share one
HEADER_SLOTS = 256  # headers that both ends remember
_TREE_ROOM = 4096  # bytes of a tree's first message, which has this length on every rank


class Header(NamedTuple):
    """The description that equal payloads share.

    Attributes:
        meta: the sender's JSON.
        leaves: dtype and shape of each tensor.
        sizes: bytes of each tensor that is not empty.
    """

    meta: Any
    leaves: list[tuple[torch.dtype, tuple[int, ...]]]
    sizes: list[int]

    @classmethod
    def parse(cls, text: str) -> Header:
        """Read the JSON that `describe` wrote."""
        meta, tensors = json.loads(text)
        leaves = [(getattr(torch, dtype), tuple(shape)) for dtype, *shape in tensors]
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in leaves if 0 not in shape]
        return cls(meta, leaves, sizes)


def describe(meta: Any, leaves: Sequence[Tensor]) -> str:
    """Return the header of a payload as JSON.

    Raises:
        TypeError: when ``meta`` cannot be written as JSON.
    """
    return json.dumps([meta, [[str(leaf.dtype).removeprefix("torch."), *leaf.shape] for leaf in leaves]])


class SentHeaders:
    """The headers that a receiver knows, kept by the sender; the oldest gives up its slot."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}

    def slot(self, header: str) -> tuple[int, bytes]:
        """Return the slot of `header`, and its text where the receiver does not know it yet."""
        slots, text = self._slots, b""
        if header not in slots:
            text = header.encode()
            slots[header] = len(slots) if len(slots) < HEADER_SLOTS else slots.pop(next(iter(slots)))
        return slots[header], text


class TreeChannel:
    """Carries pytrees from one rank to others outside of a schedule, for instance the result of a step.

    Every rank that takes part makes one and calls `send` or `receive` equally often; both wait.

    Args:
        move: sends one message ``[bytes]`` of uint8, or receives it into the tensor.
        device: where messages live.
        host: the same as `move` for messages in host memory. With it only tensors of `device` go by `move`, so that
            no end waits for the device to know what comes; None sends everything by `move`.
    """

    def __init__(
        self, move: Callable[[Tensor], Any], device: torch.device, host: Callable[[Tensor], Any] | None = None
    ) -> None:
        self._move, self._device, self._host = move, device, host
        self._sent, self._received = SentHeaders(), dict[int, Header]()

    @classmethod
    def within(
        cls, group: dist.ProcessGroup | None, src: int, device: torch.device, host: dist.ProcessGroup | None = None
    ) -> TreeChannel:
        """Return a channel from the global rank `src` to all ranks of its `group`, and of `host` where it is given."""

        def sends(way: dist.ProcessGroup | None) -> Callable[[Tensor], Any]:
            return lambda message: dist.broadcast(message, src, group=way)

        return cls(sends(group), device, None if host is None else sends(host))

    def send(self, tree: Any) -> None:
        """Send `tree`: tensors, paths and plain values in containers.

        Raises:
            ValueError: on all ranks of the channel, when the tree holds another object.
        """
        packer = Packer()
        try:
            packed_tree = packer.describe(tree)
            tensors = [tensor.detach() for tensor in packer.tensors]
            apart = [index for index, tensor in enumerate(tensors) if self._goes_apart(tensor)]
            description = [None, packed_tree, json.loads(describe(apart, [tensors[index] for index in apart]))]
            leaves = [tensor.to(self._near) for index, tensor in enumerate(tensors) if index not in apart]
            parts = [bytes_of(leaf) for leaf in leaves if leaf.numel()]
            header = describe(description, leaves)
        except (ValueError, RuntimeError, TypeError) as error:  # also of tensors without memory, while others wait
            refused = (
                str(error) if isinstance(error, ValueError) else f"a tensor cannot be sent to other ranks: {error}"
            )
            self._send(describe([refused, None, None], []), [])
            if isinstance(error, RemoteParameterError):
                raise
            raise ValueError(refused) from error
        self._send(header, parts)
        for index in apart:
            if tensors[index].numel():
                self._move(bytes_of(tensors[index]))

    @property
    def _near(self) -> torch.device:
        return self._device if self._host is None else torch.device("cpu")

    def _goes_apart(self, tensor: Tensor) -> bool:
        return self._host is not None and tensor.device == self._device

    def _send(self, header: str, parts: list[Tensor]) -> None:
        first, *others = messages(*self._sent.slot(header), parts, _TREE_ROOM, self._near)
        padded = first.new_zeros(_TREE_ROOM)  # a broadcast has one length on all ranks
        padded[: len(first)] = first
        for message in (padded, *others):
            (self._host or self._move)(message)

    def receive(self) -> Any:
        """Return the next tree; its tensors are where messages live, those of the host in host memory.

        Raises:
            ValueError: the sender refused its tree.
        """

        def fill(*buffers: Tensor) -> None:
            for buffer in buffers:
                (self._host or self._move)(buffer)

        first = torch.empty(_TREE_ROOM, dtype=torch.uint8, device=self._near)
        header, near = receive(fill, first, self._received)
        refused, description, far = header.meta
        if refused is not None:
            raise ValueError(refused)
        apart = Header.parse(json.dumps(far))
        filled = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in apart.sizes]
        for buffer in filled:
            self._move(buffer)
        leaves = dict(zip(apart.meta, leaves_of(apart, filled, self._device), strict=True))
        rest = iter(near)
        return rebuild(description, [leaves[i] if i in leaves else next(rest) for i in range(len(leaves) + len(near))])


def broadcast_tree(tree: Any, src: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """Return the tree of the global rank `src` on every rank of `group`; collective.

    Args:
        tree: read on that rank only, which gets this very object.
        src: global rank.
        device: where messages live, and tensors on other ranks.
        group: None for the default group.

    Raises:
        ValueError: on all ranks, when the tree holds something other than tensors, paths and plain values.
    """
    channel = TreeChannel.within(group, src, device)
    if dist.get_rank() != src:
        return channel.receive()
    channel.send(tree)
    return tree


def send_tree(tree: Any, dst: int, device: torch.device) -> None:
    """Send `tree` to the global rank `dst`, which calls `receive_tree`."""
    TreeChannel(lambda message: dist.send(message, dst), device).send(tree)


def receive_tree(src: int, device: torch.device) -> Any:
    """Return the tree that the global rank `src` sends with `send_tree`."""
    return TreeChannel(lambda message: dist.recv(message, src), device).receive()


def messages(slot: int, text: bytes, parts: list[Tensor], room: int, device: torch.device) -> list[Tensor]:
    """Return the messages of one payload, one-dimensional tensors of uint8.

    Args:
        slot: of the header.
        text: the header where the receiver does not know it, else empty.
        parts: bytes of the tensors that are not empty.
        room: bytes of the first message's buffer.
        device: where messages live.
    """
    first = [torch.tensor([slot, len(text)], device=device).view(torch.uint8)]
    header: list[Tensor] = []
    if text:
        encoded = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        (first if CONTROL_BYTES + len(text) <= room else header).append(encoded)
    sizes = [part.numel() for part in parts]
    riding = _riders(sizes, room - CONTROL_BYTES - len(text))
    first += parts[:riding]
    return [torch.cat(first) if len(first) > 1 else first[0], *header, *packed(parts[riding:])]


def packed(parts: list[Tensor]) -> list[Tensor]:
    """Return the messages that carry `parts`, bytes of tensors: one where they are small, else one for each."""
    return [torch.cat(parts)] if _packs([part.numel() for part in parts]) else parts


def buffers(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return memory for the messages that `packed` makes of parts of `sizes` bytes."""
    lengths = [sum(sizes)] if _packs(sizes) else sizes
    return [torch.empty(length, dtype=torch.uint8, device=device) for length in lengths]


def unpacked(filled: list[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return the parts of `sizes` bytes that the messages `filled` have brought."""
    return [piece.clone() for piece in filled[0].split(list(sizes))] if _packs(sizes) else filled


def receive_header(fill: Callable[..., None], first: Tensor, headers: dict[int, Header]) -> tuple[Header, int]:
    """Receive the first message of a payload, and the header where it comes by itself.

    Args:
        fill: as for `receive`.
        first: as for `receive`; in host memory, or reading it waits for the device.
        headers: as for `receive`.

    Returns:
        The header, and where tensors begin in `first`.
    """
    fill(first)
    slot, length = first[:CONTROL_BYTES].view(torch.int64).tolist()
    start = CONTROL_BYTES + length
    if length:
        text = first[CONTROL_BYTES:start]
        if start > first.numel():
            text = torch.empty(length, dtype=torch.uint8, device=first.device)
            fill(text)
        headers[slot] = Header.parse(bytes(text.tolist()).decode())
    return headers[slot], start


def receive(fill: Callable[..., None], first: Tensor, headers: dict[int, Header]) -> tuple[Header, list[Tensor]]:
    """Receive one payload; return its header and its tensors.

    Args:
        fill: receives one message into each of the buffers that it is called with.
        first: buffer for the first message ``[room]``, uint8; free again on return.
        headers: known headers by slot; a new one is added.
    """
    header, start = receive_header(fill, first, headers)
    riding = _riders(header.sizes, first.numel() - start)
    riders, sizes = header.sizes[:riding], header.sizes[riding:]
    parts = [piece.clone() for piece in first[start : start + sum(riders)].split(riders)]
    rest = buffers(sizes, first.device)
    if rest:
        fill(*rest)
    return header, leaves_of(header, parts + unpacked(rest, sizes), first.device)


def leaves_of(header: Header, parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors that a header describes, of the bytes of those that are not empty."""
    filled = iter(parts)
    return [
        torch.empty(shape, dtype=dtype, device=device) if 0 in shape else next(filled).view(dtype).view(shape)
        for dtype, shape in header.leaves
    ]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as uint8 of one dim, a view where the tensor is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def broadcast(tensor: Tensor, src: int) -> Tensor:
    """Return a tensor of any dtype as the global rank `src` has it; collective.

    Gloo and NCCL carry no integers of 16 bits, and no unsigned ones but uint8.

    Args:
        tensor: where messages of the default group live, of one shape and dtype on all ranks; without gaps its memory
            gets the values.
        src: global rank.
    """
    message = bytes_of(tensor)
    dist.broadcast(message, src)
    return message.view(tensor.dtype).view(tensor.shape)


def _riders(sizes: Sequence[int], room: int) -> int:
    """Return how many of the first parts, of ``sizes`` bytes, travel in the first message."""
    return sum(end <= room for end in accumulate(sizes))


def _packs(sizes: Sequence[int]) -> bool:
    """Return whether parts of ``sizes`` bytes travel as one message."""
    return len(sizes) > 1 and sum(sizes) <= PACK_BYTES
