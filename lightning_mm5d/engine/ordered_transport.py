"""Carries payloads between ranks where operations run in the order in which they are issued, as NCCL's do.

A communicator runs its operations one after the other, a send ends only with its receive, and no two threads may use
one at once. So the thread that runs the schedule issues everything:

1. Payloads to higher ranks have a communicator, and those to lower ranks another one, so that what goes forth never
   queues up after what comes back.
2. `post` issues the receives of a payload, which the engine does in the order of `schedule.issue_order`. That order of
   messages is the same on all ranks: the first one that is unfinished has both of its ends at the front. So nothing
   can deadlock, also where a device runs one communication at a time.
3. Both ends know the shapes of a payload from those of its microbatch, which is the `key`. A header travels in host
   memory, over a group of gloo, where the key is new or shapes depend on values. Else nothing goes beside the data,
   and no end waits for the other's host.

Nothing here waits for a device: waiting for a request makes the current stream wait. Receives are issued on a stream
of their own, because a request waits for what the current stream has been given before.

It refuses a payload of other shapes than those that were promised for its key.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.engine import codec
from lightning_mm5d.engine.transport import UNKNOWN, Channel, Shapes, Transport, TransportError

_ROOM = 4096  # bytes of a header's first message
_PROMISES = 256  # that both ends of a channel remember


class _Arrival(NamedTuple):
    """A payload whose receives were issued."""

    header: codec.Header
    buffers: list[Tensor]
    requests: list[dist.Work]


class _Departure(NamedTuple):
    """Messages that may not have left yet."""

    channel: Channel
    requests: list[dist.Work]
    messages: list[Tensor]


class OrderedTransport:
    """The payloads that leave and reach one rank; see `Transport`, whose calls it has.

    Args:
        links: the group of each directed pair of ranks that this rank belongs to, (source, target); pairs may share
            one.
        host: a group of the whole world that carries host memory.
        device: where this rank computes and received tensors arrive.
        rank: this process's global rank.

    Attributes:
        bytes_required: bytes of the tensors sent to other ranks.
        bytes_sent: the same plus headers.
        waited: seconds that the host spent blocked in `post` and `recv`.
    """

    is_ordered = True

    def __init__(
        self,
        links: Mapping[tuple[int, int], dist.ProcessGroup],
        host: dist.ProcessGroup,
        device: torch.device,
        rank: int,
    ) -> None:
        self.bytes_required = 0
        self.bytes_sent = 0
        self.waited = 0.0
        self._links, self._host, self._device, self._rank = links, host, device, rank
        # what other ranks wait for goes before what this one computes
        self._side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._error: TransportError | None = None
        self._promised: defaultdict[Channel, dict[Hashable, str]] = defaultdict(dict)
        self._headers: defaultdict[Channel, dict[Hashable, codec.Header]] = defaultdict(dict)
        self._sent_headers: defaultdict[int, codec.SentHeaders] = defaultdict(codec.SentHeaders)  # by receiver
        self._received_headers: defaultdict[int, dict[int, codec.Header]] = defaultdict(dict)  # by sender
        self._posted: defaultdict[Channel, deque[_Arrival]] = defaultdict(deque)
        self._here: defaultdict[Channel, deque[tuple[Any, list[Tensor]]]] = defaultdict(deque)
        self._departures: deque[_Departure] = deque()
        self._host_departures: list[_Departure] = []
        self._due = 0

    def warm_up(self) -> None:
        """Send a byte over each link, so that its connection exists before a step; every rank calls it."""
        requests = []
        for (src, dst), group in self._links.items():
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            move, peer = (dist.isend, dst) if src == self._rank else (dist.irecv, src)
            requests.append((peer, move(byte, peer, group), byte))
        for peer, request, _ in requests:
            with self._guarded(peer, "connecting"):
                assert request is not None
                request.wait()

    def expect(self, channel: Channel, count: int) -> None:
        """Declare that ``count`` more payloads will arrive on ``channel``, for reports."""
        self._raise_if_failed()
        if channel.src_rank != self._rank:
            self._due += count

    def post(self, channel: Channel, key: Hashable) -> None:
        """Issue the receives of the next payload of ``channel``.

        Args:
            channel: one that ends here.
            key: of the payload's microbatch, equal at both ends: shapes and plain values of its batch.

        Raises:
            TransportError: when the sender was lost.
        """
        self._raise_if_failed()
        if channel.src_rank == self._rank:
            return
        with self._guarded(channel.src_rank, f"receiving {channel}"), self._waiting():
            header = self._headers[channel].get(key)
            if header is None:
                header = self._receive_header(channel, key)
            with nullcontext() if self._side is None else torch.cuda.stream(self._side):
                buffers = codec.buffers(header.sizes, self._device)
                requests = self._issue(dist.irecv, buffers, channel.src_rank, channel)
        self._posted[channel].append(_Arrival(header, buffers, requests))

    def send(self, channel: Channel, meta: Any, tensors: Sequence[Tensor], shapes: Shapes = UNKNOWN) -> None:
        """Send one payload without waiting for it to leave; see `Transport.send`.

        Args:
            channel: one that starts here.
            meta: what the receiver needs to rebuild the pytree, as JSON.
            tensors: the leaves.
            shapes: what both ends know of them.

        Raises:
            TransportError: when a peer is known to be lost.
            RuntimeError: ``meta`` or shapes are not those that were promised.
        """
        self._raise_if_failed()
        leaves = [tensor.detach() for tensor in tensors]
        if channel.dst_rank == self._rank:
            self._here[channel].append((json.loads(json.dumps(meta)), leaves))
            return
        key, promised = shapes
        header = codec.describe([str(channel), promised, meta], leaves)
        known = self._promised[channel].get(key)
        if known is not None and known != header:
            raise RuntimeError(_broken_promise(channel, known, header))
        messages = codec.packed([codec.bytes_of(leaf) for leaf in leaves if leaf.numel()])
        with self._guarded(channel.dst_rank, f"sending {channel}"):
            if known is None:
                self._send_header(channel, header)
                if promised:
                    _remember(self._promised[channel], key, header)
            requests = self._issue(dist.isend, messages, channel.dst_rank, channel)
        size = sum(message.numel() for message in messages)
        self.bytes_required += size
        self.bytes_sent += size
        while self._departures and all(request.is_completed() for request in self._departures[0].requests):
            self._departures.popleft()
        self._departures.append(_Departure(channel, requests, messages))

    def recv(self, channel: Channel) -> tuple[Any, list[Tensor]]:
        """Return the next payload of ``channel``, which was posted, as (meta, tensors).

        Raises:
            TransportError: when the sender was lost.
        """
        self._raise_if_failed()
        if channel.src_rank == self._rank:
            return self._here[channel].popleft()
        header, buffers, requests = self._posted[channel].popleft()
        with self._guarded(channel.src_rank, f"receiving {channel}"), self._waiting():
            for request in requests:
                request.wait()
        if self._side is not None:
            for buffer in buffers:
                buffer.record_stream(torch.cuda.current_stream(self._device))
        self._due -= 1
        name, _, meta = header.meta
        assert name == str(channel), f"{channel} got a payload of {name}"
        return meta, codec.leaves_of(header, codec.unpacked(buffers, header.sizes), self._device)

    def flush(self) -> None:
        """Let go of what was sent, once the device has sent it; at the end of a step.

        Raises:
            TransportError: when a peer was lost meanwhile.
        """
        self._raise_if_failed()
        for channel, requests, _ in (*self._departures, *self._host_departures):
            with self._guarded(channel.dst_rank, f"sending {channel}"):
                for request in requests:
                    request.wait()
        self._departures.clear()
        self._host_departures.clear()

    @property
    def unsent(self) -> int:
        """Payloads that have yet to leave."""
        return len(self._departures)

    @property
    def due(self) -> int:
        """Payloads that are expected from other ranks and have yet to arrive."""
        return self._due

    def abort(self, why: str = "") -> None:
        """Refuse all further use, without waiting for anybody; any thread may call it.

        Args:
            why: what ended the run, for the error that later calls raise.
        """
        self._error = self._error or TransportError(why or f"the transport of rank {self._rank} is closed")

    def close(self) -> None:
        """Finish the sends. After a failure, or with payloads still due, like `abort`."""
        try:
            if self._error is None and not self._due:
                self.flush()
        finally:
            self.abort()

    # --- headers, in host memory ---

    def _send_header(self, channel: Channel, header: str) -> None:
        slot, text = self._sent_headers[channel.dst_rank].slot(header)
        messages = codec.messages(slot, text, [], _ROOM, torch.device("cpu"))
        requests = [dist.isend(message, channel.dst_rank, self._host) for message in messages]
        self._host_departures.append(_Departure(channel, _present(requests), messages))
        self.bytes_sent += sum(message.nbytes for message in messages)

    def _receive_header(self, channel: Channel, key: Hashable) -> codec.Header:
        def fill(buffer: Tensor) -> None:
            dist.recv(buffer, channel.src_rank, self._host)

        first = torch.empty(_ROOM, dtype=torch.uint8)
        header, _ = codec.receive_header(fill, first, self._received_headers[channel.src_rank])
        name, promised, _ = header.meta
        assert name == str(channel), f"{channel} got a header of {name}"
        if promised:
            _remember(self._headers[channel], key, header)
        return header

    # --- both ends ---

    def _issue(self, move: Any, messages: list[Tensor], peer: int, channel: Channel) -> list[dist.Work]:
        group = self._links[channel.src_rank, channel.dst_rank]
        if len(messages) > 1:
            return dist.batch_isend_irecv([dist.P2POp(move, message, peer, group) for message in messages])
        return _present([move(message, peer, group) for message in messages])

    @contextmanager
    def _guarded(self, peer: int, doing: str) -> Iterator[None]:
        """Name the peer in an error of torch.distributed, and raise it from now on."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            failure = TransportError(f"rank {self._rank} lost rank {peer} while {doing}: {reason}", peer)
            self._error = self._error or failure
            raise self._error from error

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error


Wire = Transport | OrderedTransport


def _present(requests: Sequence[dist.Work | None]) -> list[dist.Work]:
    return [request for request in requests if request is not None]


def _remember(promises: dict[Hashable, Any], key: Hashable, header: Any) -> None:
    """Keep a promise; the oldest makes room, on both ends at the same payload."""
    if len(promises) >= _PROMISES:
        del promises[next(iter(promises))]
    promises[key] = header


def _broken_promise(channel: Channel, known: str, header: str) -> str:
    before, now = (
        ", ".join(f"{dtype} {shape}" for dtype, *shape in json.loads(text)[1]) or "no tensors"
        for text in (known, header)
    )
    if before == now:
        now = "the same tensors with another description"
    return (
        f"{channel}: a batch of the same shapes and plain values sent {before} before, and sends {now} now. The "
        "receiver cannot know. Put what this depends on, such as the step's number, into the batch, as a plain number"
    )
