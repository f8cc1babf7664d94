"""Compares functions of a tensor of which each rank holds some tokens with those of the full one, on ranks 0-3.

They share sequences of 7 tokens in fours, in twos (ranks 0-1 and 2-3 do the same) or as two context parallel ranks of
two tensor parallel ranks each; see `LAYOUTS`.

The gradient of a local tensor is R times that of one process, R being the context parallel degree. The mean over ranks
of a parameter's gradient is that of one process; the gradient of a full tensor is, without any mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.context_parallel.balance import uniform, zigzag
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.sequence import Holders, ShardedSequence, TokenSplit
from lightning_mm5d.sharded.tensor import Sharded
from ranks import run_ranks

WORLD, B, S, W = 4, 2, 7, 5
Function = Callable[..., Any]


@dataclass(frozen=True)
class Layout:
    """A shared sequence: ranges of each context parallel rank, and how many tensor parallel ranks shard them."""

    ranges: tuple[tuple[tuple[int, int], ...], ...]
    tensor: int = 1

    @property
    def split(self) -> TokenSplit:
        return TokenSplit.of(self.ranges, S)


LAYOUTS = {
    "two stretches": Layout(uniform(S, 2).ranges),
    "zigzag over two": Layout(zigzag(S, 2).ranges),
    "zigzag over four, of which one token is left": Layout(zigzag(S, 4).ranges),
    "scattered over four": Layout((((0, 1), (3, 4)), ((1, 3),), ((6, 7),), ((4, 6),))),
    "ranks without tokens": Layout((((2, 5),), (), ((0, 2), (5, 7)), ())),
    "two of two": Layout(zigzag(S, 2).ranges, tensor=2),
    "two of two, with fewer tokens than ranks": Layout((((3, 4),), ((0, 3), (4, 7))), tensor=2),
    "two of two, of which one has none": Layout(((), ((0, 7),)), tensor=2),
}


class Ranks:
    """The groups of this rank, and the leaves that are parameters."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        rank = dist.get_rank()
        pairs = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        groups = [[dist.new_group(ranks) for ranks in kind] for kind in pairs]
        self.all = TensorGroup(dist.group.WORLD)
        self.neighbours = TensorGroup(groups[0][rank // 2])
        self.across = TensorGroup(groups[1][rank % 2])
        self.averaged: set[int] = set()

    def averages(self, x: Tensor) -> bool:
        return id(x) in self.averaged

    def share(self, layout: Layout) -> ShardedSequence:
        """The sequence of a layout, over all of its ranks."""
        degree = len(layout.ranges)
        if layout.tensor == 1:
            ranks = self.all if degree == WORLD else self.neighbours
            return ShardedSequence(layout.split, Holders(ranks, degree, self.averages))
        holders = Holders(self.across, degree, self.averages)
        holders.finer = Holders(self.all, degree, self.averages, self.neighbours, coarser=holders)
        return ShardedSequence(layout.split, holders).finer

    def mean(self, x: Tensor) -> Tensor:
        """Over all ranks; those that do the same weigh the same."""
        return self.all.sum(x) / WORLD


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))) + 0.5


def close(found: Tensor, expected: Tensor, what: str = "") -> None:
    assert not isinstance(found, Sharded)
    torch.testing.assert_close(
        found, expected, rtol=1e-12, atol=1e-12, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


@dataclass(frozen=True)
class Case:
    """What is called on a sharded tensor and on the full one.

    Args:
        function: takes the tensor and `others`.
        stays: whether the result is in parts, and nothing was communicated for it; None where it may be either.
        shape: of the tensor.
        dim: that counts tokens.
        others: further tensors; those of floats get gradients.
        kind: what these are: ``parameters``, whole values that were ``computed`` before, or ``leaves`` of another kind.
    """

    function: Function
    stays: bool | None = None
    shape: tuple[int, ...] = (B, S, W)
    dim: int = -2
    others: tuple[Tensor, ...] = ()
    kind: str = "parameters"


def compare(ranks: Ranks, sequence: ShardedSequence, case: Case, where: str) -> None:
    whole = random(*case.shape).requires_grad_()
    local = sequence.local_of(whole.detach(), case.dim, sequence.lengths).clone().requires_grad_()
    theirs, ours = ([other.clone() for other in case.others] for _ in range(2))
    for other in (*theirs, *ours):
        other.requires_grad_(other.is_floating_point())
    ranks.averaged = {id(other) for other in ours} if case.kind == "parameters" else set()
    taken = [other * 1 for other in ours] if case.kind == "computed" else ours
    x = sequence.wrapped(local, case.dim) * 1
    before = sequence.holders.ranks.moved
    found, expected = case.function(x, *taken), case.function(whole * 1, *theirs)
    if case.stays is not None:
        assert isinstance(found, Sharded) == case.stays, f"{where}: stays sharded: {not case.stays}"
    if case.stays:
        assert sequence.holders.ranks.moved == before, f"{where}: something was communicated"
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), where
    value = found.full() if isinstance(found, Sharded) else found
    close(value, expected, where)
    assert value.requires_grad == expected.requires_grad, where
    if not expected.requires_grad:
        return
    weights = random(*expected.shape, seed=7).to(expected.dtype)
    (value * weights).sum().backward()
    (expected * weights).sum().backward()
    own = sequence.local_of(whole.grad, case.dim, sequence.lengths)  # type: ignore[arg-type]
    gradient = torch.zeros_like(local) if local.grad is None else local.grad
    close(gradient, own * sequence.holders.degree, f"{where}: gradient of the local tensor")
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad is None) == (other.grad is None), where
        if other.grad is not None and mine.grad is not None:
            got = ranks.mean(mine.grad) if case.kind == "parameters" else mine.grad
            close(got, other.grad, f"{where}: gradient of another")


def each(rank: int, cases: list[Case]) -> None:
    ranks = Ranks()
    for name, layout in LAYOUTS.items():
        sequence = ranks.share(layout)
        for index, case in enumerate(cases):
            compare(ranks, sequence, case, f"{name}, case {index}")


def run(*cases: Case) -> None:
    run_ranks(WORLD, each, list(cases))


def on(stays: bool | None, *functions: Function, **options: Any) -> Iterator[Case]:
    """A case of each function."""
    return (Case(function, stays, **options) for function in functions)


TARGET = torch.tensor([[0, 4, -100, 2, 1, 3, -100], [-100, -100, 3, 3, 0, 1, 2]])
