"""Rows of zeros after those of a head's weight, so that its products have sizes that kernels of GPUs want.

They exist within a product alone. No parameter has them, and their columns are cut off before anybody sees the logits.

C classes of this rank, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from lightning_mm5d.sharded.collectives import TensorGroup


@dataclass(frozen=True)
class Columns:
    """The classes of each tensor parallel rank, one after the other.

    Attributes:
        lengths: their number on each rank.
        group: the ranks.
        multiple: of which the number of columns in a product is one, with columns of zeros that are cut off again.
    """

    lengths: tuple[int, ...]
    group: TensorGroup
    multiple: int = 1


def padded_rows(x: Tensor, multiple: int) -> Tensor:
    """Return `x` ``[C, ...]`` with zeros after its rows, up to a multiple of `multiple`; itself where it is one."""
    missing = -x.shape[0] % multiple
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, missing)) if missing else x


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, multiple: int) -> Tensor:
    """Return ``x @ weight.T + bias``: ``[..., C]``, a view of a product with padded rows where C is no multiple.

    Args:
        x: ``[..., D]``.
        weight: ``[C, D]``.
        bias: ``[C]``.
        multiple: of which the number of rows in the product is one.
    """
    found = F.linear(x, padded_rows(weight, multiple), None if bias is None else padded_rows(bias, multiple))
    return without_padding(found, -1, weight.shape[0])


def without_padding(x: Tensor, dim: int, length: int) -> Tensor:
    """Return the first `length` entries of `x` along `dim`, a view; `x` itself where these are all."""
    return x if x.shape[dim] == length else x.narrow(dim, 0, length)
