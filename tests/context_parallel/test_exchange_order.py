"""In which order ranks of an attention communicate and compute, and what they hold meanwhile.

Layouts are those of `exchange_cases`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from context_parallel.exchange_cases import DV, LIMIT_S, B, Case, D, call, groups_of, mask_of, own_part
from lightning_mm5d.context_parallel.exchange import attention, ring
from lightning_mm5d.context_parallel.exchange.attention import context_attention
from lightning_mm5d.context_parallel.exchange.ring import Local
from lightning_mm5d.context_parallel.exchange.ulysses import Gather
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.sequence import Hop
from ranks import run_ranks


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
    even = [Case(mode, "uneven") for mode in ("allgather", "ring")]
    even += [Case(mode, "uniform", heads=(8, 4), size=300) for mode in ("ulysses", "hybrid")]
    shared = [Case(mode, heads=heads) for mode in ("ulysses", "hybrid") for heads in ((4, 2), (4, 1), (3, 3))]
    ranks = run_ranks(4, saved, 4, [*even, *shared], limit=LIMIT_S)
    for index, case in enumerate([*even, *shared]):
        found = [results[index] for results in ranks]
        if index < len(even):
            assert all(kept == own for kept, own in found), (case, found)
        assert sum(kept for kept, _ in found) == sum(own for _, own in found), (case, found)


def order_of_work(rank: int, world: int, case: Case) -> tuple[list[str], float]:
    """What a rank does in turn, and the bytes that it has sent."""
    events: list[str] = []
    groups = groups_of(rank, world)

    class Noted(Hop):
        def __init__(self, group: TensorGroup, sent: Tensor, shape: Sequence[int]) -> None:
            self._name = "outer" if group is groups.outer else "inner"
            events.append(f"post {self._name}")
            super().__init__(group, sent, shape)

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
    ring.Hop, attention.Gather = Noted, NotedGather  # type: ignore[misc]
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
    """The largest number of whole keys or values of a step that were held at a time, as they come or in order."""
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

    attention.Gather = Counted  # type: ignore[misc]
    call(case, groups)
    return most


def test_at_most_two_heads_of_whole_keys_and_values_are_held() -> None:
    assert run_ranks(2, whole_keys_held, 2, Case("allgather", heads=(10, 5)), limit=LIMIT_S) == [4, 4]
