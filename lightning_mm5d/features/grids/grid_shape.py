"""The grid of tensor parallel ranks, and what each of them holds of a hidden state and of a weight: plain data.

A rank has three coordinates ``(a, b, c)`` and the index ``(a * q + b) * q + c``; an *axis* of the grid has the ranks
that differ in one coordinate. What is split over the axes:

==== ============== ======================== ======================== =========================
mode sizes a, b, c  rows, columns outside    rows, columns inside     a weight: even dim, units
==== ============== ======================== ======================== =========================
2d   1, q, q        b, c                     b, c                     b, c into; c, b out of
2.5d depth, q, q    (a, b), c                (a, b), c                as 2d, equal for all a
3d   q, q, q        (a, c), b                (a, b), c                (b, a), c
==== ============== ======================== ======================== =========================

Rows are samples. *Outside* of an attention or a MLP the columns are the hidden width, split evenly; *inside*, between
its first layers (`column`) and its last (`row`), they are units such as heads. Of a weight, the dim of the hidden width
is the even one, the other has the units. After L. Cannon's descendants: 2D is SUMMA as in Optimus (Xu et al. 2021,
arXiv:2104.05343), 2.5D Tesseract (Wang et al. 2021, arXiv:2105.14500), 3D that of Bian et al. 2021 (arXiv:2105.14450).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.grids.fields import grid_side
from lightning_mm5d.layout.even_split import even_ranges
from lightning_mm5d.sharded.shards import Across, Range, Shard

Axis = Literal["a", "b", "c"]
AXES: tuple[Axis, ...] = ("a", "b", "c")
Side = Literal["outside", "inside"]
Kind = Literal["column", "row"]


class Place(NamedTuple):
    """The coordinates of a rank in its grid."""

    a: int
    b: int
    c: int


@dataclass(frozen=True)
class GridShape:
    """A grid of tensor parallel ranks.

    Args:
        mode: ``2d``, ``2.5d`` or ``3d``.
        depth: ranks along the axis ``a``.
        side: ranks along the axes ``b`` and ``c``, q.
    """

    mode: str
    depth: int
    side: int

    @classmethod
    def of(cls, modality: Modality) -> GridShape | None:
        """Return the grid of a modality; None where its layers are sharded along one dim, or not at all."""
        mode, size, depth = modality.tp_mode, modality.tp_size, modality.tp_depth
        if mode == "1d" or size == 1:
            return None
        side = grid_side(mode, size, depth)
        return cls(mode, side if mode == "3d" else depth, side)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.depth * self.side**2

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The coordinates of all ranks, by index."""
        sides = range(self.side)
        return tuple(Place(a, b, c) for a in range(self.depth) for b in sides for c in sides)

    def index(self, place: Place) -> int:
        """Return the index of the rank at `place`."""
        return (place.a * self.side + place.b) * self.side + place.c

    def lines(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return the indices of the ranks of every line along an axis."""
        found: dict[Place, list[int]] = {}
        for index, place in enumerate(self.places):
            found.setdefault(place._replace(**{axis: 0}), []).append(index)
        return tuple(map(tuple, found.values()))

    def column_axis(self, side: Side) -> Axis:
        """Return the axis over which columns are split."""
        return "b" if self.mode == "3d" and side == "outside" else "c"

    def row_axis(self, side: Side) -> Axis:
        """Return the axis over which the rows of one ``a`` are split again."""
        return "c" if self.mode == "3d" and side == "outside" else "b"

    def columns(self, side: Side, index: int) -> int:
        """Return which of the q parts of the columns a rank has."""
        return int(getattr(self.places[index], self.column_axis(side)))

    def rows(self, side: Side, index: int, total: int) -> Range:
        """Return which of `total` rows a rank has."""
        place = self.places[index]
        start, stop = even_ranges(total, self.depth)[place.a]
        first, last = even_ranges(stop - start, self.side)[getattr(place, self.row_axis(side))]
        return start + first, start + last

    # --- parameters ---

    def weight(self, kind: Kind, units: Shard, dim: int, size: int) -> Shard:
        """Return who holds which block of a weight.

        Args:
            kind: ``column`` for a way into an attention or a MLP, ``row`` for the way out.
            units: the ranges of each of the q parts of the dim of units.
            dim: that of the hidden width.
            size: of that dim.
        """
        is_3d = self.mode == "3d"
        of_units: Axis = "c" if is_3d or kind == "column" else "b"
        evens = even_ranges(size, self.side)
        ranges = []
        for place in self.places:
            start, stop = evens[place.c if not is_3d and kind == "row" else place.b]
            first, last = even_ranges(stop - start, self.depth)[place.a] if is_3d else (0, stop - start)
            ranges.append((start + first, start + last))
        held = tuple(units.ranges[getattr(place, of_units)] for place in self.places)
        return Shard(units.dim, units.size, held, Across(dim, size, tuple(ranges)))

    def vector(self, side: Side, parts: Shard) -> Shard:
        """Return who holds which of the q `parts` of a bias, or of the scale of a norm: all ranks of its columns."""
        held = tuple(parts.ranges[self.columns(side, index)] for index in range(self.size))
        return Shard(parts.dim, parts.size, held)

    def even(self, size: int) -> Shard:
        """Return the q even parts of the hidden width."""
        return Shard(0, size, tuple((held,) for held in even_ranges(size, self.side)))
