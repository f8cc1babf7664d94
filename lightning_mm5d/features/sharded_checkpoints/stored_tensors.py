"""The tensors of a checkpoint directory, each put together from the pieces that ranks wrote.

The header of each file says where its pieces lie in the full tensors, in the convention of the Hugging Face storage of
torch.distributed.checkpoint, whose reader finds them too. A file has one piece of a tensor at most.

It refuses directories whose pieces do not cover every tensor exactly once.

Which rank writes which piece of a tensor: a pure function of the plan, the same on all ranks.

A piece is a box of a full tensor that lies in one box of a rank's local tensor too. The pieces of a tensor cover it
once. Of what data parallel ranks share, each writes its own rows. Where several ranks hold the same rows, the one with
the fewest bytes so far writes them, and large pieces are divided among all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.features.sharded_checkpoints.directory import CheckpointDirectory
from lightning_mm5d.layout.even_split import even_ranges
from lightning_mm5d.plan.data_shards import DataShards
from lightning_mm5d.plan.holdings import Box, whole_box, with_range
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.shards import Range, Shard
from lightning_mm5d.storage.files import Region, checked_region, corrupt
from lightning_mm5d.storage.tensor_file import TensorFile

_DIVIDED_BYTES = 4 * 2**20  # a piece from this size on is divided among the ranks that hold it


@dataclass(frozen=True)
class Saved:
    """A tensor that is saved.

    Args:
        shape: of the full tensor.
        itemsize: bytes of an element.
        copies: how many tensors of its shape are saved with it, itself counted: 3 for a weight that Adam trains.
        source: the one rank that has its value; None where all ranks that hold it have.
    """

    shape: tuple[int, ...]
    itemsize: int
    copies: int = 1
    source: int | None = None


@dataclass(frozen=True)
class Piece:
    """A box of a full tensor, and the rank that writes it.

    Attributes:
        name: of the tensor.
        box: in the full tensor.
        local: where it lies in the local tensor of `writer`.
        writer: global rank.
        is_first: whether its writer also writes what belongs to the whole tensor.
    """

    name: str
    box: Box
    local: Box
    writer: int = 0
    is_first: bool = False


def pieces_of(plan: Plan, tensors: Mapping[str, Saved]) -> list[Piece]:
    """Return the pieces of all `tensors`, by name, in their order."""
    loads, shards = [0] * plan.layout.size, DataShards(plan)
    found: dict[str, list[Piece]] = {}
    open_pieces: list[tuple[int, int, Piece, tuple[int, ...]]] = []
    for name, saved in tensors.items():
        found[name] = []
        for piece, ranks in _candidates(plan, shards, name, saved):
            cost = math.prod(stop - start for start, stop in piece.box) * saved.itemsize
            if len(ranks) > 1 and cost >= _DIVIDED_BYTES and piece.box[0][1] - piece.box[0][0] >= len(ranks):
                for part, rank in zip(_divided_run(piece, len(ranks)), ranks, strict=True):
                    found[name].append(replace(part, writer=rank))
                    loads[rank] += cost * saved.copies // len(ranks)
            else:
                open_pieces.append((-cost * saved.copies, len(open_pieces), piece, ranks))
    for cost, _, piece, ranks in sorted(open_pieces, key=lambda one: one[:2]):
        writer = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[writer] -= cost
        found[piece.name].append(replace(piece, writer=writer))
    result = []
    for pieces in found.values():
        first, *others = sorted(pieces, key=lambda piece: piece.box)
        result += [replace(first, is_first=True), *others]
    return result


def _candidates(plan: Plan, shards: DataShards, name: str, saved: Saved) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Yield pieces that cover a tensor once, each with the ranks that may write it."""
    shard, ownership = plan.division.shards.get(name), plan.ownership
    whole = whole_box(saved.shape)
    if shard is None:
        if saved.source is not None:
            ranks: tuple[int, ...] = (saved.source,)
        else:
            ranks = ownership.ranks_holding(name) if name in ownership.sizes else ownership.primary_ranks(name)[:1]
        yield from _shared(shards, Piece(name, whole, whole), ranks)
        return
    holders = ownership.ranks_holding(name) if name in ownership.sizes else ownership.primary_ranks(name)
    for index in shard.distinct:
        ranks = tuple(rank for rank in holders if ownership.shard_index(name, rank) == index)
        for full, local in _own_rows(shard, index):
            piece = Piece(name, with_range(whole, shard.dim, full), with_range(whole, shard.dim, local))
            if (across := shard.across) is not None:
                start, stop = across.ranges[index]
                boxes = (
                    with_range(piece.box, across.dim, (start, stop)),
                    with_range(piece.local, across.dim, (0, stop - start)),
                )
                piece = replace(piece, box=boxes[0], local=boxes[1])
            yield from _shared(shards, piece, ranks)


