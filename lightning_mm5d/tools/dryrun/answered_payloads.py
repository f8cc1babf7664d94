"""The transport of a dry run: what a rank sends is counted, and what it receives has the form of what would be sent.

Activations have the form that the stage before has sent in a dry run of its own rank. Gradients have that of the
activations which this rank has sent; all that may have a gradient gets one. What arrives is cut by the sender's own
bridge, so that it comes in the same pieces and with the same encoding as there.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_mm5d.engine import codec
from lightning_mm5d.engine.bridge import Bridge, Bridges
from lightning_mm5d.engine.transport import FIRST_BYTES, UNKNOWN, Channel, Shapes
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.tools.dryrun.answered_groups import Messages, add
from lightning_mm5d.tools.planner.hollow_tensors import HollowTensors

Edge = tuple[str, str]


class Sent(NamedTuple):
    """A payload of activations that has left, as it was before it was cut.

    Attributes:
        meta: JSON.
        forms: shape and dtype of each tensor.
        own: positions of those that are shards of their sender.
        place: replica and index of the microbatch.
    """

    meta: Any
    forms: list[tuple[tuple[int, ...], torch.dtype]]
    own: frozenset[int]
    place: tuple[int, int]


Records = Mapping[Edge, Sequence[Sent]]
"""payloads by the names of two stages, in the order in which they left"""


class UnknownPayloadError(Exception):
    """What arrives on an edge is not known yet."""

    def __init__(self, edge: Edge) -> None:
        super().__init__(f"nothing is known of what {edge[0]} sends to {edge[1]}")
        self.edge = edge


class AnsweredTransport:
    """The payloads of one rank; see `Transport`, whose calls it has.

    Args:
        plan: all stages.
        rank: global rank.
        hollow: makes what arrives.
        messages: counts what is sent.
        records: what other ranks send.

    Attributes:
        sent: what this rank has sent, as `records`.
    """

    is_ordered = False
    bytes_required = bytes_sent = unsent = due = 0
    waited = 0.0

    def __init__(self, plan: Plan, rank: int, hollow: HollowTensors, messages: Messages, records: Records) -> None:
        self.sent: defaultdict[Edge, list[Sent]] = defaultdict(list)
        self._plan, self._rank, self._hollow, self._messages, self._records = plan, rank, hollow, messages, records
        self._stages = {str(key): key for key in plan.topology.members}
        self._here: defaultdict[Channel, deque[tuple[Any, list[Tensor]]]] = defaultdict(deque)
        self._numbers: defaultdict[Channel, int] = defaultdict(int)  # of payloads that have arrived
        self._known: defaultdict[int, codec.SentHeaders] = defaultdict(codec.SentHeaders)

    def post(self, channel: Channel, key: Hashable) -> None:
        """Nothing is received ahead."""

    def expect(self, channel: Channel, count: int) -> None:
        """Nothing is received ahead."""

    def send(self, channel: Channel, meta: Any, tensors: Sequence[Tensor], shapes: Shapes = UNKNOWN) -> None:
        """Count the messages of a payload, as `Transport` would send them."""
        leaves = [tensor.detach() for tensor in tensors]
        if channel.dst_rank == self._rank:
            self._here[channel].append((json.loads(json.dumps(meta)), leaves))
            return
        slot, text = self._known[channel.dst_rank].slot(codec.describe([channel.direction, channel.name, meta], leaves))
        parts = [codec.bytes_of(leaf) for leaf in leaves if leaf.numel()]
        found = codec.messages(slot, text, parts, FIRST_BYTES, torch.device("cpu"))
        sent = len(found), sum(message.nbytes for message in found)
        add(self._messages, ("payloads", channel.dst_rank, channel.direction), *sent)

    def recv(self, channel: Channel) -> tuple[Any, list[Tensor]]:
        """Return a payload in the form of what would arrive.

        Raises:
            UnknownPayloadError: nothing is known of it.
        """
        if channel.src_rank == self._rank:
            return self._here[channel].popleft()
        number = self._numbers[channel]
        self._numbers[channel] = number + 1
        first, last = channel.name.split("->")
        back = channel.direction == "gradients"
        edge = (last, first) if back else (first, last)
        known = [*self.sent.get(edge, ()), *(() if back else self._records.get(edge, ()))]
        known = [one for one in known if self._passes(one, edge, channel, back)]
        if not known:
            raise UnknownPayloadError(edge)
        found = known[number % len(known)]  # each step has the same batch
        return self._cut(found, self._stages[edge[0]], self._stages[edge[1]], channel, back)

    def _passes(self, one: Sent, edge: Edge, channel: Channel, back: bool) -> bool:
        """Whether a payload, or its gradient, goes over a channel."""
        ends = [self._plan.topology.ranks_at(self._stages[name], *one.place) for name in edge]
        source, target = ends[::-1] if back else ends
        return channel.src_rank in source and channel.dst_rank in target

    def _cut(
        self, one: Sent, first: StageKey, last: StageKey, channel: Channel, back: bool
    ) -> tuple[Any, list[Tensor]]:
        """What the bridge of the sender gives a channel."""
        numbers = [index for index, has in enumerate(one.meta["grads"]) if has] if back else [*range(len(one.forms))]
        tensors = [self._made(*one.forms[number]) for number in numbers]
        own = frozenset(place for place, number in enumerate(numbers) if number in one.own)
        meta = {"missing": []} if back else one.meta
        catcher = _Catcher(channel.dst_rank)
        bridges = Bridges(self._plan, catcher, channel.src_rank, {})  # type: ignore[arg-type]
        bridges.between(first, last, one.place, back).send(meta, tensors, own, UNKNOWN, one.place)
        return catcher.found

    def _made(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._hollow.of(torch.empty(shape, dtype=dtype, device="meta"))

    def flush(self) -> None:
        """Everything has left."""

    def abort(self, why: str = "") -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing waits."""


@contextmanager
def recorded(transport: Callable[[], AnsweredTransport | None]) -> Generator[None, None, None]:
    """Enter where a rank runs whose activations are to be noted, by its transport once it has one."""
    original = Bridge.send

    def send(
        bridge: Bridge, meta: Any, tensors: Any, own: Any = frozenset(), shapes: Any = UNKNOWN, place: Any = None
    ) -> None:
        if bridge.direction == "activations" and (noting := transport()) is not None and "fails" not in meta:
            first, last = bridge.name.split("->")
            forms = [(tuple(one.shape), one.dtype) for one in tensors]
            noting.sent[first, last].append(Sent(meta, forms, own, place))
        original(bridge, meta, tensors, own, shapes, place)

    with patch.object(Bridge, "send", send):
        yield


class _Catcher:
    """Takes what a bridge of another rank sends to one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.found: tuple[Any, list[Tensor]] = None, []

    def send(self, channel: Channel, meta: Any, tensors: Sequence[Tensor], shapes: Shapes = UNKNOWN) -> None:
        if channel.dst_rank == self._rank:
            self.found = json.loads(json.dumps(meta)), [one.detach().clone() for one in tensors]

    def post(self, channel: Channel, key: Hashable) -> None:
        pass
