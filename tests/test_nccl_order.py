"""The backend that orders operations as NCCL does: what it carries, what it reports, and what it finds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import nccl_order
from lightning_mm5d.engine import codec
from lightning_mm5d.engine.transport import Channel, Transport
from lightning_mm5d.schedule import Graph, Kind, Schedule, build
from ranks import run_ranks
from schedule.graphs import chain, tree


def _started(name: str = "nccl_order") -> tuple[int, int]:
    nccl_order.register()
    dist.init_process_group(name)
    return dist.get_rank(), dist.get_world_size()


def _told(call: Callable[[], object]) -> str:
    """What the error of a call says; empty without one."""
    try:
        call()
    except RuntimeError as error:
        return f"{error} {error.__cause__ or ''}"
    return ""


def _ended(call: Callable[[], object]) -> str:
    """The same of the last call: operations that hang leave nothing to meet in."""
    told = _told(call)
    dist.destroy_process_group()
    return told


def _collectives(_: int, name: str) -> dict[str, list[float]]:
    rank, world = _started(name)
    own, found = torch.full((2,), float(rank)), dict[str, Tensor]()
    found["all_reduce"] = own.clone()
    dist.all_reduce(found["all_reduce"])
    found["broadcast"] = own.clone()
    dist.broadcast(found["broadcast"], 1)
    rows = [torch.empty(2) for _ in range(world)]
    dist.all_gather(rows, own)
    found["all_gather"] = torch.cat(rows)
    found["all_gather_single"] = torch.empty(2 * world)
    dist.all_gather_single(found["all_gather_single"], own)
    found["reduce_scatter_single"] = torch.empty(1)
    dist.reduce_scatter_single(found["reduce_scatter_single"], torch.arange(float(world)))
    found["all_to_all_single"] = torch.empty(world)
    work = dist.all_to_all_single(found["all_to_all_single"], torch.arange(float(world)) + rank, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()
    pair = dist.new_group([0, world - 1])
    found["sent"] = torch.full((2,), -1.0)
    if rank in (0, world - 1):
        other = world - 1 - rank
        ops = [dist.P2POp(dist.irecv, found["sent"], other, pair), dist.P2POp(dist.isend, own, other, pair)]
        for one in dist.batch_isend_irecv(ops):
            one.wait()
    return {key: value.tolist() for key, value in found.items()}


@pytest.mark.parametrize("name", nccl_order.NAMES)
def test_collectives_and_messages_give_what_gloo_gives(name: str) -> None:
    for rank, found in enumerate(run_ranks(3, _collectives, name)):
        assert found == {
            "all_reduce": [3.0, 3.0],
            "broadcast": [1.0, 1.0],
            "all_gather": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
            "all_gather_single": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
            "reduce_scatter_single": [3.0 * rank],
            "all_to_all_single": [rank + 0.0, rank + 1.0, rank + 2.0],
            "sent": [2.0, 2.0] if rank == 0 else [-1.0, -1.0] if rank == 1 else [0.0, 0.0],
        }


def _exchange(*, received_first: bool) -> None:
    """Send to the other rank and receive from it, without a batch."""
    other = 1 - dist.get_rank()
    arrived = torch.empty(1)
    calls = [lambda: dist.isend(torch.ones(1), other), lambda: dist.irecv(arrived, other)]
    for work in [call() for call in (calls[::-1] if received_first else calls)]:
        assert work is not None
        work.wait()


def _breaches(rank: int) -> list[str]:
    """Each on groups of its own would be slower: what ends with an error on both ranks leaves no message behind."""
    _started()
    told = []
    sizes = [3, 4]
    peer = 1 - rank
    if rank == 0:
        told.append(_told(lambda: dist.send(torch.ones(sizes[0]), peer)))
    else:
        told.append(_told(lambda: dist.recv(torch.ones(sizes[1]), peer)))
    group = dist.new_group([0, 1])
    works: list[Any] = []
    if rank == 0:
        dist.barrier()  # so that the first operation is under way while another thread issues
        works.append(dist.isend(torch.ones(1), 1, group))
        for name in ("mm5d-copy", "others"):  # microbatches side by side take turns
            thread = threading.Thread(
                target=lambda: told.append(_told(lambda: works.append(dist.isend(torch.ones(1), 1, group)))), name=name
            )
            thread.start()
            thread.join()
        dist.barrier()
    else:
        dist.barrier()
        dist.barrier()
        works += [dist.irecv(torch.ones(1), 0, group) for _ in range(2)]
    for work in works:
        work.wait()
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=group))
    thread.start()  # all that another thread had issued was waited for
    thread.join()
    told.append(_told(lambda: _exchange(received_first=rank == 0)))  # the first of both ends are one message
    told.append(_told(lambda: _exchange(received_first=True)))  # both receive first
    dist.destroy_process_group()
    return told


def test_sizes_threads_and_circles_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ORDER_SECONDS", "1")
    first, second = run_ranks(2, _breaches, limit=30)
    for told in (first[0], second[0]):
        assert "12 bytes are sent and 16 received" in told
    assert first[1] == ""
    assert "two threads use one communicator" in first[2]
    for told in (first[-1], second[-1]):
        assert "nothing has moved for 1 s" in told
        assert "of 4 bytes from" in told
        assert "issued by MainThread at test_nccl_order.py" in told
    assert first[3] == second[1] == ""


def _serial(rank: int, name: str) -> str:
    """Two groups of the same ranks, whose operations the ranks issue in different orders."""
    _started(name)
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in (groups if rank else groups[::-1])]

    def wait() -> None:
        for work in works:
            assert work is not None
            work.wait()

    return _ended(wait)


def test_a_serial_device_runs_communicators_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ORDER_SECONDS", "1")
    assert run_ranks(2, _serial, "nccl_order") == ["", ""]
    assert all("nothing has moved" in told for told in run_ranks(2, _serial, "nccl_order_serial"))


def _drive(rank: int, backend: str, schedule: Schedule, graph: Graph) -> str:
    """Run a schedule whose actions only pass payloads on, as the engine does, with today's threads."""
    _started(backend)
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
    transport = Transport(*groups, torch.device("cpu"), rank)  # type: ignore[arg-type]

    def channel(source: str, target: str, microbatch: int, *, back: bool) -> Channel:
        ends = [graph.node_of(stage, microbatch).rank for stage in (source, target)]
        return Channel("gradients" if back else "activations", ends[0], ends[1], f"{source}->{target}")

    def run() -> None:
        for action in schedule[rank]:
            for one in arriving(action):
                transport.expect(one, 1)
        for action in schedule[rank]:
            for one in arriving(action):
                transport.recv(one)
            back = action.kind is Kind.B
            others = graph.predecessors(action.stage) if back else graph.successors(action.stage)
            for other in others:
                sent = channel(action.stage, other, action.microbatch, back=back)
                transport.send(sent, {}, [torch.ones(1000)])
        transport.flush()

    def arriving(action: Any) -> list[Channel]:
        back = action.kind is Kind.B
        others = graph.successors(action.stage) if back else graph.predecessors(action.stage)
        return [channel(other, action.stage, action.microbatch, back=back) for other in others]

    return _ended(run)


GRAPHS = {
    "vision | language pp 2": tree(8, vision=1, language=2),
    "1f1b of 3": chain(3, 8),
    "1f1b of 4": chain(4, 8),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_threads_that_post_receives_ahead_hang_where_a_communicator_has_one_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ORDER_SECONDS", "1")
    monkeypatch.setattr("lightning_mm5d.engine.transport.FIRST_BYTES", codec.CONTROL_BYTES)  # as on NCCL
    graph = GRAPHS[name]
    told = run_ranks(len(graph.ranks), _drive, "nccl_order", build("1f1b", graph), graph, limit=40)
    assert any("two threads use one communicator" in one or "nothing has moved" in one for one in told), told
    assert run_ranks(len(graph.ranks), _drive, "gloo", build("1f1b", graph), graph, limit=40) == [""] * len(told)
