"""Compressed collectives on three ranks: equal on all of them, near the exact ones, in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.features.compressed_communication.encoding import (
    CompressedGather,
    CompressedScatter,
    CompressedSum,
    Compression,
)
from lightning_mm5d.sharded.collectives import TensorGroup
from ranks import run_ranks

WORLD = 3
WIRES = {"bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
LENGTHS = (1, 2, 7, 400, 1000)


def values(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * length + rank)).to(dtype)


def spied(run: Callable[[], Any]) -> tuple[Any, int]:
    """What `run` returns, and the bytes that it gives to collectives for other ranks."""
    moved = 0

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(result: Tensor, sent: Any = None, *args: Any, **kwargs: Any) -> Any:
            nonlocal moved
            if name == "all_to_all_single":
                moved += sum(size for place, size in enumerate(args[1]) if place != dist.get_rank())
            else:
                moved += sent.nbytes * (WORLD - 1)
            return original(result, sent, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", "all_gather_single"):
            patch.setattr(dist, name, counting(name))
        return run(), moved


def as_tensor_parallel(rank: int, wire: str) -> dict[str, Any]:
    """Of each collective of a tensor parallel group: its result, the exact one, and the share of its bytes."""
    group = dist.group.WORLD
    assert group is not None
    ranks, exact = Compression(getattr(torch, wire)).group(group), TensorGroup(group)
    x = values(rank, 60_000).view(100, 60, 10)[:, ::2].transpose(0, 2)  # of any strides
    lengths, found = [4, 5, 1], {}
    calls: dict[str, Callable[[TensorGroup], Tensor]] = {
        "sum": lambda group: group.sum(x),
        "gather": lambda group: group.gather(x.narrow(0, 0, lengths[rank]), 0, lengths),
        "sum_scattered": lambda group: group.sum_scattered(x, 0, lengths),
        "exchange": lambda group: group.exchange(x.narrow(0, 0, lengths[rank]), 0, lengths, 2, [30, 50, 20]),
    }
    for name, call in calls.items():
        ranks.moved = exact.moved = 0.0
        got, moved = spied(partial(call, ranks))
        assert moved == ranks.moved, name
        expected = call(exact)
        assert got.shape == expected.shape, name
        found[name] = got, expected, moved / exact.moved
    for dtype in (torch.int64, torch.bool):
        assert torch.equal(ranks.gather(x[:1].to(dtype), 0, [1] * 3), exact.gather(x[:1].to(dtype), 0, [1] * 3))
    assert torch.equal(ranks.max(x), exact.max(x))
    assert torch.equal(ranks.gather(x[:1], 0, [1] * 3, exact=True), exact.gather(x[:1], 0, [1] * 3))
    hurt = values(rank, 400).index_fill(0, torch.tensor([3]), float("nan" if rank == 1 else "inf"))
    assert ranks.sum(hurt).isnan().nonzero().flatten().tolist() == [3]
    return found


def on_ranks(rank: int) -> dict[Any, Any]:
    dist.init_process_group("gloo")
    group, found = dist.group.WORLD, {}
    assert group is not None
    for wire in WIRES:
        for is_stochastic in (False, True):
            compression = Compression(getattr(torch, wire), is_stochastic)
            for length in LENGTHS:
                own = values(rank, length)
                case = (wire, is_stochastic, length)
                summed = CompressedSum(own, group, compression, seed=11)
                found["sum", case] = summed.wait()
                lengths = [length, length + 3, 0]
                chunks = [values(rank, one) for one in lengths]
                found["scatter", case] = CompressedScatter(chunks, group, compression, seed=5).wait()
                rows = CompressedGather(values(rank, lengths[rank]), lengths, group, compression)
                found["gather", case] = torch.cat(rows.wait())
    for wire in WIRES:
        found |= {("tensor", wire, name): result for name, result in as_tensor_parallel(rank, wire).items()}
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return run_ranks(WORLD, on_ranks)


CASES = [(wire, is_stochastic, length) for wire in WIRES for is_stochastic in (False, True) for length in LENGTHS]


def test_a_sum_is_equal_on_all_ranks_and_near_the_exact_one(found: list[dict[Any, Any]]) -> None:
    for case in CASES:
        wire, is_stochastic, length = case
        first, *others = [one["sum", case] for one in found]
        assert all(torch.equal(first, other) for other in others), case
        parts = torch.stack([values(rank, length) for rank in range(WORLD)])
        bound = WIRES[wire] * (1.1 + is_stochastic) * (parts.abs().sum(0) + parts.sum(0).abs()) + 1e-3
        assert bool(((first - parts.sum(0)).abs() <= bound).all()), case


def test_rows_are_summed_and_gathered_by_their_owner(found: list[dict[Any, Any]]) -> None:
    for case in CASES:
        wire, is_stochastic, length = case
        for rank, one in enumerate((length, length + 3, 0)):
            parts = torch.stack([values(other, one) for other in range(WORLD)])
            bound = WIRES[wire] * (1.1 + is_stochastic) * parts.abs().sum(0) + 1e-3
            assert bool(((found[rank]["scatter", case] - parts.sum(0)).abs() <= bound).all()), case
        first, *others = [one["gather", case] for one in found]
        assert all(torch.equal(first, other) for other in others)
        exact = torch.cat([values(rank, one) for rank, one in enumerate((length, length + 3, 0))])
        assert bool(((first - exact).abs() <= WIRES[wire] * exact.abs() + 1e-3).all()), case


def test_tensor_parallel_collectives_take_the_share_of_bytes_that_their_dtype_has(found: list[dict[Any, Any]]) -> None:
    for wire, off in WIRES.items():
        share = 0.5 if wire == "bfloat16" else 0.25 + 1 / 128
        for name in ("sum", "gather", "sum_scattered", "exchange"):
            results = [one["tensor", wire, name] for one in found]
            for got, expected, ratio in results:
                assert ratio <= share * 1.01, (wire, name)
                spread = expected.abs() + 3.0
                assert bool(((got - expected).abs() <= 2.2 * off * spread).all()), (wire, name)
            if name in ("sum", "gather"):
                assert all(torch.equal(results[0][0], other[0]) for other in results[1:])
