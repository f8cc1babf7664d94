"""Attention over several ranks equals dense attention in one process, forward and backward, in every mode.

Rings of 2 (`exhaustive`), 3 and 4 ranks; groups within 4 ranks: inner 0-1 and 2-3, outer 0, 2 and 1, 3.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from context_parallel.exchange_cases import (
    LIMIT_S,
    MASKS,
    SPLITS,
    B,
    Case,
    S,
    call,
    causal,
    groups_of,
    own_part,
    tensors,
    uneven,
)
from lightning_mm5d.context_parallel.balance import uniform
from lightning_mm5d.context_parallel.exchange.attention import (
    ContextGroups,
    context_attention,
    first_tokens,
    local_attention,
)
from lightning_mm5d.context_parallel.exchange.ulysses import within
from lightning_mm5d.context_parallel.masks.mask import Mask
from lightning_mm5d.sharded.collectives import TensorGroup, dry_run
from lightning_mm5d.sharded.sequence import joined
from ranks import run_ranks
from sweeps import swept


def dense(case: Case) -> list[Tensor]:
    """Output, gradients of queries, keys, values and sinks, with an S x S mask in one process."""
    q, k, v, d_out, sinks = tensors(case)
    for leaf in (q, k, v, sinks):
        leaf.requires_grad_()
    ratio = case.heads[0] // case.heads[1]
    scores = 0.3 * q @ k.repeat_interleave(ratio, 1).mT
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    b, tokens = torch.arange(B).view(B, 1, 1, 1), torch.arange(case.size)
    if (function := MASKS[case.mask]) is not None:
        seen = function(b, torch.zeros_like(b), tokens.view(1, 1, -1, 1), tokens.view(1, 1, 1, -1))
        scores = scores.masked_fill(~seen, -torch.inf)
    rest = sinks.view(1, -1, 1, 1).expand(B, -1, case.size, 1)
    rest = rest if case.sinks else torch.full_like(rest, -1e30)  # so small that it counts where nothing is seen
    weights = torch.cat([scores, rest], -1).softmax(-1)[..., :-1]
    out = weights @ v.repeat_interleave(ratio, 1)
    out.backward(d_out)
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad, torch.zeros_like(sinks) if sinks.grad is None else sinks.grad]


def calls(rank: int, world: int, cases: list[Case]) -> list[list[Tensor]]:
    groups = groups_of(rank, world)
    return [call(case, groups) for case in cases]


def check(world: int, cases: list[Case], tolerance: float = 1e-10) -> None:
    """Compare each rank's results with its part of the dense ones."""
    ranks = run_ranks(world, calls, world, cases, limit=LIMIT_S)
    for index, case in enumerate(cases):
        *wanted, d_sinks = dense(case)
        split, total = SPLITS[case.split](case.size, world), torch.zeros_like(d_sinks)
        for rank in range(world):
            *found, share = ranks[rank][index]
            total += share
            for name, one, whole in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True):
                assert one.dtype == (torch.bfloat16 if case.autocast and name == "output" else case.dtype)
                part = whole[:, :, split.indices(rank)]
                assert one.shape == part.shape, (case, name)
                difference = float((one - part).abs().max()) if part.numel() else 0.0
                assert difference <= tolerance, f"{case}: {name} of rank {rank} is off by {difference}"
        assert float((total - d_sinks).abs().max()) <= 10 * tolerance, f"{case}: gradient of sinks"


def grid(mode: str, **options: Any) -> list[Case]:
    """Each split with each mask; numbers of heads, sinks and soft caps change from one to the next."""
    heads = [(4, 4), (4, 2), (6, 2), (3, 1)]
    return [
        Case(
            mode,
            split,
            mask,
            heads[(column + row) % 4],
            sinks=(row + column) % 2 == 0,
            softcap=2.0 if column == 3 else None,
            **options,
        )
        for row, split in enumerate(SPLITS)
        for column, mask in enumerate(("causal", "packed", "padded", "sliding"))
    ]


@pytest.mark.parametrize("mode", ["allgather", "ring", "ulysses"])
@pytest.mark.parametrize("world", swept([2, 3], 2))
def test_modes_equal_dense_attention(mode: str, world: int) -> None:
    check(world, grid(mode))


@pytest.mark.parametrize("mode", ["allgather", "ring", "ulysses", "hybrid"])
def test_modes_equal_dense_attention_on_four_ranks(mode: str) -> None:
    check(4, grid(mode))


def test_a_double_ring_equals_dense_attention() -> None:
    check(4, grid("ring", nested=True))


def test_all_heads_in_one_step_equal_dense_attention() -> None:
    check(3, [Case("allgather", split, "packed", step_bytes=2**20) for split in SPLITS])


def test_without_a_mask_all_is_seen() -> None:
    check(3, [Case(mode, "uneven", "all") for mode in ("allgather", "ring", "ulysses")])


def test_ranks_without_tokens_take_part() -> None:
    modes = ("allgather", "ring", "ulysses", "hybrid")
    check(4, [Case(mode, "uniform", size=2, sinks=True, nested=True) for mode in modes])


