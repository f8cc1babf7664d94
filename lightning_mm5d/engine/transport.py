"""Carries payloads (a pytree's description and its tensors) between the ranks of a pipeline.

Why not `isend` and `irecv` in the schedule: a send completes only when its receiver has posted, so two neighbours that
send to each other deadlock; buffers must be sized before a tensor arrives; and NCCL ignores tags, so several channels
between one pair of ranks would mix up. Here the main thread waits for a peer in `recv` and `flush` only.

One *link* carries everything from one rank to another, in one order:

1. `expect` tells the receiving end how many payloads the step will bring.
2. `send` posts the messages of a payload, as `codec` writes them. A sender thread for each link waits for their
   completion and then lets go of their memory.
3. A receiver thread for each link takes payloads off the wire ahead of their use, in the sender's order, and puts
   each into the queue of the channel that its header names.
4. `recv` takes from that queue, which is first in, first out.

The queues have no bound of their own: a full one would block the payloads of other channels, and so deadlock. The
schedule bounds the number of microbatches under way.

Links to higher ranks use one group and links to lower ranks another. This is for gloo, where messages of a pair of
ranks never wait for those of other pairs, and which carries host memory only: what lives elsewhere is staged. For
backends that run operations in the order of issue there is `OrderedTransport`.

It refuses to go on after the first failure: every later call raises the error that names the lost rank.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.config.errors import RankLostError
from lightning_mm5d.engine import codec

# Each further message costs 0.12 ms on gloo, and several where cores are busy: its receipt is posted only after the
# first one. Gloo takes messages that are shorter than their buffer.
FIRST_BYTES = 1024 * 1024

_Body = Callable[[int, SimpleQueue[Any]], None]  # what a thread does: for a peer, with its inbox


class TransportError(RankLostError):
    """A peer was lost, or the transport is closed. ``rank`` is the peer, None where it was closed here."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


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


@dataclass(frozen=True)
class _Payload:
    meta: Any
    tensors: list[Tensor]
    ready: torch.cuda.Event | None = None  # set where a side stream of a GPU has yet to fill the tensors