def _shared(shards: DataShards, piece: Piece, ranks: tuple[int, ...]) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Cut a piece that `ranks` hold to the rows that each of them owns, where they share it."""
    owned = {rank: rows for rank in ranks if (rows := shards.of(piece.name, rank)) is not None}
    if not owned:
        yield piece, ranks
        return
    rows = next(iter(owned.values()))
    (start, _), (first, last) = piece.box[rows.dim], piece.local[rows.dim]
    for place, (low, high) in enumerate(rows.ranges):
        low, high = max(low, first), min(high, last)
        if low < high:
            box = with_range(piece.box, rows.dim, (start + low - first, start + high - first))
            part = replace(piece, box=box, local=with_range(piece.local, rows.dim, (low, high)))
            yield part, tuple(rank for rank, other in owned.items() if other.place == place)


def _own_rows(shard: Shard, index: int) -> list[tuple[Range, Range]]:
    """Return the rows of a rank of the group that no rank before it holds: in the full tensor, and in its local one."""
    edges = sorted({edge for held in shard.ranges for one in held for edge in one})
    found: list[tuple[Range, Range]] = []
    offset = 0
    for start, stop in shard.ranges[index]:
        for low, high in pairwise([start, *(edge for edge in edges if start < edge < stop), stop]):
            local, offset = offset, offset + high - low
            before = any(
                first <= low and high <= last
                for other, held in enumerate(shard.ranges[:index])
                for first, last in held
                if shard.is_beside(index, other)
            )
            if before or low == high:
                continue
            if found and found[-1][0][1] == low and found[-1][1][1] == local:
                found[-1] = ((found[-1][0][0], high), (found[-1][1][0], offset))
            else:
                found.append(((low, high), (local, offset)))
    return found


def _divided_run(piece: Piece, count: int) -> list[Piece]:
    """Cut a piece into `count` parts along its first dim."""
    (start, stop), (local, _) = piece.box[0], piece.local[0]
    return [
        replace(piece, box=((start + a, start + b), *piece.box[1:]), local=((local + a, local + b), *piece.local[1:]))
        for a, b in even_ranges(stop - start, count)
    ]


_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_FULL = "full_shape"
_COPIED_BYTES = 16 * 2**20  # read at once, of a tensor in several pieces


def sharding_metadata(boxes: Mapping[str, tuple[Box, Sequence[int]]]) -> dict[str, str]:
    """Return the metadata of a file: of each tensor the box that the file holds, and the full shape."""
    info = {name: {_OFFSETS: [start for start, _ in box], _FULL: list(shape)} for name, (box, shape) in boxes.items()}
    return {"format": "pt", _SHARDING: json.dumps(info)}


@dataclass(frozen=True)
class _Part:
    file: TensorFile
    box: Box


class StoredTensors:
    """All tensors of a checkpoint directory, a `TensorSource`; opening it reads the headers of the files.

    Args:
        directory: finished.

    Raises:
        CheckpointCorruptError: a file is missing or damaged, or the pieces of a tensor do not cover it once.
    """

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.directory = directory
        self.files = {name: directory.tensor_file(name) for name in sorted(directory.tensor_files())}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[_Part]] = {}
        for file in self.files.values():
            self._add(file)
        for name, parts in self._parts.items():
            self._check(name, parts)

    @property
    def bytes_read(self) -> int:
        """Of all files so far, with headers."""
        return sum(file.bytes_read for file in self.files.values())

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor; raise KeyError for an unknown name."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; raise KeyError for an unknown name."""
        return self._parts[name][0].file.dtype(name)

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or its `region`, in new memory of the CPU; it reads no pieces beside the region.

        Raises:
            KeyError: there is no such tensor.
            CheckpointCorruptError: bytes differ from what was written.
        """
        wanted = checked_region(region, self._shapes[name], name)
        found = list(self._overlaps(name, wanted))
        if len(found) == 1 and found[0][1] == tuple(wanted):
            part, box = found[0]
            return part.file.read(name, _within(box, part.box))
        result = torch.empty([stop - start for start, stop in wanted], dtype=self.dtype(name))
        for part, box in found:
            for rows in _divided(box, result.itemsize):
                target = tuple(slice(start, stop) for start, stop in _within(rows, wanted))
                result[target] = part.file.read(name, _within(rows, part.box))
        return result

    def _overlaps(self, name: str, wanted: Sequence[tuple[int, int]]) -> Iterator[tuple[_Part, Box]]:
        for part in self._parts[name]:
            box = _intersection(part.box, wanted)
            if box is not None:
                yield part, box

    def _add(self, file: TensorFile) -> None:
        info = _sharding(file)
        for name in file.names():
            entry = info.get(name)
            shape = file.shape(name)
            offsets, full = ([0] * len(shape), list(shape)) if entry is None else (entry[_OFFSETS], entry[_FULL])
            box = tuple((offset, offset + length) for offset, length in zip(offsets, shape, strict=True))
            known = self._shapes.setdefault(name, tuple(full))
            parts = self._parts.setdefault(name, [])
            if known != tuple(full) or (parts and parts[0].file.dtype(name) != file.dtype(name)):
                raise corrupt(file.path, f"its {name!r} has another shape or dtype than that of another file")
            parts.append(_Part(file, box))

    def _check(self, name: str, parts: list[_Part]) -> None:
        parts.sort(key=lambda part: part.box)
        full = whole_box(self._shapes[name])
        inside = all(_intersection(part.box, full) == part.box or not _size(part.box) for part in parts)
        covers = sum(_size(part.box) for part in parts) == _size(full)
        if not inside or not covers or _overlap([part.box for part in parts]):
            raise corrupt(self.directory.path, f"its files do not hold {name!r} exactly once")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any of the boxes overlap, which are sorted."""
    for number, one in enumerate(boxes):
        for other in islice(boxes, number + 1, None):
            if one and other[0][0] >= one[0][1]:
                break
            if _intersection(one, other) is not None:
                return True
    return False