def test_ranks_without_heads_take_part() -> None:
    heads = [(2, 1), (2, 2), (1, 1), (3, 3)]
    check(4, [Case(mode, "uneven", heads=each) for mode in ("ulysses", "hybrid") for each in heads])


def test_key_heads_that_queries_read_unevenly() -> None:
    check(3, [Case("ulysses", heads=each, sinks=True) for each in [(4, 2), (8, 4), (10, 5), (6, 1)]])


def test_recomputed_activations_equal_dense_attention() -> None:
    modes = ("allgather", "ring", "ulysses", "hybrid")
    check(4, [Case(mode, heads=(4, 1), sinks=True, is_checkpointed=True) for mode in modes])


def test_sixteen_bits_are_close_to_exact() -> None:
    modes = ("allgather", "ring", "ulysses", "hybrid")
    # 8 bits of a number up to 4
    check(4, [Case(mode, "uneven", "packed", dtype=torch.bfloat16, sinks=True) for mode in modes], tolerance=4e-2)


def test_autocast_decides_the_type() -> None:
    check(
        2, [Case("ring", dtype=torch.float32, autocast=True), Case("ulysses", dtype=torch.float32, autocast=True)], 8e-2
    )


def stand_in(size: int, index: int) -> TensorGroup:
    """A group without processes."""
    group = object.__new__(TensorGroup)
    group.size, group.index, group.moved, group.is_silent = size, index, 0.0, False
    return group


@pytest.mark.parametrize("mode", ["allgather", "ring", "ulysses", "hybrid"])
def test_silent_groups_give_shapes_without_communication(mode: str) -> None:
    groups = ContextGroups(stand_in(4, 2), stand_in(2, 0), stand_in(2, 1))
    case = Case(mode, sinks=True)
    with dry_run([groups.whole]):
        found = call(case, groups)
    own = [x.shape for x in own_part(case, 2, 4)[1]]
    assert [x.shape for x in found] == [own[3], own[0], own[1], own[2], own[4]]
    assert not any(x.any() for x in found)


def test_what_does_not_fit_is_refused() -> None:
    alone = ContextGroups(stand_in(4, 0))
    crossed = ContextGroups(stand_in(4, 1), stand_in(2, 0), stand_in(2, 1))
    q = torch.zeros(1, 4, 3, 8)
    keys, split = torch.zeros(1, 2, 3, 8), uniform(12, 4)
    mask = Mask(None, batch=1, q_length=12, k_length=12, device="cpu")

    def refused(message: str, *args: Any, groups: ContextGroups = alone, mode: Any = "ring", **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            context_attention(*args, groups, mode=mode, scale=1.0, **options)

    refused("mode: got 'spiral'", q, keys, keys, mask, split, mode="spiral")
    refused("'hybrid' without", q, keys, keys, mask, split, mode="hybrid")
    refused("one for 3 ranks", q, keys, keys, mask, uniform(12, 3))
    refused("rank 1 of 4, 1 of 2 outer and 0 of 2 inner", q, keys, keys, mask, split, groups=crossed)
    refused("gives this rank 4", q, keys, keys, mask, uniform(13, 4))
    refused("a multiple", q[:, :3], keys, keys, mask, split)
    refused("one width", q, keys[..., :4], keys, mask, split)
    refused("travel together", q, keys, keys.half(), mask, split)
    refused("each of 4 heads", q, keys, keys, mask, split, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="numbers of 3 queries and 2 keys"):
        local_attention(q, keys, keys, mask, None, torch.arange(2), scale=1.0)


def test_local_attention_takes_some_queries_and_some_keys() -> None:
    q, k, v, d_out, sinks = (x.requires_grad_() for x in tensors(Case("ring", sinks=True)))
    rows, columns = torch.arange(3, S, 2), torch.arange(0, 200)
    dense_mask = torch.where((rows[:, None] >= columns), 0.0, -torch.inf).double()
    scores = 0.3 * q[:, :, rows] @ k[:, :, columns].repeat_interleave(2, 1).mT + dense_mask
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(B, -1, len(rows), 1)], -1)
    wanted = scores.softmax(-1)[..., :-1] @ v[:, :, columns].repeat_interleave(2, 1)
    mask = Mask(causal, batch=B, q_length=S, k_length=200, device="cpu")
    found = local_attention(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask, rows, None, scale=0.3, sinks=sinks)
    gradients = (torch.autograd.grad(out, (q, k, v, sinks), d_out[:, :, rows]) for out in (found, wanted))
    for one, other in zip((found, *next(gradients)), (wanted, *next(gradients)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert first_tokens(mask, 200, q.device) is first_tokens(mask, 200, q.device)


def test_splits_of_groups_hold_the_tokens_of_their_ranks() -> None:
    split = uneven(S, 6)
    outer = joined(split, 2)
    assert outer is joined(split, 2)
    for index in range(3):
        tokens = torch.cat([split.indices(2 * index), split.indices(2 * index + 1)]).sort().values
        assert torch.equal(outer.indices(index), tokens)
        inner = within(split, 2, index)
        assert all(torch.equal(tokens[inner.indices(rank)], split.indices(2 * index + rank)) for rank in range(2))
    assert joined(split, 1) is split
    assert within(split, 6, 0) is split