class Shapes(NamedTuple):
    """What both ends know of a payload's shapes.

    Attributes:
        key: shapes and plain values of its microbatch.
        promised: whether payloads of this key are described by the same header, each time.
    """

    key: Hashable
    promised: bool

    def marked(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Return a payload's `meta`, which tells the stages after this one whether they can promise something."""
        return meta if self.promised or self.key is None else {**meta, VARIES: True}


UNKNOWN = Shapes(None, promised=False)
VARIES = "varies"
"""in the `meta` of payloads of which nothing is promised"""


class Transport:
    """The payloads that leave and reach one rank.

    Args:
        ascending: group of the whole world for payloads to higher ranks.
        descending: another group of the whole world for payloads to lower ranks.
        device: where received tensors arrive.
        rank: this process's global rank.

    Attributes:
        bytes_required: bytes of the tensors sent to other ranks.
        bytes_sent: the same plus control messages and headers.
        waited: seconds spent blocked in `recv`.
    """

    is_ordered = False

    def __init__(
        self, ascending: dist.ProcessGroup, descending: dist.ProcessGroup, device: torch.device, rank: int
    ) -> None:
        self.bytes_required = 0
        self.bytes_sent = 0
        self.waited = 0.0
        self._groups = (ascending, descending)
        self._device = device
        self._wire = torch.device("cpu")
        self._rank = rank
        self._known: defaultdict[int, codec.SentHeaders] = defaultdict(codec.SentHeaders)  # by receiver
        self._inboxes: dict[tuple[str, int], SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []
        # everything below is shared with the threads, under this condition
        self._changed = threading.Condition()
        self._error: TransportError | None = None
        self._arrived: defaultdict[Channel, deque[_Payload]] = defaultdict(deque)
        self._due: defaultdict[int, int] = defaultdict(int)  # per sender: payloads expected, not yet arrived
        self._unsent = 0  # payloads posted, not yet completed

    def post(self, channel: Channel, key: Hashable) -> None:
        """Do nothing: threads receive ahead what `expect` declares. See `OrderedTransport.post`."""

    def expect(self, channel: Channel, count: int) -> None:
        """Declare that ``count`` more payloads will arrive on ``channel``; they are received from now on.

        Call it at the start of a step for every channel that ends here. From now on a peer that stays silent
        for the group's timeout counts as lost. For a channel from this rank to itself it changes nothing.
        """
        self._raise_if_failed()
        assert channel.dst_rank == self._rank, f"rank {self._rank} does not receive on {channel}"
        if channel.src_rank != self._rank and count:
            with self._changed:
                self._due[channel.src_rank] += count
            self._inbox("recv", channel.src_rank, self._receive).put((channel, count))

    def send(self, channel: Channel, meta: Any, tensors: Sequence[Tensor], shapes: Shapes = UNKNOWN) -> None:
        """Send one payload without waiting for it to leave.

        Tensors travel detached and must not be written to until `flush`. Any dtype, shape and strides will
        do, also no tensors at all. What arrives is contiguous; only a payload to this rank itself is the very
        same memory.

        Args:
            channel: one that starts here.
            meta: what the receiver needs to rebuild the pytree, as JSON (tuples arrive as lists). Each new
                combination of ``meta``, dtypes and shapes costs one more message, so keep counters out of it.
            tensors: the leaves.
            shapes: for transports whose receivers need them ahead.

        Raises:
            TransportError: when a peer is known to be lost.
            TypeError: when ``meta`` cannot be written as JSON.
        """
        self._raise_if_failed()
        assert channel.src_rank == self._rank, f"rank {self._rank} does not send on {channel}"
        leaves = [tensor.detach() for tensor in tensors]
        if channel.dst_rank == self._rank:
            self._deliver(channel, _Payload(json.loads(json.dumps(meta)), leaves))
            return
        header = codec.describe([channel.direction, channel.name, meta], leaves)
        parts = [codec.bytes_of(leaf.to(self._wire)) for leaf in leaves if leaf.numel()]
        size = sum(part.numel() for part in parts)
        slot, text = self._known[channel.dst_rank].slot(header)
        messages = codec.messages(slot, text, parts, FIRST_BYTES, self._wire)
        group = self._group(channel.src_rank, channel.dst_rank)
        try:
            requests = [dist.isend(message, channel.dst_rank, group) for message in messages]
        except RuntimeError as error:
            self._fail(channel.dst_rank, f"sending {channel}", error)
            self._raise_if_failed()
        self.bytes_required += size
        self.bytes_sent += sum(message.nbytes for message in messages)
        with self._changed:
            self._unsent += 1
        self._inbox("send", channel.dst_rank, self._complete).put((channel, requests, messages))

    def recv(self, channel: Channel) -> tuple[Any, list[Tensor]]:
        """Return the next payload of ``channel`` as (meta, tensors), waiting until it is there.

        Raises:
            TransportError: when a peer was lost meanwhile, whichever it was.
        """
        with self._changed:
            queue = self._arrived[channel]
            start = time.perf_counter()
            self._changed.wait_for(lambda: queue or self._error or not self._due[channel.src_rank])
            self.waited += time.perf_counter() - start
            self._raise_if_failed()
            assert queue, (
                f"nothing is left to arrive on {channel}; not yet taken: "
                f"{ {str(other): len(left) for other, left in self._arrived.items() if left} }"
            )
            payload = queue.popleft()
        if payload.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(payload.ready)
            for tensor in payload.tensors:
                tensor.record_stream(stream)
        return payload.meta, payload.tensors

    def flush(self) -> None:
        """Wait until everything sent has been received; at the end of a step.

        Raises:
            TransportError: when a peer was lost meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._unsent)
        self._raise_if_failed()

    @property
    def unsent(self) -> int:
        """Payloads that have yet to leave."""
        return self._unsent

    @property
    def due(self) -> int:
        """Payloads that are expected from other ranks and have yet to arrive."""
        return sum(self._due.copy().values())

    def abort(self, why: str = "") -> None:
        """Refuse all further use, without waiting for anybody; any thread may call it.

        Args:
            why: what ended the run, for the error that a waiting main thread raises.

        A thread that waits for a peer stays until the peer is gone or the group's timeout; it is a daemon.
        """
        self._stop(TransportError(why or f"the transport of rank {self._rank} is closed"))

    def close(self) -> None:
        """Finish the sends and end the threads. After a failure, or with payloads still due, like `abort`."""
        with self._changed:
            idle = self._error is None and not any(self._due.values())
        try:
            if idle:
                self.flush()
        finally:
            self.abort()
        if idle:
            for thread in self._threads:
                thread.join()

    # --- sending end ---

    def _complete(self, dst: int, inbox: SimpleQueue[Any]) -> None:
        """Body of a sender thread: hold messages until they have left."""
        while (sent := inbox.get()) is not None:
            channel, requests, messages = sent
            try:
                for request in requests:
                    request.wait()
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
            except Exception as error:
                self._fail(dst, f"sending {channel}", error)
                return
            del sent, requests, request, messages  # else the memory stays taken until the next send
            with self._changed:
                self._unsent -= 1
                self._changed.notify_all()

    # --- receiving end ---

    def _receive(self, src: int, inbox: SimpleQueue[Any]) -> None:
        """Body of a receiver thread: as many payloads as were expected, into their channels' queues."""
        headers: dict[int, codec.Header] = {}
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8, device=self._wire)
        names: dict[str, None] = {}
        while (item := inbox.get()) is not None:
            channel, count = item
            names[str(channel)] = None
            for _ in range(count):
                try:
                    self._deliver(*self._receive_one(src, first, headers))
                except Exception as error:
                    self._fail(src, f"receiving {', '.join(names)}", error)
                    return

    def _receive_one(self, src: int, first: Tensor, headers: dict[int, codec.Header]) -> tuple[Channel, _Payload]:
        def fill(*buffers: Tensor) -> None:
            self._fill(src, buffers)

        header, leaves = codec.receive(fill, first, headers)
        direction, name, meta = header.meta
        payload = _Payload(meta, [leaf.to(self._device) for leaf in leaves], self._mark())
        return Channel(direction, src, self._rank, name), payload

    def _fill(self, src: int, buffers: Sequence[Tensor]) -> None:
        group = self._group(src, self._rank)
        for request in [dist.irecv(buffer, src, group) for buffer in buffers]:
            assert request is not None
            request.wait()

    def _deliver(self, channel: Channel, payload: _Payload) -> None:
        with self._changed:
            self._arrived[channel].append(payload)
            if channel.src_rank != self._rank:
                self._due[channel.src_rank] -= 1
            self._changed.notify_all()

    # --- both ---

    def _group(self, src: int, dst: int) -> dist.ProcessGroup:
        return self._groups[src > dst]

    def _inbox(self, end: str, peer: int, body: _Body) -> SimpleQueue[Any]:
        """The queue that feeds the thread for this end of the link with ``peer``, started at first use."""
        inbox = self._inboxes.get((end, peer))
        if inbox is None:
            inbox = self._inboxes[end, peer] = SimpleQueue()
            name = f"mm5d-{end}-{peer}"
            thread = threading.Thread(target=self._work, args=(body, peer, inbox), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return inbox

    def _work(self, body: _Body, peer: int, inbox: SimpleQueue[Any]) -> None:
        with torch.cuda.stream(torch.cuda.Stream(self._device)) if self._device.type == "cuda" else nullcontext():
            body(peer, inbox)

    def _mark(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def _fail(self, peer: int, doing: str, error: Exception) -> None:
        reason = str(error).splitlines()[0]
        failure = TransportError(f"rank {self._rank} lost rank {peer} while {doing}: {reason}", peer)
        failure.__cause__ = error
        self._stop(failure)

    def _stop(self, error: TransportError) -> None:
        """Keep the first error, wake the main thread, and let idle threads end."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        for inbox in list(self._inboxes.values()):
            inbox.put(None)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error
