"""Which gradients share a bucket, and in which order buckets are sent: the same on all ranks.

A bucket has the same gradients in all steps: parameters from the last to the first. How a sum of several ranks is
rounded may depend on its place in the message, and a resumed run must round as the uninterrupted one does.

Only the order of buckets is learned. After a sum in which gradients were watched, all ranks agree on the order in which
gradients came: a parameter takes the latest of its places on any rank, each counted as a part of what that rank had.
Buckets with gradients that came again after they had been sent are sent at the end from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

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
    SummedBucket,
    cut_into_buckets,
)
from lightning_mm5d.gradients.reduction import Buckets, Presence
from lightning_mm5d.sharded.remote_value import plain

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
        self._unsent = set[int]()  # identities of parameters that were trained since the last sum
        self._trained: tuple[Any, ...] = ()
        self._places: dict[tuple[Any, ...], list[float]] = {}
        self._made: dict[tuple[Any, ...], list[tuple[_Key, Bucket]]] = {}
        self._sorted: dict[tuple[Any, ...], Buckets] = {}

    def flats(self) -> list[Flat]:
        """Return the memory to which backwards add the gradients of what is trained now, or was since the last sum."""
        self._update()
        return [bucket.flat for _, bucket in self._made[self._trained] if bucket.flat is not None]

    def sent(self) -> None:
        """Note that all gradients are summed: what is frozen by now has no part in the next sum."""
        self._unsent.clear()

    def left_out(self, *, whole: bool) -> list[nn.Parameter]:
        """Return parameters with a gradient that no bucket holds: they were frozen when the sum began.

        Args:
            whole: whether parameters that are not shared are looked at too.
        """
        held = [piece.parameter for _, piece in self._pieces if whole or self._shared.get(piece.parameter) is not None]
        return [one for one in held if id(one) not in self._unsent and one.grad is not None]

    def _update(self) -> None:
        """Make the buckets of what is trained now, and free the memory of others.

        What was frozen in the midst of an accumulation has a gradient of earlier batches to be summed.
        """
        with plain():
            self._unsent.update(id(one) for one in self._everything if one.requires_grad)
        trained = (len(self._shared.all), *[id(one) in self._unsent for one in self._everything])
        if trained != self._trained:
            for _, bucket in self._made.get(self._trained, ()):
                if bucket.flat is not None:
                    bucket.flat.release()
            self._trained = trained
        if trained not in self._made:
            self._made[trained] = list(self._make())

    def buckets(self, *, whole: bool, rows: bool) -> Buckets:
        """Return the buckets of what is trained now.

        Args:
            whole: whether those of parameters that are not shared are among them.
            rows: whether those of shared parameters are.
        """
        self._update()
        key = (whole, rows, self._trained)
        if key not in self._sorted:
            made = self._made[self._trained]
            self._sorted[key] = self._sort([one for one in made if (rows if one[0].across else whole)])
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
        came = [numbers[one] for one in final if one in numbers]
        places = torch.zeros(self._count)
        places[list(numbers.values())] = _LAST
        places[came] = torch.linspace(0.0, 1.0, len(came))
        places[list(repeated)] = _LATE
        self._places[self._trained] = self._presence.latest(places)
        self._sorted = {key: found for key, found in self._sorted.items() if key[-1] != self._trained}

    def _make(self) -> Iterator[tuple[_Key, Bucket]]:
        """Cut what is trained now into buckets: what they hold never changes."""
        found: dict[_Key, list[Piece]] = {}
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
            found.setdefault(key, []).append(piece._replace(shared=shared))
        for key, held in found.items():
            held.sort(key=lambda piece: -piece.number)
            late = [piece for piece in held if self._waits(piece)]
            early = [piece for piece in held if not self._waits(piece)]
            quarter = -(-len(early) // 4)  # messages of small models overlap with their backwards too
            most_bytes = grown_bytes(self._bucket_bytes, len(key.ranks))
            for cut in cut_into_buckets(early, most_bytes, quarter):
                yield key, self._bucket(key, cut)
            for parts in ([one for one in late if one.rows is None], [one for one in late if one.rows is not None]):
                for cut in cut_into_buckets(parts, most_bytes, len(parts)):
                    yield key, self._bucket(key, cut)

    def _waits(self, piece: Piece) -> bool:
        return piece.rows is not None or piece.number in self._late

    def _sort(self, made: Sequence[tuple[_Key, Bucket]]) -> Buckets:
        places = self._places.get(self._trained)

        def place(piece: Piece) -> tuple[float, int]:
            return 0.0 if places is None else places[piece.number], -piece.number

        def when(one: tuple[_Key, Bucket]) -> tuple[bool, tuple[float, int], _Key]:
            key, bucket = one
            latest = max(map(place, bucket.pieces))
            return self._waits(bucket.pieces[0]) or latest[0] >= _LATE, latest, key

        ordered = sorted(made, key=when)
        return Buckets([bucket for _, bucket in ordered], sum(not when(one)[0] for one in ordered), self._side)

    def _bucket(self, key: _Key, pieces: Sequence[Piece]) -> Bucket:
        group = self._groups[key.ranks]
        assert group is not None, f"this rank is not in the group of its ranks {key.ranks}"
        how: dict[str, Any] = {"side": self._side, "draw": self._draw}
        if key.across:
            return ScatteredBucket(pieces, group, self._across[key.across] if len(key.across) > 1 else None, **how)
        if pieces[0].rows is not None:
            return RowsBucket(pieces, group, **how)
        return SummedBucket(pieces, group, **how)
