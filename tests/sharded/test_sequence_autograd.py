"""What torch does around a tensor of which each rank holds some tokens: hooks, checkpoints, autocast, random numbers.

The layout of all tests is that of `sequence_cases`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_mm5d.sharded.sequence import ShardedSequence
from lightning_mm5d.sharded.tensor import Sharded
from ranks import run_ranks
from sharded.sequence_cases import LAYOUTS, TARGET, WORLD, B, Ranks, S, W, close, on, random, run


def test_hooks_see_the_gradient_of_one_process() -> None:
    def hooked(rank: int) -> None:
        ranks = Ranks()
        for name, layout in LAYOUTS.items():
            sequence = ranks.share(layout)
            whole = random(B, S, W).requires_grad_()
            local = sequence.local_of(whole.detach(), -2, sequence.lengths).clone().requires_grad_()
            x = sequence.wrapped(local, -2)
            weights, seen = random(B, S, 1, seed=5), []
            y, z = x * 2, whole * 2
            y.register_hook(lambda g, seen=seen: seen.append(g) or g * 3)
            z.register_hook(lambda g, seen=seen: seen.append(g) or g * 3)
            (y.mean(-1, keepdim=True) * weights).sum().backward()
            (z.mean(-1, keepdim=True) * weights).sum().backward()
            close(seen[0].full(), seen[1], name)
            close(local.grad, sequence.local_of(whole.grad, -2, sequence.lengths) * sequence.factor, name)
            y, z = x * 2, whole * 2
            (found,) = torch.autograd.grad((y.cumsum(1) * y).sum(), [y])
            (expected,) = torch.autograd.grad((z.cumsum(1) * z).sum(), [z])
            close(found.full(), expected, name)
            local.grad = whole.grad = None
            torch.autograd.backward([x * x], [weights.expand(B, S, W)])
            (whole * whole).backward(weights.expand(B, S, W))
            close(local.grad, sequence.local_of(whole.grad, -2, sequence.lengths) * sequence.factor, name)
            assert x.is_leaf
            close(x.grad.full(), whole.grad, f"{name}: the gradient that is kept of a leaf")
            y, z = x * 2, whole * 2
            y.retain_grad()
            z.retain_grad()
            (y.pow(2).mean(1)).sum().backward()
            (z.pow(2).mean(1)).sum().backward()
            close(y.grad.full(), z.grad, f"{name}: the gradient that is kept of what was computed")

    run_ranks(WORLD, hooked)


def test_checkpoints_recompute_it() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        x = x + F.silu(x * (1 + w))
        return F.layer_norm(x, (W,), w) + x.cumsum(1)[:, :1]

    def once(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(block, x, w, use_reentrant=False)

    def nested(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda x, w: once(once(x, w) * 2, w), x, w, use_reentrant=False)

    def within(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(block, x, w, use_reentrant=True)

    run(*on(None, once, nested, within, others=(random(W),)))


def test_autocast_acts_on_the_local_tensor() -> None:
    def cast(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x.float(), w.float())
            assert y.dtype == torch.bfloat16
            return F.cross_entropy(y[:, :-1].reshape(-1, 6), TARGET[:, 1:].reshape(-1)).double()

    def compared(rank: int) -> None:
        ranks = Ranks()
        for name, layout in LAYOUTS.items():
            sequence = ranks.share(layout)
            whole, w = random(B, S, W), random(6, W)
            x = sequence.wrapped(sequence.local_of(whole, -2, sequence.lengths), -2)
            torch.testing.assert_close(cast(x, w), cast(whole, w), rtol=1e-2, atol=0, msg=name)

    run_ranks(WORLD, compared)


def test_dropout_differs_between_ranks_and_random_numbers_after_it_are_equal() -> None:
    def dropped(rank: int) -> list[tuple[Tensor, Tensor]]:
        ranks, found = Ranks(), []
        for layout in LAYOUTS.values():
            sequence = ranks.share(layout)
            torch.manual_seed(1)
            local = torch.ones(500, sequence.lengths[sequence.index], 1, requires_grad=True)
            x = sequence.wrapped(local, -2)
            y = F.dropout(x, 0.25)
            assert isinstance(y, Sharded)
            assert F.dropout(x, 0.25, training=False) is x
            y.sum().backward()
            close(local.grad, y.local.detach() * sequence.factor)
            found.append((y.full().detach() == 0, torch.rand(3)))
        return found

    results = run_ranks(WORLD, dropped)
    for masks in zip(*results, strict=True):
        for mask, after in masks:
            assert mask.equal(masks[0][0])
            assert after.equal(masks[0][1])
            assert abs(float(mask.double().mean()) - 0.25) < 0.03
            columns = mask.squeeze(-1).unbind(1)
            equal = [(a == b).double().mean() for i, a in enumerate(columns) for b in columns[:i]]
            assert max(equal) < 0.75, "tokens drop out independently"


def test_a_finer_sequence_knows_the_coarser_one() -> None:
    def found(rank: int) -> None:
        ranks = Ranks()
        for layout in (layout for layout in LAYOUTS.values() if layout.tensor > 1):
            fine = ranks.share(layout)
            holders = fine.holders.coarser
            assert holders is not None
            coarse = ShardedSequence(layout.split, holders)
            assert fine.coarser.split == layout.split
            assert fine.coarser.holders is holders
            assert coarse.finer.split == fine.split
            assert coarse.finer is coarse.finer
            assert coarse.coarser is coarse
            assert fine.finer is fine
            whole = random(B, S, W)
            x = fine.wrapped(fine.local_of(whole, -2, fine.lengths), -2)
            local = fine.own_tokens(x)
            assert isinstance(local, Sharded)
            close(local.full(), coarse.local_of(whole, -2, coarse.lengths))
            close(fine.wrapped(local * 2, -2).full(), whole * 2)
            y = coarse.wrapped(coarse.local_of(whole, -2, coarse.lengths), -2)
            assert not isinstance(coarse.own_tokens(y), Sharded)
            close(x.full(), y.full())
            close(x + y, whole * 2)  # other shardings meet in full

    run_ranks(WORLD, found)
