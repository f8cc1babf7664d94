"""A reduce-scatter gives each rank its sum, by one collective where the backend sums, for equal and unequal shares.

ranks 0-2: one group, over gloo and over a backend that orders operations as NCCL does.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

import nccl_order
from lightning_mm5d.data_parallel import shared_parameters
from lightning_mm5d.data_parallel.shared_parameters import ScatteredSum
from lightning_mm5d.gradients.reduction import grown_bytes
from ranks import run_ranks

RANKS = 3
LENGTHS = ((2, 2, 2), (3, 0, 2), (0, 1, 0))


def _sums(rank: int) -> dict[str, tuple[list[list[float]], int]]:
    nccl_order.register()
    found: dict[str, tuple[list[list[float]], int]] = {}
    scatter, calls = shared_parameters.reduce_scatter_single, list[int]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(rank)
        return scatter(*args, **kwargs)

    shared_parameters.reduce_scatter_single = counted
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for backend in ("gloo", "nccl_order"):
        calls.clear()
        group = dist.new_group(backend=backend)
        totals = []
        for lengths in LENGTHS:
            sent = torch.arange(sum(lengths), dtype=torch.float64) + 10.0 * rank
            totals.append(ScatteredSum(sent, lengths, group).wait().tolist())
        found[backend] = totals, len(calls)
    return found


def test_each_rank_gets_its_sum_by_the_collective_that_its_backend_has() -> None:
    for rank, found in enumerate(run_ranks(RANKS, _sums)):
        expected = []
        for lengths in LENGTHS:
            first = [0, *accumulate(lengths)][rank]
            expected.append([RANKS * (first + place) + 30.0 for place in range(lengths[rank])])
        assert found["gloo"] == (expected, 0)
        assert found["nccl_order"] == (expected, len(LENGTHS))


def test_messages_grow_with_the_ranks_until_copies_take_too_much_memory() -> None:
    assert [grown_bytes(100, ranks) for ranks in (2, 16, 31, 32, 128, 512)] == [100, 100, 100, 200, 800, 800]
