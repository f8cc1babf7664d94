"""Which gradients share a bucket, and in which order buckets are sent: the same on all ranks.

A bucket has the same gradients in all steps: parameters from the last to the first. How a sum of several ranks is
rounded may depend on its place in the message, and a resumed run must round as the uninterrupted one does.

Only the order of buckets is learned. After a sum in which gradients were watched, all ranks agree on the order in which
gradients came: a parameter takes the latest of its places on any rank, each counted as a part of what that rank had.
Buckets with gradients that came again after they had been sent are sent at the end from then on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lightning_mm5d.data_parallel.shared_parameters import SharedParameters
from lightning_mm5d.gradients.buckets import Bucket, Draw, Piece, ScatteredBucket, SummedBucket, cut_into_buckets
from lightning_mm5d.gradients.reduction import Buckets

_LAST, _LATE = 1.5, 2.0  # places of gradients that did not come, and of those that came again
Groups = Mapping[tuple[int, ...], dist.ProcessGroup | None]


class _Key(NamedTuple):
    """What is summed over the same ranks in the same way, in one dtype; a tuple that all of its ranks can sort by."""

    ranks: tuple[int, ...]
    across: tuple[int, ...]
    dtype: str
    compression: str
    is_apart: bool


class BucketOrder:
    """The buckets of one rank.

    Args:
        pieces: with the ranks over which each is summed.
        everything: all parameters of the model, with those of other ranks; which of them are trained tells sums apart.
        shared: the parameters of which this rank owns rows.
        groups: the process group of each tuple of ranks.
        bucket_bytes: how much one message carries.
        count: of all parameters of the model.
        draw: gives a seed for the random rounding of some gradients, the same on all ranks.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[tuple[int, ...], Piece]],
        everything: Sequence[nn.Parameter],
        shared: SharedParameters,
        groups: Groups,
        bucket_bytes: int,
        *,
        count: int,
        draw: Draw,
    ) -> None:
        self._draw = draw
        self._pieces, self._everything, self._shared, self._groups = pieces, everything, shared, groups
        self._bucket_bytes, self._count = bucket_bytes, count
        self._trained: tuple[Any, ...] = ()
        self._places: dict[tuple[Any, ...], list[float]] = {}
        self._built: dict[tuple[Any, ...], Buckets] = {}

    def buckets(self, *, whole: bool, rows: bool) -> Buckets:
        """Return the buckets of what is trained now.

        Args:
            whole: whether those of parameters that are not shared are among them.
            rows: whether those of shared parameters are.
        """
        self._trained = (len(self._shared.all), *[one.requires_grad for one in self._everything])
        key = (whole, rows, self._trained)
        if key not in self._built:
            self._built[key] = Buckets(self._build(whole, rows))
        return self._built[key]

    def learn(self, final: Iterable[int], repeated: Iterable[int], device: torch.device) -> None:
        """Agree on an order after the first sum of what is trained now; then it is a collective of all ranks.

        Args:
            final: identities of parameters in the order in which their gradients were final.
            repeated: identities of those that got more afterwards.
            device: where ranks exchange this.
        """
        if self._trained in self._places:
            return
        numbers = {id(piece.parameter): piece.number for _, piece in self._pieces if piece.parameter.requires_grad}
        came = [numbers[one] for one in final if one in numbers]
        places = torch.zeros(self._count)
        places[list(numbers.values())] = _LAST
        places[came] = torch.linspace(0.0, 1.0, len(came))
        places[[numbers[one] for one in repeated]] = _LATE
        places = places.to(device)
        if dist.get_world_size() > 1:
            dist.all_reduce(places, dist.ReduceOp.MAX)
        self._places[self._trained] = places.tolist()
        self._built = {key: built for key, built in self._built.items() if key[-1] != self._trained}

    def _build(self, whole: bool, rows: bool) -> list[tuple[Hashable, Bucket]]:
        places = self._places.get(self._trained)
        found: dict[_Key, list[Piece]] = {}
        for ranks, piece in self._pieces:
            parameter, shared = piece.parameter, self._shared.get(piece.parameter)
            if not parameter.requires_grad or not (whole if shared is None else rows):
                continue
            block, across = (ranks, ()) if shared is None else (shared.shard.block, shared.shard.across)
            compression, is_apart = piece.traffic.gradients, piece.traffic.is_apart
            key = _Key(
                block, across, str(parameter.dtype), str(compression or ""), compression is not None and is_apart
            )
            found.setdefault(key, []).append(piece._replace(shared=shared))

        def place(piece: Piece) -> tuple[float, int]:
            return 0.0 if places is None else places[piece.number], -piece.number

        def is_late(piece: Piece) -> bool:
            return place(piece)[0] >= _LATE

        buckets: list[tuple[tuple[Any, ...], _Key, Bucket]] = []
        for key, held in found.items():
            held.sort(key=lambda piece: -piece.number)
            late = [piece for piece in held if piece.rows is not None]
            early = [piece for piece in held if piece.rows is None]
            quarter = -(-len(early) // 4)  # messages of small models overlap with their backwards too
            cuts = [
                *cut_into_buckets(early, self._bucket_bytes, quarter),
                *cut_into_buckets(late, self._bucket_bytes, len(late)),
            ]
            for number, cut in enumerate(cuts):
                waits = number == len(cuts) - 1 or cut[0].rows is not None or any(map(is_late, cut))
                buckets.append(((waits, max(map(place, cut)), key), key, self._bucket(key, cut, is_late=waits)))
        return [(key, bucket) for _, key, bucket in sorted(buckets, key=lambda one: one[0])]

    def _bucket(self, key: _Key, pieces: Sequence[Piece], *, is_late: bool) -> Bucket:
        group = self._groups[key.ranks]
        assert group is not None, f"this rank is not in the group of its ranks {key.ranks}"
        if not key.across:
            return SummedBucket(pieces, group, is_late=is_late, draw=self._draw)
        across = self._groups[key.across] if len(key.across) > 1 else None
        return ScatteredBucket(pieces, group, across, is_late=is_late, draw=self._draw)
