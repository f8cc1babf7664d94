"""How a payload looks on the wire: a first message with control words, header and small tensors, then what is left.

Both ends derive from the same sizes what is in which message, so nothing is said about that. Messages are posted in
order on one link: (1) the first: two int64 (header slot, header bytes: 0 when the receiver knows the header), behind
them the header and the tensors as far as there is room; (2) the header, where it had none; (3) the other tensors, as
one message where they are small.

On NCCL, where a message must be as long as its buffer, there is room for the control words only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

CONTROL_BYTES = 16
# Each further message costs 0.12 ms on gloo, which takes messages that are shorter than the buffer.
FIRST_BYTES = 256 * 1024
PACK_BYTES = 64 * 1024  # below this, one message for all tensors that have no room in the first


@dataclass(frozen=True)
class Channel:
    """A directed first-in-first-out queue of payloads between two stages.

    Args:
        direction: what it carries; part of the name only, it does not choose the way.
        src_rank: global rank that sends.
        dst_rank: global rank that receives; may equal ``src_rank``, then nothing touches the network.
        name: unique for this direction and pair of ranks, for instance ``"vision.0->language.0"``.
    """

    direction: Literal["activations", "gradients"]
    src_rank: int
    dst_rank: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.direction})"


class Header(NamedTuple):
    """What is said once of all payloads that are alike.

    Attributes:
        channel: that they travel on.
        meta: the sender's.
        leaves: dtype and shape of each tensor.
        sizes: in bytes, of the tensors that are not empty.
    """

    channel: Channel
    meta: Any
    leaves: list[tuple[torch.dtype, tuple[int, ...]]]
    sizes: list[int]

    @classmethod
    def parse(cls, text: str, *, src: int, dst: int) -> Header:
        """Read what `describe` wrote, on the way from rank `src` to rank `dst`."""
        read = json.loads(text)
        direction, name = read["channel"]
        leaves = [(getattr(torch, dtype), tuple(shape)) for dtype, *shape in read["tensors"]]
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in leaves if 0 not in shape]
        return cls(Channel(direction, src, dst, name), read["meta"], leaves, sizes)


def describe(channel: Channel, meta: Any, leaves: Sequence[Tensor]) -> str:
    """Return the header of a payload as JSON.

    Raises:
        TypeError: when ``meta`` cannot be written as JSON.
    """
    tensors = [[str(leaf.dtype).removeprefix("torch."), *leaf.shape] for leaf in leaves]
    return json.dumps({"channel": [channel.direction, channel.name], "meta": meta, "tensors": tensors})


def messages(slot: int, text: bytes, parts: list[Tensor], room: int, device: torch.device) -> list[Tensor]:
    """Return what is sent for a payload, one-dimensional tensors of uint8.

    Args:
        slot: of the header.
        text: of the header where it is new, else empty.
        parts: the tensors' bytes, those that are not empty.
        room: bytes of the first message.
        device: where messages live.
    """
    first = [torch.tensor([slot, len(text)], device=device).view(torch.uint8)]
    own: list[Tensor] = []
    if text:
        encoded = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        (first if CONTROL_BYTES + len(text) <= room else own).append(encoded)
    sizes = [part.numel() for part in parts]
    riding = _riders(sizes, room - CONTROL_BYTES - len(text))
    rest = parts[riding:]
    if _packs(sizes[riding:]):
        rest = [torch.cat(rest)]
    first += parts[:riding]
    return [torch.cat(first) if len(first) > 1 else first[0], *own, *rest]


def receive(
    fill: Callable[..., None], first: Tensor, headers: dict[int, Header], parse: Callable[[str], Header]
) -> tuple[Header, list[Tensor]]:
    """Receive one payload; return its header and its tensors.

    Args:
        fill: receives one message into each of the buffers that it is called with.
        first: buffer for the first message ``[room]``, uint8; free again on return.
        headers: those that are known by slot; a new one is added.
        parse: reads a header.
    """
    room, device = first.numel(), first.device
    fill(first)
    slot, length = first[:CONTROL_BYTES].view(torch.int64).tolist()
    start = CONTROL_BYTES + length
    if length:
        text = first[CONTROL_BYTES:start]
        if start > room:
            text = torch.empty(length, dtype=torch.uint8, device=device)
            fill(text)
        headers[slot] = parse(bytes(text.tolist()).decode())
    header = headers[slot]
    riding = _riders(header.sizes, room - start)
    parts = []
    for size in header.sizes[:riding]:
        parts.append(first[start : start + size].clone())
        start += size
    sizes = header.sizes[riding:]
    if _packs(sizes):
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        fill(packed)
        parts += [piece.clone() for piece in packed.split(sizes)]
    else:
        rest = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        fill(*rest)
        parts += rest
    filled = iter(parts)
    return header, [
        torch.empty(shape, dtype=dtype, device=device) if 0 in shape else next(filled).view(dtype).view(shape)
        for dtype, shape in header.leaves
    ]


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's memory as uint8 of one dim; a view where the tensor is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _riders(sizes: Sequence[int], room: int) -> int:
    """How many of the first parts, of ``sizes`` bytes, travel in the first message; both ends ask."""
    return sum(end <= room for end in accumulate(sizes))


def _packs(sizes: Sequence[int]) -> bool:
    """Whether parts of ``sizes`` bytes travel as one message; both ends ask."""
    return len(sizes) > 1 and sum(sizes) <= PACK_BYTES
