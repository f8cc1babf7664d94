"""Attention over several ranks equals dense attention in one process, forward and backward, in every mode.

Rings of 2, 3 and 4 ranks; groups within 4 ranks: inner 0-1 and 2-3, outer 0, 2 and 1, 3.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_mm5d.context_parallel.balance.distributions import uniform, zigzag
from lightning_mm5d.context_parallel.exchange import allgather, ring
from lightning_mm5d.context_parallel.exchange.attention import (
    ContextGroups,
    context_attention,
    first_tokens,
    local_attention,
)
from lightning_mm5d.context_parallel.exchange.local import Local
from lightning_mm5d.context_parallel.exchange.transfers import Gather, Hop
from lightning_mm5d.context_parallel.exchange.ulysses import joined, within
from lightning_mm5d.context_parallel.masks.mask import Mask
from lightning_mm5d.sharded.collectives import TensorGroup, dry_run
from lightning_mm5d.sharded.token_split import TokenSplit
from ranks import run_ranks

B, S, D, DV = 2, 301, 8, 6
LIMIT_S = 60


@dataclass(frozen=True)
class Case:
    """One call, the same on all ranks; `split` and `mask` are names of those below."""

    mode: str
    split: str = "zigzag"
    mask: str = "causal"
    heads: tuple[int, int] = (4, 2)
    size: int = S
    sinks: bool = False
    softcap: float | None = None
    dtype: torch.dtype = torch.float64
    nested: bool = False
    step_bytes: int = 0
    autocast: bool = False
    is_checkpointed: bool = False


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (q - k < 40)


def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Documents of 90 tokens; in each, tokens 10 to 49 are an image whose tokens see each other."""
    is_image = (q % 90 >= 10) & (q % 90 < 50) & (k % 90 >= 10) & (k % 90 < 50)
    return (q // 90 == k // 90) & ((k <= q) | is_image)


def padded(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Row 0 ends after 250 tokens; row 1 begins at the 130th, so that its first queries see nothing."""
    return (k <= q) & torch.where(b == 0, k < 250, k >= 130)


MASKS = {"causal": causal, "sliding": sliding, "packed": packed, "padded": padded, "all": None}


def uneven(size: int, ranks: int) -> TokenSplit:
    """Stretches of 7 tokens, at random, of which the last rank gets most and rank 1, if there is a third, none."""
    generator = torch.Generator().manual_seed(ranks)
    weights = torch.tensor([0.0 if rank == 1 and ranks > 2 else 1.0 + rank for rank in range(ranks)])
    starts = list(range(0, size, 7))
    owners = torch.multinomial(weights, len(starts), replacement=True, generator=generator).tolist()
    parts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, owner in zip(starts, owners, strict=True):
        parts[owner].append((start, min(start + 7, size)))
    return TokenSplit.of(parts, size)


SPLITS: dict[str, Callable[[int, int], TokenSplit]] = {"uniform": uniform, "zigzag": zigzag, "uneven": uneven}


def tensors(case: Case) -> list[Tensor]:
    """Whole queries, keys, values, gradient of the output, and sinks."""
    generator = torch.Generator().manual_seed(1)
    heads, keys = case.heads
    shapes = [(B, heads, case.size, D), (B, keys, case.size, D), (B, keys, case.size, DV), (B, heads, case.size, DV)]
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in [*shapes, (heads,)]]
    return [x.to(case.dtype).double() for x in made]


def mask_of(case: Case) -> Mask:
    return Mask(MASKS[case.mask], batch=B, q_length=case.size, k_length=case.size, device="cpu")


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


def groups_of(rank: int, world: int) -> ContextGroups:
    """The groups of a rank; makes them on all ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    whole = TensorGroup(dist.new_group(list(range(world))))
    if world != 4:
        return ContextGroups(whole)
    inner, outer = ([dist.new_group(ranks) for ranks in way] for way in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    return ContextGroups(whole, TensorGroup(inner[rank // 2]), TensorGroup(outer[rank % 2]))


def own_part(case: Case, rank: int, world: int) -> tuple[TokenSplit, list[Tensor]]:
    split = SPLITS[case.split](case.size, world)
    *whole, sinks = tensors(case)
    at = split.indices(rank)
    return split, [x[:, :, at].to(case.dtype) for x in whole] + [sinks.to(case.dtype)]


def call(case: Case, groups: ContextGroups) -> list[Tensor]:
    """Output of one rank, and gradients of its queries, keys, values and of sinks."""
    split, (q, k, v, d_out, sinks) = own_part(case, groups.whole.index, groups.whole.size)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    allgather.STEP_BYTES = case.step_bytes
    chosen = groups if case.nested or case.mode == "hybrid" else ContextGroups(groups.whole)
    options: Any = {"mode": case.mode, "scale": 0.3, "softcap": case.softcap, "sinks": sinks if case.sinks else None}
    arguments = q, k, v, mask_of(case), split, chosen
    with torch.autocast("cpu", dtype=torch.bfloat16) if case.autocast else nullcontext():
        if case.is_checkpointed:
            out = checkpoint(context_attention, *arguments, use_reentrant=False, **options)
        else:
            out = context_attention(*arguments, **options)
    out.backward(d_out.to(out.dtype))
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [out.detach(), *gradients]


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
@pytest.mark.parametrize("world", [2, 3])
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


def saved(rank: int, world: int, cases: list[Case]) -> list[tuple[int, int]]:
    """Bytes that a rank keeps for the backward, and of its own queries, keys, values, output and log-sum-exp."""
    groups, found = groups_of(rank, world), []
    for case in cases:
        storages: dict[int, int] = {}

        def pack(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[x.data_ptr()] = x.untyped_storage().nbytes()
            return x

        split, (q, k, *_) = own_part(case, rank, world)
        q, k, v = (x.clone().requires_grad_() for x in (q, k, k))
        options: Any = {"mode": case.mode, "scale": 0.3}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = context_attention(q, k, v, mask_of(case), split, groups, **options)
        own = q.nbytes + k.nbytes + v.nbytes + out.nbytes + out.nbytes // D
        found.append((sum(storages.values()), own))
        out.sum().backward()  # all ranks, so that none ends while another waits
    return found


def test_what_is_kept_for_the_backward_is_one_ranks_share() -> None:
    alike = [Case(mode, "uneven") for mode in ("allgather", "ring")]
    alike += [Case(mode, "uniform", heads=(8, 4), size=300) for mode in ("ulysses", "hybrid")]
    shared = [Case(mode, heads=heads) for mode in ("ulysses", "hybrid") for heads in ((4, 2), (4, 1), (3, 3))]
    ranks = run_ranks(4, saved, 4, [*alike, *shared], limit=LIMIT_S)
    for index, case in enumerate([*alike, *shared]):
        found = [results[index] for results in ranks]
        if index < len(alike):
            assert all(kept == own for kept, own in found), (case, found)
        assert sum(kept for kept, _ in found) == sum(own for _, own in found), (case, found)


def order_of_work(rank: int, world: int, case: Case) -> tuple[list[str], float]:
    """What a rank does in turn, and the bytes that it has sent."""
    events: list[str] = []
    groups = groups_of(rank, world)

    class Noted(Hop):
        def __init__(self, group: TensorGroup, sent: Tensor, length: int) -> None:
            self._name = "outer" if group is groups.outer else "inner"
            events.append(f"post {self._name}")
            super().__init__(group, sent, length)

        def wait(self) -> Tensor:
            events.append(f"wait {self._name}")
            return super().wait()

    class NotedGather(Gather):
        def __init__(self, *args: Any) -> None:
            events.append("gather")
            super().__init__(*args)

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call_noted(*args: Any) -> Any:
            found = function(*args)
            events.append("skip" if found is None else "attend")
            return found

        return call_noted

    # in this process only
    ring.Hop, allgather.Gather = Noted, NotedGather  # type: ignore[misc]
    Local.attend, Local.gradients = noted(Local.attend), noted(Local.gradients)  # type: ignore[method-assign]
    call(case, groups)
    return events, groups.whole.moved


def test_a_ring_posts_what_comes_next_before_it_computes() -> None:
    post, wait = "post inner", "wait inner"
    forward = [post, "attend", wait, post, "attend", wait, "attend"]
    backward = [post, "attend", post, wait, post, "attend", wait, post, wait, "attend", wait, post, wait]
    ranks = run_ranks(3, order_of_work, 3, Case("ring", mask="all", size=300), limit=LIMIT_S)
    hop = B * 2 * 100 * (D + DV) * 8
    assert ranks == [(forward + backward, (2 + 2 + 3) * hop)] * 3


def test_a_double_ring_posts_the_outer_hop_before_the_inner_ring() -> None:
    round_trip = ["post inner", "attend", "wait inner", "attend"]
    ranks = run_ranks(4, order_of_work, 4, Case("ring", mask="all", nested=True), limit=LIMIT_S)
    for events, _ in ranks:
        assert events[: 2 * len(round_trip) + 2] == ["post outer", *round_trip, "wait outer", *round_trip]
        assert events.count("post outer") == 1 + 1 + 2, "keys and values twice, gradients twice"


def test_a_ring_skips_keys_that_are_not_seen() -> None:
    ranks = run_ranks(3, order_of_work, 3, Case("ring", "uniform"), limit=LIMIT_S)
    counts = [(events.count("attend"), events.count("skip")) for events, _ in ranks]
    assert counts == [(2, 4), (4, 2), (6, 0)]


def test_the_next_heads_are_gathered_while_these_are_computed() -> None:
    pair = ["gather", "gather"]
    ranks = run_ranks(2, order_of_work, 2, Case("allgather", heads=(6, 3), size=300), limit=LIMIT_S)
    once = [*pair, *pair, "attend", *pair, "attend", "attend"]
    gathered = B * 3 * 300 * (D + DV) * 8 / 2
    assert ranks == [(once + once, 3 * gathered)] * 2


def whole_keys_held(rank: int, world: int, case: Case) -> int:
    """The largest number of whole keys or values of a step that were held at a time."""
    groups, held, most = groups_of(rank, world), [], 0

    class Counted(Gather):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            held.append(weakref.ref(self._rows))
            count()

        def wait(self) -> Tensor:
            whole = super().wait()
            held.append(weakref.ref(whole))
            count()
            return whole

    def count() -> None:
        nonlocal most
        end = time.monotonic() + 1
        # gloo's threads let go of a buffer a little after its transfer has ended
        while (now := sum(one() is not None for one in held)) > 4 and time.monotonic() < end:
            time.sleep(0.001)
        most = max(most, now)

    allgather.Gather = Counted  # type: ignore[misc]
    call(case, groups)
    return most


def test_at_most_two_heads_of_whole_keys_and_values_are_held() -> None:
    assert run_ranks(2, whole_keys_held, 2, Case("allgather", heads=(10, 5)), limit=LIMIT_S) == [4, 4]


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
