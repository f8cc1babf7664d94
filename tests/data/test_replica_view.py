"""While data is read for a replica, and then only, rank and world size are those of the replica."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d, get_rank, get_world_size
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from lightning_mm5d.data import replica_view
from lightning_mm5d.data.loader import shard_loader
from lightning_mm5d.data.replica_view import as_replica, seen_replica


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _asked() -> Any:
    return get_rank(), get_world_size(), dist.get_rank(dist.group.WORLD), os.environ.get("RANK")


@pytest.mark.usefixtures("one_process")
def test_a_view_answers_the_thread_that_reads_and_no_collective() -> None:
    assert _asked() == (0, 1, 0, None)
    others: list[Any] = []
    with as_replica(2, 5):
        assert _asked() == (2, 5, 2, "2")
        assert seen_replica() == (2, 5)
        sampler = DistributedSampler(range(10))
        assert (sampler.rank, sampler.num_replicas) == (2, 5)
        with as_replica(3, 5):
            assert _asked() == (3, 5, 3, "3")
        assert _asked() == (2, 5, 2, "2")
        thread = threading.Thread(target=lambda: others.append((get_rank(), seen_replica())))
        thread.start()
        thread.join()
        texts: list[Any] = [None]
        dist.all_gather_object(texts, "a")
        assert texts == ["a"]
        group = dist.new_group([0])
        assert get_rank(group) == 0
        assert get_world_size(group) == 1
    assert others == [(0, None)]
    assert _asked() == (0, 1, 0, None)
    assert seen_replica() is None


def test_without_a_process_group_a_view_leaves_torch_its_error() -> None:
    with as_replica(1, 2), pytest.raises(ValueError, match="not been initialized"):
        get_rank()


def test_an_error_ends_a_view() -> None:
    with pytest.raises(KeyError), as_replica(1, 2):
        raise KeyError
    assert seen_replica() is None
    assert "RANK" not in os.environ


def test_views_of_two_threads_may_end_in_any_order() -> None:
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with as_replica(1, 2):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=read)
    with as_replica(0, 2):
        thread.start()
        inside.wait()
        assert seen_replica() == (0, 2)
    assert seen_replica() is None
    leave.set()
    thread.join()
    assert not replica_view.is_shown()


def test_a_torch_whose_private_names_have_moved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_get_default_group")
    with pytest.raises(ImportError, match=r"distributed_c10d\._get_default_group"), as_replica(0, 1):
        pass


class Stream(IterableDataset[Any]):
    """Yields samples of a rank and worker with the numbers of both; keeps its place, as readers of files do."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self.place = rank + number * world
        while self.place < 20 - rank:
            yield self.place
            self.place += world * count


def _read(loader: Any) -> Any:
    return [[part.tolist() for part in batch] if isinstance(batch, tuple) else batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_rank_of_several_replicas_reads_what_ranks_of_one_read(workers: int, persistent: bool) -> None:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
    alone = [
        shard_loader(DataLoader(Stream(), 3, **options), shards=[shard], num_shards=3, seed=0) for shard in range(3)
    ]
    several = shard_loader(DataLoader(Stream(), 3, **options), shards=[0, 2], num_shards=3, seed=0)
    for _ in range(2):
        first, _, third = map(_read, alone)
        assert first[0] == ([0, 3, 6] if workers == 0 else [0, 6, 12])
        pairs = itertools.zip_longest(first, third)
        assert _read(several) == [[batch for batch in pair if batch is not None] for pair in pairs]


class Workers:
    """Samples that tell who reads them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return [index, info.id, info.num_workers, int(os.environ["RANK"])]


def test_workers_of_a_rank_of_several_replicas_are_numbered_within_a_replica() -> None:
    sampler = DistributedSampler(range(12), 2, 0, shuffle=False)
    loader: Any = DataLoader(Workers(), 2, sampler=sampler, num_workers=1, collate_fn=list)  # type: ignore[arg-type]
    several = shard_loader(loader, shards=[0, 1], num_shards=2, seed=0)
    for batch in several:
        for replica, samples in enumerate(batch):
            assert [one[1:] for one in samples] == [[0, 1, replica]] * 2
