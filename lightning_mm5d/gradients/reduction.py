"""One sum of all gradients over ranks, whose buckets are sent while backwards still run.

Buckets are sent in one order on all ranks, each as soon as its gradients are final and all buckets before it were sent;
what is left is sent at the end. So ranks may disagree about when a gradient is final, or whether it comes at all: that
changes when a message leaves, and never which message.

Messages that are copies of gradients (rows of parameters) wait for the one before the last: until then their gradients
stay where they are. A backward never waits for other ranks.

What is sent is taken out of its parameter. If a backward adds to that parameter again (a layer that is checkpointed
with reentrance and used twice), the addition stays there. At the end all ranks agree on which gradients there are, and
on those that any rank has added to after it sent them; these are summed too.

**Presence.** Which parameters have a gradient on any rank: agreed by all ranks over messages of the host, once for each
structure.

A batch without images gives encoders no gradient, and other replicas may have images. A parameter has a gradient if any
rank has one for it, as on one process, and all ranks must know that before an optimizer steps.

Two phases:

1. Each rank sends a digest of what it has, and all get the sum of the digests.
2. Where the sum is new, ranks send what they have. All of them remember what came out under that sum.

A sum is new on all ranks at once, because they remember the same ones: so no rank waits for a second phase alone. What
ranks have is known on the host without waiting for a device.

**Order.** Which gradients share a bucket, and in which order buckets are sent: the same on all ranks. A bucket has the
same gradients in all steps: parameters from the last to the first. How a sum of several ranks is rounded may depend on
its place in the message, and a resumed run must round as the uninterrupted one does.

Only the order of buckets is learned. After a sum in which gradients were watched, all ranks agree on the order in which
gradients came: a parameter takes the latest of its places on any rank, each counted as a part of what that rank had.
Buckets with gradients that came again after they had been sent are sent at the end from then on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_mm5d.data_parallel.main_parameters import gradient_dtype
from lightning_mm5d.data_parallel.shared_parameters import SharedParameters
from lightning_mm5d.gradients.buckets import (
    Bucket,
    Draw,
    Flat,
    Piece,
    RowsBucket,
    ScatteredBucket,
    SideStream,
    Sum,
    SummedBucket,
    cut_into_buckets,
)
from lightning_mm5d.sharded.remote_value import plain

_REMEMBERED = 1024  # sums of digests
_DIGEST_BYTES = 12


class Present(NamedTuple):
    """Numbers of parameters.

    Attributes:
        there: those with a gradient on any rank.
        again: those of which any rank got more of a gradient after it was sent.
    """

    there: frozenset[int]
    again: frozenset[int]


class Presence:
    """What all ranks have.

    Args:
        count: of all parameters of the model.
        group: all ranks, with messages in host memory; None for this rank alone.
    """

    def __init__(self, count: int, group: dist.ProcessGroup | None) -> None:
        self._count, self._group = count, group
        self._known: dict[tuple[int, ...], Present] = {}

    def agree(self, there: Iterable[int], again: Iterable[int]) -> Present:
        """Return what any rank has; collective.

        Args:
            there: numbers of the parameters with a gradient on this rank.
            again: numbers of those that got more of it after it was sent.
        """
        if self._group is None:
            return Present(frozenset(there), frozenset(again))
        flags = bytearray(2 * self._count)
        for number in (*there, *(self._count + number for number in again)):
            flags[number] = 1
        sums = torch.tensor(self._digest(bytes(flags)))
        dist.all_reduce(sums, group=self._group)
        key = tuple(sums.tolist())
        if key not in self._known:
            if len(self._known) == _REMEMBERED:
                self._known.clear()
            self._known[key] = self._exchange(flags)
        return self._known[key]

    def latest(self, places: Tensor) -> list[float]:
        """Return the largest of each of some numbers, in host memory, over all ranks; collective."""
        if self._group is not None:
            dist.all_reduce(places, dist.ReduceOp.MAX, self._group)
        return places.tolist()

    def _digest(self, flags: bytes) -> list[int]:
        """Two numbers of 6 bytes, so that the sum over all ranks fits into 8; another rank has others."""
        rank = dist.get_rank(self._group).to_bytes(8, "big")
        digest = hashlib.blake2b(rank + flags, digest_size=_DIGEST_BYTES).digest()
        half = _DIGEST_BYTES // 2
        return [int.from_bytes(digest[:half], "big"), int.from_bytes(digest[half:], "big")]

    def _exchange(self, flags: bytearray) -> Present:
        agreed = torch.tensor(list(flags), dtype=torch.uint8)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, self._group)
        numbers = agreed.nonzero().flatten().tolist()
        there = frozenset(number for number in numbers if number < self._count)
        return Present(there, frozenset(number - self._count for number in numbers if number >= self._count))


REQUIRES_GRAD = attrgetter("requires_grad")
_UNDER_WAY = 2  # messages that are copies of gradients


class Buckets:
    """Buckets in the order in which they are sent.

    Args:
        buckets: all of them.
        early: how many of them may be sent before all backwards are over.
        side: where they are sent.

    Attributes:
        all: `buckets`.
        early: as given.
        side: as given.
        of: numbers of the buckets of each parameter, by its identity.
    """

    def __init__(self, buckets: Sequence[Bucket], early: int, side: SideStream) -> None:
        self.all, self.early, self.side = buckets, early, side
        self.of: dict[int, list[int]] = {}
        for number, bucket in enumerate(self.all):
            for piece in bucket.pieces:
                self.of.setdefault(id(piece.parameter), []).append(number)


class Reduction:
    """One sum of all gradients.

    Args:
        buckets: what is summed.
        presence: what ranks agree on; None where no rank has anything to sum.
        is_early: whether buckets are sent before `finish`; the others are not told.
        inside: whether they are sent inside of the last action of a stage too, and not only at its end.
        is_whole: whether gradients of parameters that are not shared are among them.
        stages: the parameters of each stage of this rank.

    Attributes:
        is_whole: as given.
        final: identities of parameters in the order in which their gradients were final.
        repeated: numbers of parameters that got more of a gradient that had been sent.
    """

    def __init__(
        self,
        buckets: Buckets,
        presence: Presence | None,
        *,
        is_early: bool,
        inside: bool = True,
        is_whole: bool = True,
        stages: Mapping[Hashable, Sequence[nn.Parameter]] | None = None,
    ) -> None:
        self.final: dict[int, None] = {}
        self.repeated: frozenset[int] = frozenset()
        self._buckets, self._presence, self._is_early, self._stages = buckets, presence, is_early, stages or {}
        self._inside, self.is_whole = inside, is_whole
        self._missing = [len(bucket.pieces) for bucket in buckets.all]
        self._started: list[Sum] = []
        self._ended: set[Hashable] = set()

    @contextmanager
    def watched(self, parameters: Iterable[nn.Parameter], backwards: int = 1) -> Iterator[None]:
        """Enter around the last backwards that give gradients to `parameters`, side by side where they are several."""
        given: Counter[int] = Counter()

        def gives(key: int, *_: object) -> None:
            given[key] += 1
            if given[key] >= backwards:
                self._is_final(key)

        trained = [
            parameter for parameter in parameters if parameter.requires_grad and id(parameter) in self._buckets.of
        ]
        nodes = [get_gradient_edge(parameter).node for parameter in trained]  # they live as long as somebody holds them
        with ExitStack() as stack:
            for parameter, node in zip(trained, nodes, strict=True):
                # after the node has added to the gradient, and after hooks that are the user's
                handle = node.register_hook(partial(gives, id(parameter)))
                stack.callback(handle.remove)
            yield

    @contextmanager
    def ending(self, stage: Hashable, put_off: Iterable[nn.Parameter] | None, backwards: int = 1) -> Iterator[None]:
        """Enter around the last action of this rank's `stage` that gives gradients.

        Args:
            stage: a key of `stages`.
            put_off: the only ones that get gradients in it; None for any.
            backwards: how many run side by side in it.
        """
        self._ended.add(stage)
        others = {id(p) for key, of_stage in self._stages.items() if key not in self._ended for p in of_stage}
        final = [parameter for parameter in self._stages.get(stage, ()) if id(parameter) not in others]
        due = {id(parameter) for parameter in (final if put_off is None else put_off)}
        wanted = [parameter for parameter in final if id(parameter) in due]
        for parameter in final:
            if id(parameter) not in due:
                self._note_final(id(parameter))
        is_early, self._is_early = self._is_early, self._is_early and self._inside
        self._send_final()
        with self.watched(wanted, backwards):
            yield
        self._is_early = is_early
        for parameter in final:
            self._note_final(id(parameter))
        self._send_final()

    def finish(self, factor: float = 1.0) -> dict[int, Tensor]:
        """Send what is left, and set the gradients of all parameters but the shared ones; collective.

        Args:
            factor: of each sum.

        Returns:
            The gradients of the rows that this rank owns, by identity of their parameter.
        """
        buckets, started, rows = self._buckets.all, self._started, dict[int, Tensor]()
        self.repeated = frozenset(
            piece.number
            for bucket in buckets[: len(started)]
            for piece in bucket.pieces
            if piece.parameter.grad is not None
        )
        with self._sending():
            for bucket in buckets[len(started) :]:
                _continue(self._under_way()[: 1 - _UNDER_WAY])
                started.append(bucket.start())
        there: Collection[int] = {number for bucket in buckets for number in bucket.came} | self.repeated
        again: Collection[int] = self.repeated
        if self._presence is not None:
            there, again = self._presence.agree(there, again)
        with self._sending():
            _continue(started)
            more = {
                number: bucket.start_again()
                for number, bucket in enumerate(buckets[: self._buckets.early])
                if any(piece.number in again for piece in bucket.pieces)
            }
            _continue(more.values())
            totals = [bucket_sum.wait() for bucket_sum in started]
            for number, bucket_sum in more.items():
                totals[number] += bucket_sum.wait()
        self._buckets.side.join(totals)
        for bucket, total in zip(buckets, totals, strict=True):
            bucket.take(total if factor == 1.0 else total.mul_(factor), there, rows)
        return rows

    @contextmanager
    def _sending(self) -> Iterator[None]:
        with torch.no_grad(), self._buckets.side.beside():
            yield

    def _is_final(self, key: int) -> None:
        self._note_final(key)
        self._send_final()

    def _note_final(self, key: int) -> None:
        if key not in self.final:
            self.final[key] = None
            for number in self._buckets.of.get(key, ()):
                self._missing[number] -= 1

    def _send_final(self) -> None:
        if not (self._is_early and self._is_next_final()):
            return
        with self._sending():
            while self._is_next_final():
                if len(self._under_way()) >= _UNDER_WAY:
                    return
                self._started.append(self._buckets.all[len(self._started)].start())

    def _is_next_final(self) -> bool:
        """Whether the next bucket may be sent by now, and all of its gradients are final."""
        number = len(self._started)
        return number < self._buckets.early and not self._missing[number]

    def _under_way(self) -> list[Sum]:
        """Start second sums, in one order; return messages that hold copies of gradients and whose first sum lacks."""
        for place, bucket_sum in enumerate(self._started):
            if not bucket_sum.advance():  # others hold it up
                return [later for later in self._started[place:] if later.copies]
        return []


def _continue(started: Iterable[Sum]) -> None:
    """Start what comes after some sums."""
    for bucket_sum in started:
        bucket_sum.summed()


_LAST, _LATE = 1.5, 2.0  # places of gradients that did not come, and of those that came again
Groups = Mapping[tuple[int, ...], dist.ProcessGroup | None]


class _Key(NamedTuple):
    """What is summed over the same ranks in the same way, in one dtype; a tuple that all of its ranks can sort by."""

    ranks: tuple[int, ...]
    across: tuple[int, ...]
    dtype: str
    encoding: str
    is_apart: bool
    of_experts: bool


def grown_bytes(bucket_bytes: int, ranks: int) -> int:
    """Return how much one message over `ranks` carries: in a ring each message is sent in as many parts.

    Parts stay as large as those of 16 ranks, up to 128 ranks; beyond, a copy of a bucket would take too much memory.
    """
    return bucket_bytes * min(max(ranks // 16, 1), 8)


class BucketOrder:
    """The buckets of one rank.

    Args:
        pieces: with the ranks over which each is summed.
        everything: all parameters of the model, with those of other ranks; which of them are trained tells sums apart.
        shared: the parameters of which this rank owns rows.
        groups: the process group of each tuple of ranks.
        across: of these, groups for sums over blocks alone.
        bucket_bytes: how much one message over up to 16 ranks carries.
        count: of all parameters of the model.
        draw: gives a seed for the random rounding of some gradients, the same on all ranks.
        presence: what ranks agree on.
        side: where messages leave.
        late: numbers of the parameters whose gradients wait for the end of all backwards.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[tuple[int, ...], Piece]],
        everything: Sequence[nn.Parameter],
        shared: SharedParameters,
        groups: Groups,
        across: Groups,
        bucket_bytes: int,
        *,
        count: int,
        draw: Draw,
        presence: Presence,
        side: SideStream,
        late: frozenset[int] = frozenset(),
    ) -> None:
        self._draw, self._presence = draw, presence
        self._pieces, self._everything, self._shared = pieces, everything, shared
        self._groups, self._across = groups, across
        self._bucket_bytes, self._count = bucket_bytes, count
        self._side, self._late = side, late
        self._identities = [*map(id, everything)]
        self._unsent = set[int]()  # identities of parameters that were trained since the last sum
        self._trained: tuple[Any, ...] = ()
        self._places: dict[tuple[Any, ...], list[float]] = {}
        self._bucketed: dict[tuple[Any, ...], list[tuple[_Key, Bucket]]] = {}
        self._sorted: dict[tuple[Any, ...], Buckets] = {}

    def flats(self) -> list[Flat]:
        """Return the memory to which backwards add the gradients of what is trained now, or was since the last sum."""
        self._update()
        return [bucket.flat for _, bucket in self._bucketed[self._trained] if bucket.flat is not None]

    def sent(self) -> None:
        """Note that all gradients are summed: what is frozen by now has no part in the next sum."""
        self._unsent.clear()

    def left_out(self, *, whole: bool) -> list[nn.Parameter]:
        """Return parameters with a gradient that no bucket holds: they were frozen when the sum began.

        Args:
            whole: whether parameters that are not shared are looked at too.
        """
        if not whole and not self._shared.all:
            return []
        held = [piece.parameter for _, piece in self._pieces if whole or self._shared.get(piece.parameter) is not None]
        return [parameter for parameter in held if id(parameter) not in self._unsent and parameter.grad is not None]

    def _update(self) -> None:
        """Make the buckets of what is trained now, and free the memory of others.

        What was frozen in the midst of an accumulation has a gradient of earlier batches to be summed.
        """
        with plain():
            self._unsent.update(compress(self._identities, map(REQUIRES_GRAD, self._everything)))
        trained = (len(self._shared.all), *map(self._unsent.__contains__, self._identities))
        if trained != self._trained:
            for _, bucket in self._bucketed.get(self._trained, ()):
                if bucket.flat is not None:
                    bucket.flat.release()
            self._trained = trained
        if trained not in self._bucketed:
            self._bucketed[trained] = list(self._make())

    def buckets(self, *, whole: bool, rows: bool) -> Buckets:
        """Return the buckets of what is trained now.

        Args:
            whole: whether those of parameters that are not shared are among them.
            rows: whether those of shared parameters are.
        """
        self._update()
        key = (whole, rows, self._trained)
        if key not in self._sorted:
            keyed = self._bucketed[self._trained]
            self._sorted[key] = self._sort([pair for pair in keyed if (rows if pair[0].across else whole)])
        return self._sorted[key]

    def learn(self, final: Iterable[int], repeated: Iterable[int]) -> None:
        """Agree on an order after the first sum of what is trained now; then it is a collective of all ranks.

        Args:
            final: identities of parameters in the order in which their gradients were final.
            repeated: numbers of those that got more afterwards.
        """
        if self._trained in self._places:
            return
        numbers = {id(piece.parameter): piece.number for _, piece in self._pieces if piece.parameter.requires_grad}
        came = [numbers[identity] for identity in final if identity in numbers]
        places = torch.zeros(self._count)
        places[list(numbers.values())] = _LAST
        places[came] = torch.linspace(0.0, 1.0, len(came))
        places[list(repeated)] = _LATE
        self._places[self._trained] = self._presence.latest(places)
        self._sorted = {key: buckets for key, buckets in self._sorted.items() if key[-1] != self._trained}

    def _make(self) -> Iterator[tuple[_Key, Bucket]]:
        """Cut what is trained now into buckets: what they hold never changes."""
        by_key: dict[_Key, list[Piece]] = {}
        for ranks, piece in self._pieces:
            parameter, shared = piece.parameter, self._shared.get(piece.parameter)
            if id(parameter) not in self._unsent:
                continue
            block, across = (ranks, ()) if shared is None else (shared.shard.block, shared.shard.across)
            encoding, is_apart = piece.traffic.gradients, piece.traffic.is_apart
            key = _Key(
                block,
                across,
                str(gradient_dtype(parameter)),
                str(encoding or ""),
                encoding is not None and is_apart,
                shared is not None and shared.shard.of_experts,
            )
            by_key.setdefault(key, []).append(piece._replace(shared=shared))
        for key, held in by_key.items():
            held.sort(key=lambda piece: -piece.number)
            late = [piece for piece in held if self._waits(piece)]
            early = [piece for piece in held if not self._waits(piece)]
            quarter = -(-len(early) // 4)  # messages of small models overlap with their backwards too
            most_bytes = grown_bytes(self._bucket_bytes, len(key.ranks))
            for cut in cut_into_buckets(early, most_bytes, quarter):
                yield key, self._bucket(key, cut)
            for parts in ([p for p in late if p.rows is None], [p for p in late if p.rows is not None]):
                for cut in cut_into_buckets(parts, most_bytes, len(parts)):
                    yield key, self._bucket(key, cut)

    def _waits(self, piece: Piece) -> bool:
        return piece.rows is not None or piece.number in self._late

    def _sort(self, keyed: Sequence[tuple[_Key, Bucket]]) -> Buckets:
        places = self._places.get(self._trained)

        def place(piece: Piece) -> tuple[float, int]:
            return 0.0 if places is None else places[piece.number], -piece.number

        def when(pair: tuple[_Key, Bucket]) -> tuple[bool, tuple[float, int], _Key]:
            key, bucket = pair
            latest = max(map(place, bucket.pieces))
            return self._waits(bucket.pieces[0]) or latest[0] >= _LATE, latest, key

        ordered = sorted(keyed, key=when)
        return Buckets([bucket for _, bucket in ordered], sum(not when(pair)[0] for pair in ordered), self._side)

    def _bucket(self, key: _Key, pieces: Sequence[Piece]) -> Bucket:
        group = self._groups[key.ranks]
        assert group is not None, f"this rank is not in the group of its ranks {key.ranks}"
        how: dict[str, Any] = {"side": self._side, "draw": self._draw}
        if key.across:
            return ScatteredBucket(pieces, group, self._across[key.across] if len(key.across) > 1 else None, **how)
        if pieces[0].rows is not None:
            return RowsBucket(pieces, group, **how)
        return SummedBucket(pieces, group, **how)
