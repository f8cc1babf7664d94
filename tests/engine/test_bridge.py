"""Payloads between groups of gloo ranks of different sizes: content, bytes, order, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.engine.bridge import WHOLE_BYTES, Bridge
from lightning_mm5d.engine.run_groups import Groups
from lightning_mm5d.engine.transport import Channel, Transport, TransportError
from ranks import run_ranks

Ranks = tuple[int, ...]
NAME = "vision.0->language.0"
LIMIT_S = 40.0  # wall clock of one multi-process test; a deadlock ends here
WORLD = 7

APART: list[tuple[Ranks, Ranks]] = [
    ((0,), (1,)),
    ((0,), (1, 2)),
    ((0, 1), (2, 3)),
    ((0, 1), (2, 3, 4, 5)),
    ((0, 1, 2), (3, 4)),
    ((0, 1, 2, 3), (4,)),
    ((0, 1, 2), (3, 4, 5, 6)),
]
SHARED: list[tuple[Ranks, Ranks]] = [
    ((0,), (0, 1)),
    ((1,), (0, 1)),
    ((0, 1), (1, 2)),
    ((0, 1), (0, 1, 2, 3)),
    ((0, 1, 2), (2, 3)),
    ((0,), (0,)),
    ((0, 1), (0, 1)),
    ((0, 1, 2, 3), (1, 2)),
    ((0, 1, 2), (1,)),
]


def connect(rank: int, timeout: float = LIMIT_S / 2) -> tuple[Groups, Transport]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    groups = Groups(timedelta(seconds=timeout))
    pair = [groups.get(range(dist.get_world_size()), tag=tag) for tag in ("ascending", "descending")]
    return groups, Transport(*pair, torch.device("cpu"), rank)


def bridge(
    rank: int, groups: Groups, transport: Transport, sources: Ranks, targets: Ranks, direction: Any = "activations"
) -> Bridge:
    group = groups.get(targets) if len(targets) > 1 else None
    return Bridge(transport, rank=rank, direction=direction, name=NAME, sources=sources, targets=targets, group=group)


def carry(way: Bridge, rank: int, sources: Ranks, targets: Ranks, payloads: Sequence[Any]) -> list[Any]:
    """What this rank gets of `payloads`, of which all are sent before any is awaited."""
    if rank in sources:
        for payload in payloads:
            way.send(*payload)
    if rank not in targets:
        return []
    way.expect(len(payloads))
    return [way.recv() for _ in payloads]


def finish(transport: Transport) -> None:
    """No rank leaves before all have received, so that one that is done is never taken for a dead one."""
    transport.flush()
    dist.barrier()
    transport.close()


def zoo(seed: int) -> list[tuple[Any, list[Tensor]]]:
    torch.manual_seed(seed)
    base = torch.randn(37, 41)
    return [
        ({"grads": [True], "tree": ["ü", None, 1.5]}, [torch.randn(5, 67, 3)]),
        (None, []),
        ("nothing in them", [torch.empty(0), torch.empty(4, 0, 2, dtype=torch.int64), torch.tensor(3.5)]),
        (
            [seed, {"of": "all dtypes, odd lengths"}],
            [
                torch.rand(1025) < 0.5,
                torch.randint(0, 256, (3, 347), dtype=torch.uint8),
                torch.tensor(7),
                torch.randint(-(2**60), 2**60, (131,)),
                base.bfloat16(),
                torch.rand(9) < 0.5,
                torch.randn(513, dtype=torch.float64),
                torch.randn(1031).half(),
                torch.randn(64, dtype=torch.complex128),
            ],
        ),
        (0, [base.t(), base[:2, :3].t(), base[::2, 1::3], base[:1].expand(50, 41), base.requires_grad_(), base * 2]),
        (1, [torch.randn(151, dtype=torch.complex64).conj(), torch.randn(151, dtype=torch.complex128).imag]),
        ("large", [torch.randn(3), torch.randn(100_003), torch.randn(257, 300).t()]),
    ]


def assert_equal(got: tuple[Any, list[Tensor]], sent: tuple[Any, list[Tensor]]) -> None:
    assert got[0] == sent[0]
    assert [(t.dtype, t.shape) for t in got[1]] == [(t.dtype, t.shape) for t in sent[1]]
    assert all(torch.equal(a, b) for a, b in zip(got[1], sent[1], strict=True))
    assert not any(t.requires_grad for t in got[1])


def _both_ways(rank: int, pairs: list[tuple[Ranks, Ranks]]) -> int:
    groups, transport = connect(rank)
    received = 0
    for first, second in pairs:
        sides = [
            (bridge(rank, groups, transport, first, second), first, second, zoo(0) * 2),
            (bridge(rank, groups, transport, second, first, "gradients"), second, first, zoo(1) * 2),
        ]
        for way, sources, _, payloads in sides:
            for payload in payloads if rank in sources else []:
                way.send(*payload)
        dist.barrier()  # everybody has sent everything before anybody takes
        for way, _, targets, payloads in sides:
            if rank in targets:
                way.expect(len(payloads))
        for way, sources, targets, payloads in reversed(sides):
            for payload in payloads if rank in targets else []:
                got = way.recv()
                assert_equal(got, payload)
                assert set(targets) <= set(sources) or all(t.is_contiguous() for t in got[1])
                received += 1
    finish(transport)
    return received


@pytest.mark.parametrize("pairs", [APART, SHARED], ids=["apart", "shared"])
def test_every_target_gets_every_payload_whole_in_order_and_both_ways(pairs: list[tuple[Ranks, Ranks]]) -> None:
    """first and second ranks of each pair: one stage and the next"""
    received = run_ranks(WORLD, _both_ways, pairs, limit=LIMIT_S)
    count = 2 * len(zoo(0))
    assert received == [count * sum((rank in a) + (rank in b) for a, b in pairs) for rank in range(WORLD)]


# of a payload that is divided, twelfths that cross: sent by rank, in the order of ranks
CROSSING: list[tuple[Ranks, Ranks, list[int]]] = [
    ((0,), (1,), [12]),
    ((0,), (1, 2), [12]),
    ((0, 1), (2, 3), [6, 6]),
    ((0, 1), (2, 3, 4, 5), [6, 6]),
    ((2, 3, 4, 5), (0, 1), [0, 0, 3, 3, 3, 3]),
    ((0, 1, 2), (3, 4), [4, 4, 4]),
    ((3, 4), (0, 1, 2), [0, 0, 0, 6, 6]),
    ((0, 1, 2, 3), (4,), [3, 3, 3, 3]),
    ((0,), (0, 1), [6]),
    ((1,), (0, 1), [0, 6]),
    ((0, 1), (1, 2), [6, 6]),
    ((0, 1), (0, 1, 2, 3), [3, 6]),
    ((0, 1), (0, 1), []),
    ((0, 1, 2, 3), (1, 2), []),
]


def _count(rank: int) -> list[tuple[int, int, int]]:
    groups, transport = connect(rank)
    counts = []
    for sources, targets, _ in CROSSING:
        way = bridge(rank, groups, transport, sources, targets)
        payload = ({"leaf": 0}, [torch.randn(12, 7, 20), torch.arange(1200)])
        required, overhead = transport.bytes_required, []
        for number in range(3):
            before = transport.bytes_sent - transport.bytes_required
            carry(way, rank, sources, targets, [payload])
            overhead.append(transport.bytes_sent - transport.bytes_required - before)
            assert number < 2 or overhead[1] == overhead[2]
        counts.append((transport.bytes_required - required, overhead[2], way.gathered))
    finish(transport)
    return counts


def test_each_byte_crosses_once_and_all_sources_take_their_share() -> None:
    """layouts as in CROSSING"""
    size = 3 * (12 * 7 * 20 * 4 + 1200 * 8)  # three payloads
    for (sources, targets, twelfths), *counts in zip(CROSSING, *run_ranks(6, _count, limit=LIMIT_S), strict=True):
        sent, overhead, gathered = ([count[k] for count in counts] for k in range(3))
        assert sent == [part * size // 12 for part in twelfths] + [0] * (6 - len(twelfths)), (sources, targets)
        # a known header is not sent again: two int64 a message, from each source at most one to each target
        links = len({(s, t) for s in sources for t in targets if s != t})
        assert all(extra % 16 == 0 for extra in overhead)
        assert sum(overhead) <= 16 * links
        assert (sum(overhead) > 0) == (sum(sent) > 0)
        b = 0 if set(targets) <= set(sources) else len(targets)
        assert gathered == [size * (b - 1) // b if b and rank in targets else 0 for rank in range(6)]


def _small(rank: int) -> tuple[list[int], int]:
    groups, transport = connect(rank)
    sources, targets = (0, 1), (2, 3, 4)
    way = bridge(rank, groups, transport, sources, targets)
    counts = []
    for size in (WHOLE_BYTES - 1, WHOLE_BYTES):
        before = transport.bytes_required
        payload = (None, [(torch.arange(size) % 251).to(torch.uint8), torch.tensor(True)])
        for got in carry(way, rank, sources, targets, [payload]):
            assert_equal(got, payload)
        counts.append(transport.bytes_required - before)
        if size < WHOLE_BYTES:
            assert way.gathered == 0
    finish(transport)
    return counts, way.gathered


def test_a_tensor_under_one_kib_goes_whole_to_each_target_and_is_not_gathered() -> None:
    """vision: ranks 0-1; language: ranks 2-4"""
    results = run_ranks(5, _small, limit=LIMIT_S)
    # source 0 covers where targets 0 and 1 begin, source 1 where target 2 does; a bool of one byte goes along
    assert [counts[0] for counts, _ in results] == [2 * WHOLE_BYTES, WHOLE_BYTES, 0, 0, 0]
    assert [counts[1] for counts, _ in results] == [WHOLE_BYTES // 2 + 2, WHOLE_BYTES // 2 + 1, 0, 0, 0]
    longest = WHOLE_BYTES // 3 + 1
    assert [gathered for _, gathered in results] == [0, 0] + [2 * longest] * 3


def parts_of(index: int) -> tuple[Tensor, Tensor]:
    return torch.full((300 + index, 2), index), torch.full((3,), index)


def _own(rank: int) -> list[int]:
    groups, transport = connect(rank)
    counts = []
    for sources, targets in [((0, 1), (2, 3)), ((0, 1), (1, 2)), ((1, 2), (0, 1)), ((1, 2), (1, 2)), ((0,), (3,))]:
        way = bridge(rank, groups, transport, sources, targets)
        before = transport.bytes_required
        replicated = torch.randn(40, 11, generator=torch.Generator().manual_seed(0))

        if rank in sources:
            large, small = parts_of(sources.index(rank))
            way.send("first", [large, replicated, small], frozenset({0, 2}))
            way.send("second", [replicated])
        if rank in targets:
            way.expect(2)
            large, small = parts_of(targets.index(rank))
            assert_equal(way.recv(), ("first", [large, replicated, small]))
            assert_equal(way.recv(), ("second", [replicated]))
        counts.append(transport.bytes_required - before)
    finish(transport)
    return counts


def test_own_tensors_reach_the_target_of_the_same_index_and_no_other() -> None:
    """vision: ranks 0-1; language: ranks 2-3; then with one shared rank, with both shared, and one to one"""
    counts = list(zip(*run_ranks(4, _own, limit=LIMIT_S), strict=True))
    own, half = [300 * 16 + 24, 301 * 16 + 24], 2 * 40 * 11 * 4 // 2  # two payloads hold the replicated tensor
    assert counts[0] == counts[1] == (own[0] + half, own[1] + half, 0, 0)
    assert counts[2] == (0, own[0] + half, own[1] + half, 0)
    assert counts[3] == (0, 0, 0, 0)
    assert counts[4] == (own[0] + 2 * half, 0, 0, 0)


def _plain(rank: int) -> None:
    _, transport = connect(rank)
    channel = Channel("activations", 0, 1, NAME)
    way = Bridge(transport, rank=rank, direction="activations", name=NAME, sources=(0,), targets=(1,), group=None)
    tensors = [torch.randn(50, 60).t(), torch.tensor(2)]
    if rank == 0:
        way.send({"a": [1]}, tensors)
        once = transport.bytes_sent
        transport.send(channel, {"a": [1]}, tensors)  # the same header: nothing was added to it
        assert transport.bytes_sent - once == transport.bytes_required // 2 + 16
    else:
        way.expect(2)
        for got in (transport.recv(channel), way.recv()):
            assert got[0] == {"a": [1]}
            assert [t.shape for t in got[1]] == [(60, 50), ()]
    finish(transport)


def test_between_single_ranks_a_payload_travels_as_the_transport_sends_it() -> None:
    """vision: rank 0; language: rank 1"""
    run_ranks(2, _plain, limit=LIMIT_S)


def _lose_source(rank: int) -> Any:
    groups, transport = connect(rank)
    way = bridge(rank, groups, transport, (0,), (1, 2))
    lost = None
    dist.barrier()
    if rank:
        way.expect(1)
        with pytest.raises(TransportError) as caught:
            way.recv()
        lost = caught.value.rank, str(caught.value)
        with pytest.raises(TransportError, match="lost rank 0"):
            way.recv()
    dist.destroy_process_group()  # rank 0 leaves before it has sent anything
    return lost


def test_targets_that_lose_a_source_name_it() -> None:
    """vision: rank 0, which leaves; language: ranks 1-2"""
    results = run_ranks(3, _lose_source, limit=LIMIT_S)
    for rank in (1, 2):
        assert results[rank][0] == 0
        assert results[rank][1].startswith(f"rank {rank} lost rank 0 while receiving {NAME} (activations): ")


def _disagree(rank: int) -> None:
    groups, transport = connect(rank)
    way = bridge(rank, groups, transport, (0, 1), (2,))
    if rank < 2:
        way.send(None, [torch.zeros(300 + rank)])
    else:
        way.expect(1)
        with pytest.raises(AssertionError, match=r"\[\[301\]\] from 1, \[\[300\]\] from another rank"):
            way.recv()
    finish(transport)


def test_sources_that_do_not_hold_the_same_shapes_are_noticed() -> None:
    """vision: ranks 0-1; language: rank 2"""
    run_ranks(3, _disagree, limit=LIMIT_S)


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Transport]:
    """all stages: rank 0"""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    groups = Groups(timedelta(seconds=5))
    pair = [groups.get([0], tag=tag) for tag in ("ascending", "descending")]
    transport = Transport(*pair, torch.device("cpu"), 0)
    yield transport
    transport.close()
    groups.destroy()
    dist.destroy_process_group()


def make(transport: Transport, sources: Ranks, targets: Ranks) -> Bridge:
    return Bridge(transport, rank=0, direction="gradients", name=NAME, sources=sources, targets=targets, group=None)


@pytest.mark.parametrize(("sources", "targets"), [((0,), (0,)), ((0, 1), (0,)), ((0, 1, 2), (0, 2))])
def test_where_every_target_is_a_source_each_gets_its_own_memory(
    transport: Transport, sources: Ranks, targets: Ranks
) -> None:
    way = make(transport, sources, targets)
    tensor = torch.ones(30, 40, requires_grad=True).t()
    [(meta, [got])] = carry(way, 0, sources, targets, [(("a", 1), [tensor])])
    assert meta == ["a", 1]
    assert got.data_ptr() == tensor.data_ptr()
    assert got.stride() == tensor.stride()
    assert not got.requires_grad
    assert transport.bytes_sent == way.gathered == 0


def test_own_tensors_between_groups_of_different_sizes_are_refused(transport: Transport) -> None:
    way = make(transport, (0,), (1, 2))
    with pytest.raises(AssertionError, match=r"1 sources of .* have no shards of their own for 2 targets"):
        way.send(None, [torch.ones(3)], frozenset({0}))


def test_ranks_that_do_not_ascend_and_a_group_of_other_ranks_are_refused(transport: Transport) -> None:
    for sources, targets in [((1, 0), (2,)), ((0,), (2, 2)), ((0,), ())]:
        with pytest.raises(AssertionError, match="must ascend"):
            make(transport, sources, targets)
    with pytest.raises(AssertionError, match=r"gathers on ranks \(0, 1\), but its group has None"):
        make(transport, (1,), (0, 1))


def test_only_sources_send_and_only_targets_receive(transport: Transport) -> None:
    with pytest.raises(AssertionError, match="rank 0 does not send"):
        make(transport, (1,), (0,)).send(None, [])
    with pytest.raises(AssertionError, match="rank 0 does not receive"):
        make(transport, (0,), (1,)).recv()
