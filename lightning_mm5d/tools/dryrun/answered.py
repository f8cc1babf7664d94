"""Process groups and the transport of one rank alone: other ranks are answered for, and what it sends is counted.

The backend of the groups is registered at torch's public door. A sum, a largest or a gathered value is made of this
rank's own, so that agreements are kept; a broadcast leaves what is there. Torch's ``fake`` backend leaves gathered
values unset, on which agreements would fail. Results of steps that end on another rank are answered.

What the transport receives has the form of what would be sent. Activations have the form that the stage before has sent
in a dry run of its own rank. Gradients have that of the activations which this rank has sent; all that may have a
gradient gets one. What arrives is cut by the sender's own bridge, so that it comes in the same pieces and with the same
encoding as there.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.context_parallel.hooks import layer_ways
from lightning_mm5d.engine import codec
from lightning_mm5d.engine.agreement import Agreement
from lightning_mm5d.engine.bridge import Bridge, Bridges
from lightning_mm5d.engine.run_groups import Groups, Wish
from lightning_mm5d.engine.transport import FIRST_BYTES, UNKNOWN, Channel, Shapes
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.tools.planner.hollow_tensors import HollowTensors

BACKEND = "mm5d_dryrun"


Messages = dict[tuple[str, Any, str], tuple[int, int]]
"""number and bytes of what a rank sends, by what a group is for, its ranks and the operation; payloads by rank"""


def add(messages: Messages, key: tuple[str, Any, str], count: int, size: int) -> None:
    """Count some messages, with all of their bytes."""
    before, bytes_before = messages.get(key, (0, 0))
    messages[key] = before + count, bytes_before + size


class _Done(dist.Work):
    """What has ended as it began."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class AnsweredGroup(dist.ProcessGroup):
    """A process group in which this rank is alone.

    Args:
        options: of torch.
        messages: counts.
        results: returns the messages by which a rank would learn the result of a step.
    """

    def __init__(self, options: Any, messages: Messages, results: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._messages, self._results, self._due = messages, results, deque[Tensor]()

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch keeps it in a backend, of which this group has none
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def shutdown(self) -> None:
        pass

    def _did(self, operation: str, tensors: Iterable[Tensor]) -> _Done:
        add(self._messages, (self.group_desc, self._ranks, operation), 1, sum(tensor.nbytes for tensor in tensors))
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        return self._did("all_reduce", tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        if opts.rootRank != self.rank() and self.group_desc.startswith("replica "):
            self._due.extend(() if self._due else self._results())
            tensors[0].copy_(self._due.popleft())
        return self._did("broadcast", tensors)

    def barrier(self, opts: Any = None) -> _Done:
        return self._did("barrier", ())

    def allgather(self, outputs: Any, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        for output in outputs[0]:
            output.copy_(tensors[0])
        return self._did("all_gather", tensors)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Done:
        output.view(self.size(), *tensor.shape).copy_(tensor)
        return self._did("all_gather", [tensor])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Done:
        output.copy_(tensor.view(self.size(), *output.shape)[self.rank()])
        return self._did("reduce_scatter", [tensor])

    def all_to_all_single(self, output: Tensor, tensor: Tensor, *_: Any) -> _Done:
        output.copy_(tensor.flatten()[:1].expand(output.numel()).view(output.shape))
        return self._did("all_to_all", [tensor])

    def send(self, tensors: list[Tensor], *_: Any) -> _Done:
        return self._did("send", tensors)

    def recv(self, *_: Any) -> _Done:
        return _Done()


class AnsweredGroups(Groups):
    """Makes the groups that one rank is in, all over the backend of dry runs."""

    def make(self, wishes: Iterable[Wish]) -> None:
        for wish in wishes:
            if (key := (wish.ranks, wish.tag)) not in self._registered:
                here = dist.get_rank() in wish.ranks
                group = dist.new_group(list(wish.ranks), backend=BACKEND, group_desc=wish.tag or None) if here else None
                self._registered[key] = group


@contextmanager
def answered(messages: Messages, results: Callable[[], Iterable[Tensor]]) -> Generator[None, None, None]:
    """Enter where process groups are made, which ranks take for those of gloo; statements of ranks agree.

    Layers of ranks that share sequences mix no tokens but where their code shows it: there are no values to compare.

    Args:
        messages: counts what goes over them.
        results: as for `AnsweredGroup`.
    """

    def make_group(options: Any, _: Any) -> dist.ProcessGroup:
        return AnsweredGroup(options, messages, results)

    dist.Backend.register_backend(BACKEND, make_group, extended_api=True, devices=["cpu"])
    gloo = patch.object(dist, "get_backend_config", lambda group=None: "cpu:gloo")
    with gloo, patch.object(Agreement, "check"), patch.object(layer_ways, "differ", lambda *_: False):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


Edge = tuple[str, str]


class Sent(NamedTuple):
    """A payload of activations that has left, as it was before it was cut.

    Attributes:
        meta: JSON.
        forms: shape and dtype of each tensor.
        shards: positions of those that are shards of their sender.
        place: replica and index of the microbatch.
    """

    meta: Any
    forms: list[tuple[tuple[int, ...], torch.dtype]]
    shards: frozenset[int]
    place: tuple[int, int]


Records = Mapping[Edge, Sequence[Sent]]
"""payloads by the names of two stages, in the order in which they left"""


class UnknownPayloadError(Exception):
    """What arrives on an edge is not known yet."""

    def __init__(self, edge: Edge) -> None:
        super().__init__(f"nothing is known of what {edge[0]} sends to {edge[1]}")


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
        answers: whether a bridge of another rank sends now, for that rank.
    """

    is_ordered = answers = False
    bytes_sent = unsent = due = 0

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
        messages = codec.messages(slot, text, parts, FIRST_BYTES, torch.device("cpu"))
        sent = len(messages), sum(message.nbytes for message in messages)
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
        payloads = [*self.sent.get(edge, ()), *(() if back else self._records.get(edge, ()))]
        payloads = [payload for payload in payloads if self._passes(payload, edge, channel, back)]
        if not payloads:
            raise UnknownPayloadError(edge)
        payload = payloads[number % len(payloads)]  # each step has the same batch
        return self._cut(payload, self._stages[edge[0]], self._stages[edge[1]], channel, back)

    def _passes(self, sent: Sent, edge: Edge, channel: Channel, back: bool) -> bool:
        """Whether a payload, or its gradient, goes over a channel."""
        ends = [self._plan.topology.ranks_at(self._stages[name], *sent.place) for name in edge]
        source, target = ends[::-1] if back else ends
        return channel.src_rank in source and channel.dst_rank in target

    def _cut(
        self, sent: Sent, first: StageKey, last: StageKey, channel: Channel, back: bool
    ) -> tuple[Any, list[Tensor]]:
        """What the bridge of the sender gives a channel."""
        numbers = [index for index, has in enumerate(sent.meta["grads"]) if has] if back else [*range(len(sent.forms))]
        forms = [sent.forms[number] for number in numbers]
        tensors = [self._hollow.of(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in forms]
        shards = frozenset(place for place, number in enumerate(numbers) if number in sent.shards)
        meta = {"missing": []} if back else sent.meta
        catcher = _Catcher(channel.dst_rank)
        bridges = Bridges(self._plan, catcher, channel.src_rank, {})  # type: ignore[arg-type]
        self.answers = True
        try:
            bridges.between(first, last, sent.place, back).send(meta, tensors, shards, UNKNOWN, sent.place)
        finally:
            self.answers = False
        return catcher.payload

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
        bridge: Bridge, meta: Any, tensors: Any, shards: Any = frozenset(), shapes: Any = UNKNOWN, place: Any = None
    ) -> None:
        noting = transport()
        if noting is not None and not noting.answers and bridge.direction == "activations" and "fails" not in meta:
            first, last = bridge.name.split("->")
            forms = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
            noting.sent[first, last].append(Sent(meta, forms, shards, place))
        original(bridge, meta, tensors, shards, shapes, place)

    with patch.object(Bridge, "send", send):
        yield


class _Catcher:
    """Takes what a bridge of another rank sends to one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.payload: tuple[Any, list[Tensor]] = None, []

    def send(self, channel: Channel, meta: Any, tensors: Sequence[Tensor], shapes: Shapes = UNKNOWN) -> None:
        if channel.dst_rank == self._rank:
            self.payload = json.loads(json.dumps(meta)), [tensor.detach().clone() for tensor in tensors]

    def post(self, channel: Channel, key: Hashable) -> None:
        pass
