"""Payloads between gloo ranks: order, shapes, dtypes, failure, accounting; and the registry of groups."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_mm5d.engine.codec import HEADER_SLOTS, PACK_BYTES
from lightning_mm5d.engine.run_groups import Groups
from lightning_mm5d.engine.transport import FIRST_BYTES, Channel, Transport, TransportError
from ranks import run_ranks

activations = partial(Channel, "activations", name="vision.0->language.0")  # of (source rank, receiving rank)
gradients = partial(Channel, "gradients", name="vision.0->language.0")
LIMIT_S = 40.0  # wall clock of one multi-process test; a deadlock ends here


def run_on_groups(
    world: int, body: Callable[[int, Groups], Any], folder: Path, killed: tuple[int, ...] = ()
) -> list[Any]:
    """Results of ``body(rank, groups)`` in ``world`` processes; None for those that must be ``killed``."""
    return run_ranks(world, _on_rank, world, body, str(folder / "store"), limit=LIMIT_S, killed=killed)


def _on_rank(rank: int, world: int, body: Callable[[int, Groups], Any], store: str) -> Any:
    timeout = timedelta(seconds=LIMIT_S / 2)
    dist.init_process_group("gloo", f"file://{store}", timeout, world, rank)
    result = body(rank, Groups(timeout))
    dist.destroy_process_group()  # no barrier at the end, which would fail where a rank was killed
    return result


def make_transport(rank: int, groups: Groups) -> Transport:
    world = range(dist.get_world_size())
    pair = [groups.get(world, tag=tag) for tag in ("ascending", "descending")]
    return Transport(*pair, torch.device("cpu"), rank)


def finish(transport: Transport) -> None:
    """No rank leaves before all have received, so that one that is done is never taken for a dead one."""
    transport.flush()
    dist.barrier()
    transport.close()


def _interleave(rank: int, groups: Groups) -> Any:
    transport = make_transport(rank, groups)
    channels = activations(0, 1), activations(0, 1, name="audio.0->language.0"), gradients(0, 1)
    got = []
    if rank == 0:
        for index in range(4):
            for channel, size in zip(channels, (1, 3, 40_000), strict=True):
                transport.send(channel, str(channel), [torch.full((size,), index)])
    else:
        for channel in channels:
            transport.expect(channel, 4)
        for channel in reversed(channels):  # not the sender's order
            payloads = [transport.recv(channel) for _ in range(4)]
            assert {meta for meta, _ in payloads} == {str(channel)}
            got.append([tensor[-1].item() for _, [tensor] in payloads])
    finish(transport)
    return got


def test_each_channel_is_first_in_first_out_whatever_the_others_carry(tmp_path: Path) -> None:
    """vision, audio: rank 0; language: rank 1"""
    assert run_on_groups(2, _interleave, tmp_path)[1] == [[0, 1, 2, 3]] * 3


def _exchange(rank: int, groups: Groups) -> Any:
    transport = make_transport(rank, groups)
    others = [other for other in range(3) if other != rank]
    makers = (activations, gradients)
    got = []
    for step in range(2):
        for make, other in itertools.product(makers, others):
            transport.expect(make(other, rank), 3)
        for index, make, other in itertools.product(range(3), makers, others):
            transport.send(make(rank, other), None, [torch.full((500_000,), rank + index + step)])
        # everybody has sent everything before anybody takes
        took = [transport.recv(make(o, rank))[1][0] for o in others for make in makers for _ in range(3)]
        got += [tensor.unique().item() - step for tensor in took]
        transport.flush()
    finish(transport)
    return got


def test_large_sends_of_all_ranks_to_all_others_do_not_deadlock(tmp_path: Path) -> None:
    """one stage on each of ranks 0, 1, 2; two steps"""
    for rank, got in enumerate(run_on_groups(3, _exchange, tmp_path)):
        others = [other for other in range(3) if other != rank]
        assert got == [other + index for other in others for _ in range(2) for index in range(3)] * 2


def _run_ahead(rank: int, groups: Groups) -> Any:
    transport = make_transport(rank, groups)
    if rank == 0:
        for index in range(30):
            tensor = torch.full((20_000,), index)
            transport.send(activations(0, 1), None, [tensor])
        memory = StorageWeakRef(tensor.untyped_storage())
        del tensor
        transport.flush()
        assert memory.expired()
        dist.barrier()
    else:
        transport.expect(activations(0, 1), 30)
        dist.barrier()  # the sender has let go of all before the first is taken
        for index in range(30):
            assert transport.recv(activations(0, 1))[1][0][-1].item() == index
    finish(transport)
    return transport.waited


def test_payloads_leave_their_sender_before_they_are_taken(tmp_path: Path) -> None:
    """vision: rank 0 (runs 30 microbatches ahead); language: rank 1"""
    waited = run_on_groups(2, _run_ahead, tmp_path)
    assert waited[0] == 0.0 < waited[1]


def _zoo() -> list[tuple[Any, list[torch.Tensor]]]:
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    leaf = torch.randn(3, 4, requires_grad=True)
    dtypes = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64]
    big, room = PACK_BYTES // 4, FIRST_BYTES // 4 - 1000  # floats
    return [
        (None, []),
        ("scalar", [torch.tensor(3.5)]),
        (3, [torch.empty(0), torch.empty(4, 0, 2, dtype=torch.int64)]),
        (["tuple", [0, 1]], [(base * 5).to(dtype) for dtype in dtypes]),
        ({}, [torch.randn(4, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex128).imag]),
        ({"bias": None}, [base.t(), base[::2, 1::3], base[:1].expand(5, 8), leaf, leaf * 2]),
        ({"ü": "字"}, [torch.empty(0), torch.randn(big), torch.tensor(True), torch.randn(big, 2).t()]),
        ([], [torch.randn(1), torch.randn(big - 1)]),  # just small enough to be packed
        ("some have room", [torch.randn(5), torch.randn(room), torch.randn(7), torch.randn(room), torch.randn(2)]),
        ("none has", [torch.randn(room, 2), torch.randn(3)]),
        ("h" * FIRST_BYTES, [torch.randn(3), torch.randn(room)]),  # a header that has none
    ]


def _send_zoo(rank: int, groups: Groups) -> None:
    transport = make_transport(rank, groups)
    payloads = _zoo() * 2  # the second time with every header known
    for channel in (activations(0, 1), activations(1, 1)):
        if rank == channel.dst_rank:
            transport.expect(channel, len(payloads))
        if rank == channel.src_rank:
            for meta, tensors in payloads:
                transport.send(channel, meta, tensors)
        if rank == channel.dst_rank:
            for meta, tensors in payloads:
                got_meta, got = transport.recv(channel)
                assert got_meta == meta
                assert [t.dtype for t in got] == [t.dtype for t in tensors]
                assert [t.shape for t in got] == [t.shape for t in tensors]
                assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))
                assert not any(t.requires_grad for t in got)
    finish(transport)


def test_every_dtype_shape_and_stride_arrives_as_it_was_sent(tmp_path: Path) -> None:
    """vision: rank 0; language, with a second stage of it: rank 1"""
    run_on_groups(2, _send_zoo, tmp_path)


def _change_shapes(rank: int, groups: Groups) -> None:
    transport = make_transport(rank, groups)
    lengths = [*range(1, HEADER_SLOTS + 50), 3, HEADER_SLOTS + 40, 3]  # 3 was forgotten by then
    channel = activations(0, 1)
    if rank == 0:
        for length in lengths:
            transport.send(channel, None, [torch.arange(length)])
    else:
        transport.expect(channel, len(lengths))
        for length in lengths:
            assert torch.equal(transport.recv(channel)[1][0], torch.arange(length))
    finish(transport)


def test_more_signatures_than_either_end_remembers_still_arrive(tmp_path: Path) -> None:
    """vision: rank 0; language: rank 1"""
    run_on_groups(2, _change_shapes, tmp_path)


def _count(rank: int, groups: Groups) -> list[tuple[int, int]]:
    transport = make_transport(rank, groups)
    counts = []
    if rank == 0:
        for dst in (1, 1, 0):
            transport.send(activations(0, dst), {"leaf": 0}, [torch.zeros(1000, 100), torch.ones(7)])
            counts.append((transport.bytes_required, transport.bytes_sent))
    else:
        transport.expect(activations(0, 1), 2)
    finish(transport)
    return counts


def test_counts_every_byte_and_sends_at_most_a_hundredth_more_than_needed(tmp_path: Path) -> None:
    """vision: rank 0, with a second stage of it; language: rank 1"""
    first, second, local = run_on_groups(2, _count, tmp_path)[0]
    assert first[0] == 400_028
    assert first[0] + 16 < first[1] <= 1.01 * first[0]
    assert second == (2 * 400_028, first[1] + 400_028 + 16)  # with the header known, two int64
    assert local == second  # nothing on the network


def _close(rank: int, groups: Groups) -> None:
    transport = make_transport(rank, groups)
    transport.expect(activations(1 - rank, rank), 1)
    transport.send(activations(rank, 1 - rank), None, [])
    assert transport.recv(activations(1 - rank, rank)) == (None, [])
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("mm5d-")]
    assert {thread.name for thread in threads} == {f"mm5d-send-{1 - rank}", f"mm5d-recv-{1 - rank}"}
    finish(transport)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(TransportError, match=f"transport of rank {rank} is closed"):
        transport.send(activations(rank, 1 - rank), None, [])


def test_close_leaves_no_thread_and_refuses_further_use(tmp_path: Path) -> None:
    """one stage on each of ranks 0, 1"""
    run_on_groups(2, _close, tmp_path)


def _lose_peer(rank: int, groups: Groups) -> Any:
    transport = make_transport(rank, groups)
    if rank == 2:
        transport.expect(activations(0, 2), 1)
        transport.recv(activations(0, 2))
        os.kill(os.getpid(), signal.SIGKILL)
    transport.expect(gradients(2, rank), 1)
    if rank == 0:
        transport.send(activations(0, 2), None, [torch.ones(2)])
    else:
        transport.expect(activations(0, 1), 1)
    # rank 1 waits for a rank that lives, and hears of the other all the same
    with pytest.raises(TransportError) as caught:
        transport.recv(activations(0, 1) if rank else gradients(2, 0))
    transport.close()
    return caught.value.rank, str(caught.value)


def test_a_killed_rank_is_named_by_all_who_wait_for_it(tmp_path: Path) -> None:
    """vision: ranks 0, 1; language: rank 2, killed after its first payload"""
    lost = run_on_groups(3, _lose_peer, tmp_path, killed=(2,))
    assert lost[0][0] == 2
    assert lost[0][1].startswith("rank 0 lost rank 2 while receiving vision.0->language.0 (gradients): ")
    assert lost[1][0] in (0, 2)  # rank 0 ends at once as well: whichever is noticed first
    assert f"rank 1 lost rank {lost[1][0]} while receiving" in lost[1][1]


def _send_and_flush(transport: Transport) -> None:
    transport.send(activations(0, 1), None, [torch.ones(100_000)])
    transport.flush()


def _lose_receiver(rank: int, groups: Groups) -> Any:
    transport = make_transport(rank, groups)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError) as caught:
        _send_and_flush(transport)
    transport.close()
    return caught.value.rank, str(caught.value)


def test_a_rank_killed_before_it_receives_is_named_to_its_sender(tmp_path: Path) -> None:
    """vision: rank 0; language: rank 1, killed before anything arrives"""
    rank, message = run_on_groups(2, _lose_receiver, tmp_path, killed=(1,))[0]
    assert rank == 1
    assert message.startswith("rank 0 lost rank 1 while sending vision.0->language.0 (activations): ")


def _abort(rank: int, groups: Groups) -> str:
    transport = make_transport(rank, groups)
    transport.expect(activations(1 - rank, rank), 1)
    threading.Timer(0.2, transport.abort).start()
    with pytest.raises(TransportError) as caught:
        transport.recv(activations(1 - rank, rank))
    return str(caught.value)


def test_abort_wakes_a_waiting_recv(tmp_path: Path) -> None:
    """one stage on each of ranks 0, 1; nobody sends"""
    assert run_on_groups(2, _abort, tmp_path) == [f"the transport of rank {rank} is closed" for rank in range(2)]


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Transport]:
    """stages 0 and 1 of language: rank 0"""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    groups = Groups(timedelta(seconds=5))
    transport = make_transport(0, groups)
    yield transport
    transport.close()
    groups.destroy()
    dist.destroy_process_group()


def test_a_payload_to_the_own_rank_is_the_same_memory_detached(transport: Transport) -> None:
    tensor = torch.ones(3, requires_grad=True)
    transport.send(activations(0, 0), ("a", 1), [tensor])
    meta, [got] = transport.recv(activations(0, 0))
    assert meta == ["a", 1]
    assert got.data_ptr() == tensor.data_ptr()
    assert not got.requires_grad


def test_recv_of_what_nobody_sends_shows_what_is_there(transport: Transport) -> None:
    transport.send(gradients(0, 0, name="language.1->language.0"), None, [])
    with pytest.raises(AssertionError, match=r"vision.*not yet taken.*language.0 \(gradients\)': 1"):
        transport.recv(activations(0, 0))


def test_meta_that_is_not_json_is_refused(transport: Transport) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        transport.send(activations(0, 0), {"device": torch.device("cpu")}, [])


def test_groups_refuse_ranks_that_do_not_ascend() -> None:
    with pytest.raises(AssertionError, match=r"must ascend, got \[1, 0\]"):
        Groups(timedelta(seconds=1)).get([1, 0], tag="mesh")


def _make_groups(rank: int, groups: Groups) -> None:
    pair, others, tagged = groups.get([0, 1]), groups.get([1, 2]), groups.get((0, 1), tag="other")
    assert [group is not None for group in (pair, others, tagged)] == [rank < 2, rank > 0, rank < 2]
    assert groups.get((0, 1)) is pair
    groups.verify()
    if pair is not None:
        assert pair is not tagged
        total = torch.tensor(rank + 1)
        dist.all_reduce(total, group=pair)
        assert total.item() == 3
        groups.destroy()
        with pytest.raises(ValueError, match="not initialized"):
            dist.get_backend(pair)


def test_groups_are_made_once_for_the_same_ranks_and_tag(tmp_path: Path) -> None:
    """groups: ranks 0-1 (twice), ranks 1-2"""
    run_on_groups(3, _make_groups, tmp_path)


def _disagree(rank: int, groups: Groups) -> list[str]:
    errors = []
    first = [0, 1] if rank else [0]
    for make in (lambda: groups.get(first), groups.verify if rank else lambda: groups.get(first)):
        with pytest.raises(RuntimeError, match="ranks disagree on the next process group: ") as caught:
            make()
        errors.append(str(caught.value).partition(": ")[2])
    return errors


def test_ranks_that_disagree_on_a_group_all_get_an_error_instead_of_a_hang(tmp_path: Path) -> None:
    """two ranks that ask for different groups; then one that asks for one more than the other"""
    zero = "ranks [0] want group 0: ranks [0], tag ''; ranks [1] want "
    want = [zero + "group 0: ranks [0, 1], tag ''", zero + "no more than 0 groups"]
    assert run_on_groups(2, _disagree, tmp_path) == [want, want]
