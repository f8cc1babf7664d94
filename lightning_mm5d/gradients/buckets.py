"""Gradients packed into flat tensors of 25 MiB, each of which is summed over its group in one all-reduce.

A flag for each gradient travels with it, so that one that no rank has stays None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.plan.sums import Rows

_BUCKET_BYTES = 25 * 2**20


class Piece(NamedTuple):
    """A parameter, or rows of it, as they are packed; one for all its segments, since ranks may cut them otherwise.

    Attributes:
        parameter: as it is on this rank.
        rows: None for all of it.
        weight: what its gradient is multiplied by in the sum.
    """

    parameter: nn.Parameter
    rows: Rows | None
    weight: float

    @property
    def numel(self) -> int:
        """Number of elements of these rows."""
        if self.rows is None:
            return self.parameter.numel()
        length = sum(segment.length for segment in self.rows.segments)
        return self.parameter.numel() // max(self.parameter.shape[self.rows.dim], 1) * length

    def read(self, weight: float) -> list[Tensor]:
        """Return what this rank adds to the sum, times `weight`, as flat tensors of `numel` elements."""
        grad = self.parameter.grad
        if grad is None:
            return [self.parameter.new_zeros(self.numel)]
        found = [grad] if self.rows is None else self.rows.of(grad)
        return [rows.reshape(-1) if weight == 1.0 else rows.reshape(-1) * weight for rows in found]

    def write(self, rows: Rows, flat: Tensor) -> None:
        """Take the sum as the gradient of `rows`."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        found = rows.of(self.parameter.grad)
        for own, total in zip(found, flat.split([own.numel() for own in found]), strict=True):
            own.copy_(total.view_as(own))


def start_sums(group: dist.ProcessGroup, pieces: list[Piece]) -> list[tuple[Any, list[Piece], Tensor]]:
    """Start to sum gradients over `group`; return for each bucket its work, its pieces and its flat tensor."""
    started = []
    bucket: list[Piece] = []
    size = 0
    for piece in (*pieces, None):
        if piece is not None:
            bucket.append(piece)
            size += piece.numel * piece.parameter.element_size()
        if bucket and (piece is None or size >= _BUCKET_BYTES):
            flat = _pack(bucket)
            started.append((dist.all_reduce(flat, group=group, async_op=True), bucket, flat))
            bucket, size = [], 0
    return started


def _pack(bucket: list[Piece]) -> Tensor:
    """Return one flat tensor: all gradients, zeros where there is none, and after them a flag for each."""
    packed: list[Tensor] = []
    common = bucket[0].weight if len({piece.weight for piece in bucket}) == 1 else None
    for piece in bucket:
        grad, weight = piece.parameter.grad, 1.0 if common is not None else piece.weight
        if grad is not None and piece.rows is None and weight == 1.0:  # most of them, and there may be thousands
            packed.append(grad.reshape(-1))
        else:
            packed += piece.read(weight)
    first = bucket[0].parameter
    flags = torch.tensor([piece.parameter.grad is not None for piece in bucket], dtype=first.dtype, device=first.device)
    flat = torch.cat([*packed, flags])
    return flat if common in (None, 1.0) else flat.mul_(common)  # a flag only has to differ from zero


def unpack(bucket: list[Piece], flat: Tensor) -> None:
    """Take the sums as gradients; one that no rank has stays None."""
    count = len(bucket)
    present = flat[-count:].tolist()
    for piece, flag, total in zip(bucket, present, flat[:-count].split([one.numel for one in bucket]), strict=True):
        if flag and piece.rows is None:
            # views of the bucket: the gradient's old memory is given up instead of being copied into
            piece.parameter.grad = total.view_as(piece.parameter)
        elif flag and piece.rows is not None:
            piece.write(piece.rows, total)
