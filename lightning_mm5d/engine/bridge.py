"""Carries payloads from the ranks that share one stage to the ranks that share the next, with each byte sent once.

All sources hold the same payload and all targets need all of it. Sent from one source, it would leave the other links
idle; sent from each source to each target, it would cross several times. So, for a payload:

1. *Divide*: source i of a covers elements ``n i // a`` to ``n (i + 1) // a`` of a tensor of n elements, target j of b
   covers ``n j // b`` to ``n (j + 1) // b``. Their overlap travels from i to j. Which pairs overlap follows from a and
   b alone, so both ends know beforehand how many payloads each channel brings.
2. *Join*: each target puts the pieces of its interval together.
3. *Gather*: the targets exchange their intervals, all tensors in one collective.

Tensors under 1 KiB are not split: each target gets the full tensor from the source that covers its beginning, so they
cross once per target. So do *own* tensors, of which each source holds a shard for the target of the same index.

A piece whose source and target are the same rank does not touch the network. Where every target is a source too,
nothing is sent or gathered, and a target receives the very same memory. One source and one target use the transport as
it is.

Where payloads are encoded, each source encodes its tensors before they are divided, and each target decodes what it has
joined. So all targets have the same values to the bit, whatever way they came. What stays in its memory is exact.

Sending never waits. Receiving waits for the other targets where there is something to gather, so these must receive
in the same order. Gradients take a bridge of their own, with sources and targets exchanged.

It refuses own tensors between groups of different sizes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.engine import codec
from lightning_mm5d.engine.ordered_transport import Wire
from lightning_mm5d.engine.transport import UNKNOWN, Channel, Shapes
from lightning_mm5d.plan.plan import Plan, encoding_of
from lightning_mm5d.plan.topology import pairs_of
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.collectives import Encoding, TensorGroup, message_device
from lightning_mm5d.sharded.torch_internals import all_gather_single

WHOLE_BYTES = 1024  # a tensor of fewer bytes is not split


class Bridge:
    """Carries payloads from some ranks to some others. Every rank of either makes one with equal arguments.

    Args:
        transport: of this rank.
        rank: this process's global rank.
        direction: what it carries, as for a `Channel`.
        name: of the edge, as for a `Channel`.
        sources: global ranks that send, ascending.
        targets: global ranks that receive, ascending; may share ranks with ``sources``.
        group: process group of exactly ``targets``; None where there is one, or where this rank is none of them.
        encoding: of what is sent; None sends it as it is.

    Attributes:
        direction: as given.
        name: as given.
        gathered: bytes that this rank has sent to the other targets, counted as in a ring.
    """

    def __init__(
        self,
        transport: Wire,
        *,
        rank: int,
        direction: Literal["activations", "gradients"],
        name: str,
        sources: tuple[int, ...],
        targets: tuple[int, ...],
        group: dist.ProcessGroup | None,
        encoding: Encoding | None = None,
    ) -> None:
        for ranks in (sources, targets):
            assert ranks == tuple(sorted(set(ranks))) != (), f"the ranks of {name} must ascend, got {ranks}"
        self.direction, self.name, self.gathered = direction, name, 0
        self._transport, self._rank = transport, rank
        self._sources, self._targets, self._group = sources, targets, group
        is_local = set(targets) <= set(sources)
        self._encoding = None if is_local else encoding
        self._is_plain = is_local or len(sources) == len(targets) == 1  # payloads travel as they are
        ways = [(Channel(direction, sources[i], targets[j], name), i, j) for i, j in pairs_of(sources, targets)]
        self._ways = [way for way in ways if rank in (way[0].src_rank, way[0].dst_rank)]
        self._outgoing = [way for way in ways if way[0].src_rank == rank]
        self._incoming = [channel for channel, _, _ in ways if channel.dst_rank == rank]  # in the order of sources
        if rank in targets and len(targets) > 1 and not is_local:
            members = None if group is None else tuple(dist.get_process_group_ranks(group))
            assert members == targets, f"{name} gathers on ranks {targets}, but its group has {members}"

    def expect(self, count: int) -> None:
        """Declare that ``count`` more payloads will arrive here; see `Transport.expect`."""
        for channel in self._incoming:
            self._transport.expect(channel, count)

    def post(self, key: Hashable) -> None:
        """Issue the receives of the next payload, where this rank only receives; else `send` does it in its order.

        Args:
            key: see `Shapes`.
        """
        if not self._outgoing:
            for channel in self._incoming:
                self._transport.post(channel, key)

    def send(
        self,
        meta: Any,
        tensors: Sequence[Tensor],
        shards: frozenset[int] = frozenset(),
        shapes: Shapes = UNKNOWN,
        place: Hashable = None,
    ) -> None:
        """Send one payload without waiting; every source calls it with equal arguments. See `Transport.send`.

        Args:
            meta: JSON, equal on all sources.
            tensors: of any shape and strides, equal on all sources but for ``shards``.
            shards: positions of tensors that go whole to the target of the same index; equal on all sources, which are
                then as many as the targets.
            shapes: what sources and targets know of them; equal on all sources.
            place: of the microbatch, by which a target that is a source takes it in any order; others keep the order.

        Raises:
            TransportError: when a peer is known to be lost.
            TypeError: when ``meta`` cannot be written as JSON.
        """
        a, b = len(self._sources), len(self._targets)
        assert self._rank in self._sources, f"rank {self._rank} does not send on {self.name}"
        assert not shards or a == b, f"{a} sources of {self.name} have no shards of their own for {b} targets"
        assert shards <= set(range(len(tensors))), f"{self.name}: no tensors at {sorted(shards)} of {len(tensors)}"
        if self._encoding is not None:
            meta, tensors = self._encoding.encoded(meta, tensors)
        if self._is_plain:
            for channel, _, _ in self._outgoing:
                self._transport.send(_placed(channel, place), meta, tensors, shapes)
            return
        leaves = [tensor.detach() for tensor in tensors]
        split = [
            None if index in shards or leaf.numel() * leaf.itemsize < WHOLE_BYTES else list(leaf.shape)
            for index, leaf in enumerate(leaves)
        ]
        whole = [leaf for leaf, shape in zip(leaves, split, strict=True) if shape is None]
        flat = [leaf.reshape(-1) for leaf, shape in zip(leaves, split, strict=True) if shape is not None]
        for channel, i, j in self._ways:
            if channel.src_rank != self._rank:
                self._transport.post(channel, shapes.key)
                continue
            pieces = [_overlap(tensor, i, a, j, b) for tensor in flat]
            if i == j * a // b:  # the first of those that send to this target
                pieces += whole
            self._transport.send(_placed(channel, place), [meta, split], pieces, shapes)

    def recv(self, place: Hashable = None) -> tuple[Any, list[Tensor]]:
        """Return the next payload as (meta, tensors), equal on every target, waiting until it is there.

        Args:
            place: as it was sent.

        Tensors are contiguous, except where every target is a source: then they are the very memory that was sent, of
        any strides. A tensor that is not split may be that memory too, where it comes from this rank.

        Raises:
            TransportError: when a peer was lost meanwhile, whichever it was.
            RuntimeError: of torch.distributed, when another target was lost and this one waits to gather.
        """
        meta, tensors = self._received(place)
        return (meta, tensors) if self._encoding is None else self._encoding.decoded(meta, tensors)

    def _received(self, place: Hashable) -> tuple[Any, list[Tensor]]:
        assert self._rank in self._targets, f"rank {self._rank} does not receive on {self.name}"
        arrived = [self._transport.recv(_placed(channel, place)) for channel in self._incoming]
        if self._is_plain:
            return arrived[0]
        meta, shapes = arrived[0][0]
        for channel, ((_, others), _) in zip(self._incoming, arrived, strict=True):
            assert others == shapes, f"{channel}: {others} from {channel.src_rank}, {shapes} from another rank"
        split = [shape for shape in shapes if shape is not None]
        whole = iter(arrived[0][1][len(split) :])
        joined = iter(self._join([tensors[: len(split)] for _, tensors in arrived], split))
        return meta, [next(whole).contiguous() if shape is None else next(joined) for shape in shapes]

    def _join(self, pieces: list[list[Tensor]], shapes: list[list[int]]) -> list[Tensor]:
        """Return tensors of `shapes`, whose pieces for this target are given by source."""
        columns = list(zip(*pieces, strict=True))  # of each tensor, its pieces
        if len(self._targets) == 1 or not shapes:
            return [torch.cat(column).view(shape) for column, shape in zip(columns, shapes, strict=True)]
        b, dtypes = len(self._targets), [column[0].dtype for column in columns]
        lengths = [(math.prod(shape), dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True)]
        rows = [[_length(n, j, b) * itemsize for n, itemsize in lengths] for j in range(b)]  # bytes by target, tensor
        longest = max(sum(row) for row in rows)
        gathered = self._gather(columns, longest)
        if len(shapes) == 1 and gathered.numel() == sum(map(sum, rows)):
            return [gathered.view(dtypes[0]).view(shapes[0])]
        parts = [
            part.split([*row, longest - sum(row)]) for part, row in zip(gathered.split(longest), rows, strict=True)
        ]
        # torch.cat also aligns what was gathered at odd addresses
        return [
            torch.cat([part[k] for part in parts]).view(dtype).view(shape)
            for k, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))
        ]

    def _gather(self, columns: list[tuple[Tensor, ...]], length: int) -> Tensor:
        """Return the bytes of all targets, of which each has at most `length`, padded to that."""
        device = columns[0][0].device
        mine = [codec.bytes_of(piece) for column in columns for piece in column]
        padding = mine[0].new_zeros(length - sum(piece.numel() for piece in mine))
        # as in the transport, gloo gets host memory
        part = torch.cat([*mine, padding]).to(message_device(device, self._group))
        whole = part.new_empty(len(self._targets) * length)
        all_gather_single(whole, part, group=self._group)
        self.gathered += whole.nbytes - length
        return whole.to(device)


def _placed(channel: Channel, place: Hashable) -> Channel:
    """Return a channel of its own for a microbatch that stays on its rank, where schedules are free to reorder it."""
    return replace(channel, name=f"{channel.name}, {place}") if channel.src_rank == channel.dst_rank else channel


def _overlap(flat: Tensor, i: int, a: int, j: int, b: int) -> Tensor:
    """What source i of a and target j of b both cover of `flat`, a view."""
    n = flat.numel()
    return flat[max(n * i // a, n * j // b) : min(n * (i + 1) // a, n * (j + 1) // b)]


def _length(n: int, j: int, b: int) -> int:
    """How many of n elements target j of b covers."""
    return n * (j + 1) // b - n * j // b


class Bridges:
    """The bridges of one rank: between the instances of two stages that run a microbatch, made at first use.

    Args:
        plan: all stages.
        transport: of this rank; None where one stage sends to nobody.
        rank: global rank.
        instances: groups of the ranks that share layers with this one, by their ranks.
    """

    def __init__(
        self, plan: Plan, transport: Wire | None, rank: int, instances: Mapping[tuple[int, ...], TensorGroup]
    ) -> None:
        self._plan, self._transport, self._rank, self._instances = plan, transport, rank, instances
        self._bridges: dict[Any, Bridge] = {}

    def between(self, source: StageKey, target: StageKey, place: tuple[int, int], back: bool = False) -> Bridge:
        """Return the bridge between the instances of two stages that run a microbatch.

        Args:
            source: key of the stage that sends activations.
            target: key of the stage that receives them.
            place: replica and index of the microbatch.
            back: whether gradients travel, from `target` to `source`.
        """
        ends = [self._plan.topology.ranks_at(stage, *place) for stage in (source, target)]
        key = (source, target, *ends, back)
        if key not in self._bridges:
            assert self._transport is not None, "one stage sends to nobody"
            name = f"{source}->{target}"
            if back:
                ends, name = ends[::-1], f"{target}->{source}"
            group = self._instances.get(ends[1])
            sender = self._plan.modalities[(target if back else source).modality]
            self._bridges[key] = Bridge(
                self._transport,
                rank=self._rank,
                direction="gradients" if back else "activations",
                name=name,
                sources=ends[0],
                targets=ends[1],
                group=None if group is None else group.group,
                encoding=encoding_of(sender, "payloads"),
            )
        return self._bridges[key]
