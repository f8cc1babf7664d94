"""Counts what tensor parallel ranks send for their layers, and what a product on a grid needs for a moment.

Legend, of one linear layer ``Y = X W``: X, W and Y are bytes of the full tensors, p is the number of ranks, q the side
of a grid and d its depth. A rank sends, with sums as rings and broadcasts that each rank but the last passes on:

- 1d (Shoeybi et al. 2019): ``2 (p - 1) / p`` of Y in the forward of a way out, and of X in the backward of a way in,
  once for all layers that take this X;
- 2d (arXiv:2104.05343) and 2.5d (arXiv:2105.14500): ``(q - 1) / q^2`` of ``X / d + W`` in the forward, and again for
  the gradient of X and for that of W;
- 3d (arXiv:2105.14450): ``(q - 1) / q^3`` of ``X + W + Y`` in the forward; of Y, ``X + W`` for the gradient of X, and
  ``X + W`` for that of W in the backward;
- a low-rank adapter on any grid: ``2 (q - 1) / q^2`` of the ``[rows, r]`` that its first matrix makes (2.5d: by d),
  in the forward and again in the backward; its second matrix sends nothing.

The two numbers of each token that norms sum are left out, and so are embedding and head, which are equal in all modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from lightning_mm5d.tensor_parallel.grid.grid_shape import GridShape


class Product(NamedTuple):
    """A linear layer that ran, or a norm on the full width; sizes in bytes of full tensors.

    Attributes:
        kind: ``column`` for a way into an attention or a MLP, ``row`` for the way out, ``norm`` for such a norm,
            ``adapter`` for the first matrix of a low-rank adapter on a grid.
        source: number of the storage that it takes.
        given: size of what it takes.
        made: size of its result.
        weight: size of its weight, in the type of its result.
        passes: whether what it takes gets a gradient.
        trains: whether its weight gets one.
    """

    kind: str
    source: int
    given: int
    made: int
    weight: int
    passes: bool
    trains: bool


def sent(shape: GridShape | None, ranks: int, products: Iterable[Product]) -> float:
    """Return the bytes that a rank sends in the forward and the backward of `products`.

    Args:
        shape: the grid; None for ``1d``.
        ranks: p.
        products: of some layers and one microbatch.
    """
    total, summed = 0.0, set[int]()
    for one in products:
        if shape is None:
            numbers = one.made * (one.kind == "row")
            if one.kind == "column" and one.passes and one.source not in summed:
                summed.add(one.source)
                numbers += one.given
            total += 2 * (ranks - 1) / ranks * numbers
            continue
        side = shape.side
        if one.kind == "norm":
            total += (side - 1) / ranks * one.given * (1 + one.passes)
        elif one.kind == "adapter":
            total += 2 * (side - 1) / side**2 * one.made / (1 if shape.mode == "3d" else shape.depth) * (1 + one.passes)
        elif shape.mode == "3d":
            numbers = one.given + one.weight
            backward = one.made * (one.passes or one.trains)
            total += (side - 1) / ranks * (numbers * (1 + one.passes + one.trains) + one.made + backward)
        else:
            panels = one.given / shape.depth + one.weight
            total += (side - 1) / side**2 * panels * (1 + one.passes + one.trains)
    return total


def gathered(shape: GridShape | None, hidden: int, *, passes: bool) -> float:
    """Return the bytes that a rank sends where a hidden state enters a stage's first layer and leaves its last one.

    Args:
        shape: the grid; None for ``1d``.
        hidden: size of the full hidden state.
        passes: whether its gradient is passed on.
    """
    return 0.0 if shape is None else (shape.size - 1) / shape.size * hidden * (1 + passes)


def copies(shape: GridShape | None) -> int:
    """Return how many ranks of a tensor parallel group have equal weights."""
    return shape.depth if shape is not None and shape.mode == "2.5d" else 1


def moment(shape: GridShape, one: Product, share: Callable[[int], int]) -> int:
    """Return the bytes that a product needs for a moment, beside what it takes and makes.

    Args:
        shape: the grid.
        one: the product.
        share: gives a rank's part of a hidden state.
    """
    given, made, weight = share(one.given), share(one.made), copies(shape) * one.weight // shape.size
    if shape.mode == "3d":
        return shape.side * max(given + weight + made, made + 2 * given + 3 * weight)  # a gradient is laid out anew
    # panels that are used, that come, and that the product before has not let go of; parts of sums that are under way
    return (min(shape.side - 1, 3) + 2) * (given + weight)