def _sharding(file: TensorFile) -> dict[str, dict[str, list[int]]]:
    """Return where the pieces of a file lie, by name, after a check of its form."""
    try:
        info = json.loads(file.metadata.get(_SHARDING, "{}"))
        wrong = [name for name, entry in info.items() if not _places(entry, len(file.shape(name)))]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        wrong = [_SHARDING]
    if wrong:
        raise corrupt(file.path, f"its header does not say where {wrong[0]!r} belongs")
    return dict(info)


def _places(entry: Any, dims: int) -> bool:
    lists = entry[_OFFSETS], entry[_FULL]
    return all(
        isinstance(numbers, list)
        and len(numbers) == dims
        and all(type(number) is int and number >= 0 for number in numbers)
        for numbers in lists
    )


def _intersection(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> Box | None:
    """Return the box that lies in both; None where there is none, or an empty one."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _divided(box: Box, itemsize: int) -> Iterator[Box]:
    """Yield the box in ranges of its first dim, so that little is in memory beside the tensor that they go to."""
    (first, last), rest = box[0], box[1:]
    step = max(1, _COPIED_BYTES // (_size(rest) * itemsize))
    for start in range(first, last, step):
        yield ((start, min(start + step, last)), *rest)


def _within(box: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a box as counted from the first element of `outer`."""
    return [(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer, strict=True)]


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
