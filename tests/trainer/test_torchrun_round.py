"""Ranks of a round of torchrun agree on a name through a store in which earlier rounds have left theirs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_mm5d.config.errors import RankLostError
from lightning_mm5d.trainer.process_group import NAMED, agreed_name, round_name

LIMIT = timedelta(seconds=20)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def name_of(store: dist.Store, rank: int, world_size: int) -> str:
    own = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # type: ignore[attr-defined]
    return agreed_name(own, rank=rank, world_size=world_size, timeout=LIMIT)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 4), (1, 2, 1)])
def test_all_ranks_of_a_round_have_one_name_that_no_other_round_has(store: dist.Store, sizes: tuple[int, ...]) -> None:
    names = []
    for size in sizes:
        with ThreadPoolExecutor(size) as ranks:
            (name,) = set(ranks.map(name_of, [store] * size, range(size), [size] * size))
        names.append(name)
    assert len(set(names)) == len(sizes)


def test_ranks_that_do_not_come_are_named_though_they_came_to_an_earlier_round(store: dist.Store) -> None:
    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(name_of, [store] * 3, range(3), [3] * 3))
    with pytest.raises(RankLostError, match="ranks 1 and 2 did not come"):
        agreed_name(store, rank=0, world_size=3, timeout=timedelta(seconds=0.5))
    with pytest.raises(RankLostError, match="rank 0 did not come"):
        agreed_name(store, rank=2, world_size=3, timeout=timedelta(seconds=0.5))


def test_a_process_asks_once_and_a_process_below_it_asks_again(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMED, "1 of-another-process")
    first = round_name(store, rank=0, world_size=1, timeout=LIMIT)
    assert first != "of-another-process"
    assert round_name(store, rank=0, world_size=3, timeout=LIMIT) == first
